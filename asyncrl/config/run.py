"""Holds what a user can set about a run. `loading` reads it from flags and files. Imports no torch.

Every field's docstring is its `--help` text. A value that cannot work raises `ConfigError` where it is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

from asyncrl.config.algorithm import (
    SMALL_LAG,
    TRUST_REGIONS,
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    LearnerSettings,
    LoraSettings,
    OptimizerSettings,
    check_recipe,
)
from asyncrl.config.bounds import SECONDS, SEEDS, THREADS, AtLeast, Bounded, Within, check_path
from asyncrl.config.guard import GuardSettings
from asyncrl.config.pace import PaceSettings
from asyncrl.errors import ConfigError
from asyncrl.observability.monitor_address import parse_address
from asyncrl.observability.trackers import check_names
from asyncrl.registry import check_name


@dataclass(frozen=True, kw_only=True)
class WorldDefaults:
    """What a world says about a run where its user said nothing."""

    source: str
    """What the run's banner calls them."""
    context: Literal["frames", "latents"] = "latents"
    """For --imagination.context auto."""
    steps: int = 0
    """For --imagination.steps 0; 0: the world does not count network calls."""
    max_decisions: int = 6
    """For --actor.max-decisions 0."""
    temperature: float = 0.0
    """At which those who published the world sampled the policy, for the banner only: how far a policy must
    be flattened depends on the policy and the algorithm. 0: nothing is known."""
    simulated: bool = False
    """Whether it is a simulator, for which only `max_decisions` means something."""


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings(Bounded):
    """What the world model computes, and how fast. docs/approximations.md says what each choice costs."""

    SECTION: ClassVar[str] = "imagination."

    context: Literal["auto", "frames", "latents"] = "auto"
    """What the next decision begins with. frames: the last four frames as uint8 pixels, encoded again, and
    the decoder starts anew behind the first frame, as published. latents: the last latent, and the decoder
    goes on from where it stopped. auto: what the world says; frames in a published folder, else latents."""
    decoder: Literal["full", "tiny"] = "full"
    """Which decoder draws the frames. tiny: one distilled from the full one by `asyncrl fit decoder`."""
    steps: Annotated[
        int, AtLeast(0, "it counts network calls.", "Use 0 for the folder's.", highest=10_000)
    ] = 0
    """Network calls per decision; 0 = as many as the world's folder says (published: 5)."""
    precision: Literal["stored", "float8"] = "stored"
    """What the denoiser's linear layers multiply. stored: numbers as the world is loaded with, as published.
    float8: rounded to 8 bits, which GPUs from H100 on multiply twice as fast, in half of the memory."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""
    fixed_shape: bool = False
    """Give every pass as many rows as it can have: what is free is filled up with copies. An episode then has
    the same bits whatever is imagined beside it; a pass always costs as much as with all --actor.slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context == "frames" and self.decoder == "tiny":
            raise ConfigError(
                "--imagination.context is frames and --imagination.decoder is tiny: frames are the exact "
                "path, and a distilled decoder is not exact. Use --imagination.context latents, or the full "
                "decoder."
            )


FITTER: Final = "fitter"
"""Role of the rank that refits the world, in --placement."""


def names_fitter(placement: str) -> bool:
    """Whether --placement gives the fitter a rank, as far as can be told without reading all of it.

    >>> names_fitter("learner=0,actor=0, fitter=1"), names_fitter("auto")
    (True, False)
    """
    return any(item.strip().startswith(FITTER) for item in placement.split(","))


ReplaySampler = Literal["oldest", "newest", "uniform", "prioritized"]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Bounded):
    """The HDF5 replay between the actors and the learner."""

    SECTION: ClassVar[str] = "replay."

    max_lag: Annotated[
        int, AtLeast(0, "a lag cannot be negative.", "Use 2, or --synchronous for 0.", highest=100_000)
    ] = 2
    """No decision older than this many policy versions is trained on; checked at admission and sampling."""
    max_world_lag: Annotated[int, AtLeast(0, "a lag cannot be negative.", "Use 1.")] = 1
    """No episode is trained on that a world imagined which is more versions older than the newest one."""
    group_timeout: Annotated[
        float, AtLeast(1, "imagining a group takes time.", "Use 300.", highest=SECONDS)
    ] = 300.0
    """Seconds without a decision of its actor until an incomplete group is given up and counted."""
    heartbeat_timeout: Annotated[
        float, AtLeast(3, "actors say every second that they are there.", "Use 30.", highest=SECONDS)
    ] = 30.0
    """Seconds without any sign of life after which an actor's open groups are given up."""
    keep_video_every: Annotated[int, AtLeast(0, "it counts groups.", "Use 0 for never.")] = 16
    """Keep every imagined frame of each n-th group, for movies and for data sets with one sample per step
    (`asyncrl replay export`); 0 = never."""
    max_gigabytes: Annotated[float, AtLeast(0.01, "the run must fit.", "Use 8.")] = 8.0
    """Oldest groups that were already used are deleted beyond this size."""
    read_ahead_gigabytes: Annotated[float, AtLeast(0, "memory cannot be negative.", "Use 8.")] = 8.0
    """Memory of the replay for complete groups that it reads before the learner asks for them. What does not
    fit is checked, and read again when a learner rank fetches it. Without effect under --inline."""
    listen: str = ""
    """Address the replay listens on, like tcp://10.0.0.5:5555; beyond loopback it needs --replay.keys. Empty:
    a private socket on this host. Without effect under --inline."""
    keys: str = ""
    """Folder of key files from `asyncrl keys`: traffic is encrypted, and only listed clients are admitted."""
    compact_at_end: bool = False
    """When the run has made all its updates, compress the pictures of groups that are no longer needed, as
    `asyncrl replay compact` does."""
    max_age_versions: Annotated[int, AtLeast(0, "it counts versions.", "Use 0 for never.")] = 0
    """Groups that were already used are deleted when their newest decision is older than this. 0: never."""
    quarantine_after: Annotated[int, AtLeast(1, "it counts failures.", "Use 2.")] = 2
    """A start state is not used any more after this many groups of it could not be imagined: something was
    not finite, or raised an error."""
    max_reuse: Annotated[int, AtLeast(1, "a group is used at least once.", "Use 1.")] = 1
    """A group is trained on in up to this many updates, as long as the lag bound lets it."""
    sampler: ReplaySampler = "oldest"
    """Which groups an update gets. prioritized: by chance, in proportion to the spread of their returns,
    which changes what is maximised (docs/staleness.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys and not self.listen:
            raise ConfigError(
                f"--replay.keys is {self.keys}, but the replay's private socket takes no keys. "
                "Set --replay.listen tcp://ADDRESS:PORT too, or leave the keys out."
            )


SuccessFrames = int | Literal["last"]
"""See `ActorSettings.success_frames`."""


@dataclass(frozen=True, kw_only=True)
class ActorSettings(Bounded):
    """How an actor makes episodes."""

    SECTION: ClassVar[str] = "actor."

    slots: Annotated[int, AtLeast(1, "an actor imagines at least one episode.", "Use 16.", highest=4096)] = 16
    """Episodes imagined at the same time by one actor."""
    pipeline_stages: Literal[1, 2] = 1
    """2: the slots decide in two halves in turns, so that the host works on one half while the GPU works on
    the other, and policy and world on two GPUs work at the same time (RLinf: pipeline_stage_num)."""
    offload: bool = False
    """Keep policy, world and reward model in pinned host memory while there is nothing to imagine. Without
    effect under --inline."""
    max_decisions: Annotated[
        int, AtLeast(0, "an episode has a decision.", "Use 6, or 0 for what the world says.", highest=10_000)
    ] = 0
    """An episode is cut after this many decisions (of 8 steps each). 0: what the world says; 32 in a
    published folder, in a simulator what its horizon has room for, else 6."""
    success_threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.", open_below=True)] = (
        0.7
    )
    """The reward model's probability from which a step counts as success."""
    success_frames: SuccessFrames = 1
    """Which frames at --actor.success-threshold or above make a success. A number k: the first k in a row; 1:
    the first of all. last: the last frame of a decision, so that what was gone again at its end does not
    count. docs/worlds.md says what each rule gets wrong."""
    threads: Annotated[
        int, AtLeast(0, "it counts threads.", "Use 0 to let asyncrl choose.", highest=THREADS)
    ] = 0
    """CPU threads of an actor process. 0: two where every actor has two cores, else one."""
    max_respawns: int = 5
    """An actor that dies comes back this often; one death more ends the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.success_frames != "last":
            AtLeast(1, "it counts scoring frames in a row.", "Use 1, or the word last.").check(
                "actor.success-frames", self.success_frames
            )
        AtLeast(self.pipeline_stages, "each of --actor.pipeline-stages needs one.", "Use 16.").check(
            "actor.slots", self.slots
        )


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings(Bounded):
    """The simulator that --world names."""

    SECTION: ClassVar[str] = "simulator."

    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 0 for the actor's own.", highest=THREADS)
    ] = 0
    """Processes of each actor that simulate; --actor.slots are shared out to them. 0: the actor's own process
    does, and the policy waits meanwhile. LIBERO can have one slot in each."""
    starts: Literal["random", "stored", "evaluation"] = "random"
    """Where episodes begin. random: at starts that are drawn below the seeds of evaluations. stored: at those
    stored starts that no evaluation plays, from the 50th of each task on. evaluation: at all stored starts,
    also those that `asyncrl evaluate` plays, so that its numbers say nothing of new ones."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0 for the simulator's.", highest=100_000)] = 0
    """Steps until an episode is truncated; 0: the simulator's own."""
    image_size: Annotated[
        int, AtLeast(0, "it counts pixels.", "Use 0 for the simulator's.", highest=4096)
    ] = 0
    """Height and width of the pictures in pixels; 0: the simulator's own, where it has none the policy's."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Bounded):
    """How --evaluate-every measures the true success of the run's policy, in a process that nobody waits for.

    With the run's own temperature and top-k, from starts that nothing is trained on, the same ones each time.
    """

    SECTION: ClassVar[str] = "evaluation."

    episodes: Annotated[int, AtLeast(1, "it counts episodes.", "Use 64.", highest=100_000)] = 64
    """Episodes that are played of each version. More make the interval narrower, and take longer."""
    simulator: str = ""
    """Simulator to play in; empty: the run's own, the one whose tasks the start states are of. Or
    package.module:make."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 1, or 0 for none of its own.", highest=THREADS)
    ] = 1
    """Processes that simulate. LIBERO has one episode in each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy plays, and world and reward model draw; auto: on the learner's device, beside it."""
    movies: Annotated[int, AtLeast(0, "it counts episodes.", "Use 6, or 0 for none.", highest=64)] = 6
    """Episodes of each version that are drawn into RUN/videos: the truth beside what the run's world model
    imagines of the same actions, and both verdicts."""


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Bounded):
    """How new weights reach the actors."""

    SECTION: ClassVar[str] = "weights."

    transport: str = "auto"
    """auto: gloo on CPU, cuda_ipc when learner and actors share one GPU, nccl when each has its own, nccl+ipc
    when some actors are on the first learner's GPU and the others on one each. Or package.module:Class."""
    between_hosts: Literal["tcp", "gloo", "nccl"] = "tcp"
    """How weights travel to the other hosts of a run, once to each. tcp: encrypted, fetched by those who want
    them. gloo, nccl: broadcast to all of them at once, NOT encrypted: only on a network that nobody else is
    on. nccl takes one GPU of each host. Actors that join always fetch by tcp."""
    timeout: Annotated[float, AtLeast(1, "a broadcast takes time.", "Use 60.", highest=SECONDS)] = 60.0
    """Seconds after which an actor that does not take part in a broadcast is left behind, and one that joined
    and cannot reach the learner ends."""
    listen: str = ""
    """Address where actors on other hosts fetch the weights, like tcp://10.0.0.5:5556. Empty: the address of
    --replay.listen with a port that the system chooses. It takes the same --replay.keys."""


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Bounded):
    """What others can read of a run over the network."""

    SECTION: ClassVar[str] = "monitor."

    listen: str = ""
    """HOST:PORT, or PORT for this host only, where the learner answers Prometheus (/metrics) and says whether
    the run makes progress (/healthz). Empty: nowhere. There is no key: docs/cluster.md says what can be
    read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            parse_address(self.listen)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Bounded):
    """Train a vision-language-action policy inside a world model or a simulator."""

    updates: Annotated[int, AtLeast(1, "a run without updates trains nothing.", "Use 40.")] = 10
    """Optimizer updates to make in all."""
    run_dir: str = "runs/{time}"
    """Folder of the run; {time} is replaced by the date and time."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Seed of start states, episodes and noise."""
    resume: bool = False
    """Continue the run in --run-dir (default: the newest run) from its newest checkpoint."""
    inline: bool = False
    """All roles in one process, in turns: for debugging, tests and experiments. The lag is exactly
    --replay.max-lag, and a run repeats itself."""
    synchronous: bool = False
    """Actors wait for every update, so that the lag is always 0: for comparison."""
    placement: str = "auto"
    """Which rank is what: 'learner=0,actor=1-3'. A rank may be both. policy=2,world=3 is an actor on two
    devices, fitter=4 refits the world (--pace.every). auto: rank 0 learns, the others imagine, unless a run
    measured what keeps both busy (--balance-from); collocated: all do both; disaggregated: the first half
    learns, the rest imagines; hybrid: all learn, the first half has policies, the second their worlds."""
    balance_from: str = ""
    """Run whose balance.json --placement auto chooses by: how many of the ranks learn, so that both sides are
    busy. It had the same models and number of ranks. Empty: the run that is resumed, if it has one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run. auto: cuda where there is a GPU."""
    policy: str = "tabletop"
    """Policy to start from: 'tabletop' (shipped), a policy folder, a published OpenVLA(-OFT) folder, or a
    class of your own: package.module:Class@FOLDER."""
    world: str = "tabletop"
    """World model to imagine in: 'tabletop' (shipped), a folder with world.json and its weights, or a folder
    as RLinf publishes them (RLinf-Wan-LIBERO-*), or a class of your own: package.module:Class@FOLDER. Or a
    simulator to play in: tabletop_true (shipped), libero_spatial, maniskill_stack_cube ..., or your own
    package.module:make; a folder called like one is written ./NAME."""
    reward: str = ""
    """Reward model that judges the frames: a folder, or a class of your own. Empty: the one in the world's
    folder."""
    policy_settings: tuple[str, ...] = ()
    """Settings of --policy as key=value: of a published folder what it does not say about itself, or what
    your own class takes. In TOML a table [policy.settings]."""
    world_settings: tuple[str, ...] = ()
    """Settings of a simulator or of your own --world as key=value; in TOML [world.settings]."""
    reward_settings: tuple[str, ...] = ()
    """Settings of your own --reward as key=value; in TOML [reward.settings]."""
    start_states: str = "tabletop"
    """Where episodes begin: 'tabletop' (shipped), an HDF5 file of start states, or a folder of traj*.npy.
    Left at its default, a world brings its own: in its folder 'dataset', or shipped with it."""
    keyframes: bool = True
    """Of a folder of traj*.npy use the keyframe files (*_kir.npy) too, which begin on the way to the goal."""
    keyframe_share: Annotated[
        float, Within(-1, 1, "it is a share of the groups.", "Use 0.5, or -1 for no share of their own.")
    ] = -1.0
    """Share of the groups that begin at key frames (`asyncrl fit keyframes`), spread evenly. An episode from
    there has the decisions that were left. 0: none. -1: key frames come as often as any start state."""
    checkpoint_every: Annotated[int, AtLeast(1, "it counts updates.", "Use 10.")] = 5
    """Updates between two checkpoints."""
    keep_checkpoints: Annotated[int, AtLeast(1, "the newest one must stay.", "Use 3.")] = 3
    """Newest checkpoints that are kept."""
    evaluate_every: Annotated[int, AtLeast(0, "it counts updates.", "Use 5, or 0 for never.")] = 0
    """Updates between two measurements of the true success, in a simulator, beside the training; the first
    policy and the last are measured too. 0: never. The best version stays in checkpoints/best."""
    log_every: Annotated[int, AtLeast(1, "it counts updates.", "Use 1.")] = 1
    """Updates between two console rows."""
    log_with: tuple[str, ...] = ()
    """Trackers that get every update too: wandb, trackio, mlflow, aim, comet_ml, clearml, dvclive, swanlab.
    TensorBoard's files are written in any case (docs/tracking.md)."""
    batch_timeout: Annotated[
        float, AtLeast(1, "imagining a batch takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds the learner waits for a batch without a sign of progress (an episode that was admitted, or
    decisions that an actor reported) before it ends the run with a checkpoint and an error."""
    startup_timeout: Annotated[
        float, AtLeast(1, "loading models takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds that all processes have to load their models, meet, and take the first weights."""
    hang_timeout: Annotated[float, AtLeast(1, "an update takes time.", "Use 900.", highest=SECONDS)] = 900.0
    """Seconds that one round of an actor, or an update without a sign of progress (a micro-batch that is
    done), may take. Then the stacks of all processes are written and the process is ended: an actor is
    respawned, a learner is a failed rank for torchrun."""
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    actor: ActorSettings = field(default_factory=ActorSettings)
    imagination: ImaginationSettings = field(default_factory=ImaginationSettings)
    simulator: SimulatorSettings = field(default_factory=SimulatorSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    pace: PaceSettings = field(default_factory=PaceSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("run_dir", "policy", "world", "reward", "start_states", "balance_from"):
            check_path(name.replace("_", "-"), getattr(self, name))
        if self.evaluate_every and self.inline:
            raise ConfigError(
                f"--evaluate-every is {self.evaluate_every}, but it takes a process of its own, and --inline "
                "is one process. Leave one of them out; `asyncrl evaluate RUN` measures afterwards."
            )
        if self.balance_from and self.placement != "auto":
            raise ConfigError(
                f"--balance-from is {self.balance_from}, but --placement is {self.placement}, and only auto "
                "chooses by what a run measured. Leave one of them out."
            )
        if names_fitter(self.placement):
            self._check_fitter()
        if self.replay.max_reuse > self.max_lag + 1:
            raise ConfigError(
                f"--replay.max-reuse is {self.replay.max_reuse}, but with a lag of at most {self.max_lag} "
                f"(--replay.max-lag, --synchronous) a group lasts for {self.max_lag + 1} updates, "
                f"once in each. Use at most {self.max_lag + 1}, or a larger lag."
            )
        if self.guard.kind == "lasting" and self.actor.success_frames not in (1, "last"):
            raise ConfigError(
                f"--guard.kind is lasting and --actor.success-frames is {self.actor.success_frames}, but a "
                "success is found by one rule: lasting looks at a decision's last frame. Leave one out."
            )
        if self.pace.every and self.imagination.precision != "stored":
            raise ConfigError(
                f"--pace.every is {self.pace.every} and --imagination.precision is "
                f"{self.imagination.precision}, but rounded weights cannot be replaced by a refit's. "
                "Use --imagination.precision stored, or leave --pace.every out."
            )
        if self.weights.listen and not self.replay.listen:
            raise ConfigError(
                f"--weights.listen is {self.weights.listen}, but actors join by --replay.listen first, "
                "which is not set. Set --replay.listen tcp://ADDRESS:PORT too, or leave --weights.listen out."
            )
        if self.weights.transport != "auto":
            check_name("transport", self.weights.transport)
        check_recipe(self.algorithm, self.correction, self.critic)
        check_names(self.log_with)

    def _check_fitter(self) -> None:
        """Refuse a fitter of its own rank where there is nothing to fit, or one process."""
        if not self.pace.every:
            raise ConfigError(
                f"--placement is {self.placement}, but --pace.every is 0, so that no world is refitted and a "
                "fitter has nothing to do. Set --pace.every, or leave fitter= out."
            )
        if self.inline:
            raise ConfigError(
                f"--placement is {self.placement}, but --inline is one process, in which the fitter takes "
                "its turn. Leave fitter= out, or --inline."
            )

    @property
    def success_frames(self) -> SuccessFrames:
        """The rule of `ActorSettings.success_frames` that holds in this run."""
        return "last" if self.guard.kind == "lasting" else self.actor.success_frames

    @property
    def max_lag(self) -> int:
        """The lag bound that holds in this run, in policy versions."""
        return 0 if self.synchronous else self.replay.max_lag

    @property
    def trust_region(self) -> float:
        """The bound of `CorrectionSettings.trust_region` that holds in this run."""
        chosen = self.correction.trust_region
        return TRUST_REGIONS[self.max_lag > SMALL_LAG] if chosen == "auto" else chosen
