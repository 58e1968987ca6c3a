"""What a user can set. Flags and TOML files in, one frozen `TrainConfig` out. Imports no torch.

Every field's docstring is its `--help` text. A value that cannot work raises `ConfigError` where it is set.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.algorithm import (
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    LearnerSettings,
    LoraSettings,
    OptimizerSettings,
    at_least,
    check_recipe,
)
from asyncrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings:
    """What the world model computes, and how fast. docs/approximations.md says what each choice costs."""

    memory: Literal["frames", "latents"] = "latents"
    """What the next decision begins with. frames: the last four frames as uint8 pixels, encoded again, and
    the decoder starts anew behind the first frame, as published. latents: the last latent, and the decoder
    goes on from where it stopped."""
    decoder: Literal["full", "tiny"] = "full"
    """Which decoder draws the frames. tiny: one distilled from the full one by `asyncrl fit decoder`."""
    steps: int = 0
    """Network calls per decision; 0 = as many as the world's folder says (published: 5)."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""

    def __post_init__(self) -> None:
        if self.memory == "frames" and self.decoder == "tiny":
            raise ConfigError(
                "--imagination.memory is frames and --imagination.decoder is tiny: frames are the exact "
                "path, and a distilled decoder is not exact. Use --imagination.memory latents, or the full "
                "decoder."
            )
        if self.steps < 0:
            raise ConfigError(
                f"--imagination.steps is {self.steps}, but it counts network calls. Use 0 for the folder's."
            )


ReplayOrder = Literal["oldest", "newest", "uniform", "prioritized"]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """The HDF5 replay between the actors and the learner."""

    max_lag: int = 2
    """No decision older than this many policy versions is trained on; checked at admission and sampling."""
    group_deadline: float = 300.0
    """Seconds after its first episode until an incomplete group is given up and counted."""
    silence: float = 30.0
    """Seconds without any sign of life after which an actor's open groups are given up."""
    keep_video_every: int = 16
    """Keep every imagined frame of each n-th group for inspection; 0 = never."""
    max_gigabytes: float = 8.0
    """Oldest groups that were already used are deleted beyond this size."""
    listen: str = ""
    """Address the replay listens on, like tcp://10.0.0.5:5555; beyond loopback it needs --replay.keys. Empty:
    a private socket on this host. Without effect under --inline."""
    keys: str = ""
    """Folder of key files from `asyncrl keys`: traffic is encrypted, and only listed clients are admitted."""
    max_age_versions: int = 0
    """Groups that were already used are deleted when their newest decision is older than this. 0: never."""
    quarantine_after: int = 2
    """A start state is not used any more after this many groups of it could not be imagined: something was
    not finite, or raised an error."""
    uses: int = 1
    """A group is trained on in up to this many updates, as long as the lag bound lets it."""
    order: ReplayOrder = "oldest"
    """Which groups an update gets. prioritized: by chance, in proportion to the spread of their returns."""
    shared_megabytes: int = 256
    """Shared memory (MiB) through which an actor hands pictures to a replay on its host; what does not fit
    goes through the socket. Memory is taken when it is used. 0: sockets only."""

    def __post_init__(self) -> None:
        if self.keys and not self.listen:
            raise ConfigError(
                f"--replay.keys is {self.keys}, but the replay's private socket takes no keys. "
                "Set --replay.listen tcp://ADDRESS:PORT too, or leave the keys out."
            )
        at_least(
            "replay.max-lag", self.max_lag, 0, "a lag cannot be negative.", "Use 2, or --synchronous for 0."
        )
        at_least("replay.group-deadline", self.group_deadline, 1, "imagining a group takes time.", "Use 300.")
        at_least("replay.silence", self.silence, 3, "actors say every second that they are there.", "Use 30.")
        at_least("replay.keep-video-every", self.keep_video_every, 0, "it counts groups.", "Use 0 for never.")
        at_least("replay.max-gigabytes", self.max_gigabytes, 0.01, "the run must fit.", "Use 8.")
        at_least(
            "replay.max-age-versions", self.max_age_versions, 0, "it counts versions.", "Use 0 for never."
        )
        at_least(
            "replay.shared-megabytes", self.shared_megabytes, 0, "it is a size.", "Use 256, or 0 for none."
        )
        at_least("replay.quarantine-after", self.quarantine_after, 1, "it counts failures.", "Use 2.")
        at_least("replay.uses", self.uses, 1, "a group is used at least once.", "Use 1.")


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """How an actor imagines."""

    slots: int = 16
    """Episodes imagined at the same time by one actor."""
    stages: Literal[1, 2] = 1
    """2: the slots decide in two halves in turns, so that the host works on one half while the GPU works on
    the other, and policy and world on two GPUs work at the same time (RLinf: pipeline_stage_num)."""
    offload: bool = False
    """Keep policy, world and reward model in pinned host memory while there is nothing to imagine. Without
    effect under --inline."""
    max_decisions: int = 6
    """An episode is cut after this many decisions (of 8 steps each)."""
    success_threshold: float = 0.7
    """The reward model's probability from which a step counts as success."""
    threads: int = 0
    """CPU threads of an actor process. 0: two where every actor has two cores, else one."""
    max_respawns: int = 5
    """An actor that dies comes back this often; one death more ends the run."""

    def __post_init__(self) -> None:
        at_least("actor.slots", self.slots, 1, "an actor imagines at least one episode.", "Use 16.")
        at_least("actor.slots", self.slots, self.stages, "each of --actor.stages needs one.", "Use 16.")
        at_least("actor.max-decisions", self.max_decisions, 1, "an episode has a decision.", "Use 6.")
        at_least("actor.threads", self.threads, 0, "it counts threads.", "Use 0 to let asyncrl choose.")
        if not 0 < self.success_threshold <= 1:
            raise ConfigError(
                f"--actor.success-threshold is {self.success_threshold}, but it is a probability. Use 0.7."
            )


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """How new weights reach the actors."""

    transport: Literal["auto", "gloo", "nccl", "cuda_ipc", "nccl+ipc"] = "auto"
    """auto: gloo on CPU, cuda_ipc when learner and actors share one GPU, nccl when each has its own, nccl+ipc
    when some actors are on the first learner's GPU and the others on one each."""
    deadline: float = 60.0
    """Seconds after which an actor that does not take part in a broadcast is left behind, and one that joined
    and cannot reach the learner ends."""
    listen: str = ""
    """Address where actors on other hosts fetch the weights, like tcp://10.0.0.5:5556. Empty: the address of
    --replay.listen with a port that the system chooses. It takes the same --replay.keys."""

    def __post_init__(self) -> None:
        at_least("weights.deadline", self.deadline, 1, "a broadcast takes time.", "Use 60.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a vision-language-action policy inside a world model."""

    updates: int = 10
    """Optimizer updates to make in all."""
    run_dir: str = "runs/{time}"
    """Folder of the run; {time} is replaced by the date and time."""
    seed: int = 0
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
    devices. auto: rank 0 learns, the others imagine; collocated: all do both; disaggregated: the first half
    learns, the rest imagines; hybrid: all learn, the first half has policies, the second their worlds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run. auto: cuda where there is a GPU."""
    policy: str = "tabletop"
    """Policy to start from: 'tabletop' (shipped) or a policy folder, for example from `asyncrl convert`."""
    world: str = "tabletop"
    """World model to imagine in: 'tabletop' (shipped), a folder with world.json and its weights, or a folder
    as RLinf publishes them (RLinf-Wan-LIBERO-*)."""
    start_states: str = "tabletop"
    """Where episodes begin: 'tabletop' (shipped), an HDF5 file of start states, or a folder of traj*.npy.
    Left at its default, a world in another folder brings its own, if that has a folder 'dataset'."""
    keyframes: bool = True
    """Of a folder of traj*.npy use the keyframe files (*_kir.npy) too, which begin on the way to the goal."""
    checkpoint_every: int = 5
    """Updates between two checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept."""
    log_every: int = 1
    """Updates between two console rows."""
    max_wait: float = 600.0
    """Seconds the learner waits for one batch before it ends the run with an error."""
    start_deadline: float = 600.0
    """Seconds that all processes have to load their models, meet, and take the first weights."""
    hang_after: float = 900.0
    """Seconds that one round of an actor or one update may take. Then the stacks of all processes are written
    and the process is ended: an actor is respawned, a learner is a failed rank for torchrun."""
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    actor: ActorSettings = field(default_factory=ActorSettings)
    imagination: ImaginationSettings = field(default_factory=ImaginationSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)

    def __post_init__(self) -> None:
        at_least("updates", self.updates, 1, "a run without updates trains nothing.", "Use 40.")
        at_least("checkpoint-every", self.checkpoint_every, 1, "it counts updates.", "Use 10.")
        at_least("keep-checkpoints", self.keep_checkpoints, 1, "the newest one must stay.", "Use 3.")
        at_least("max-wait", self.max_wait, 1, "imagining a batch takes time.", "Use 600.")
        at_least("start-deadline", self.start_deadline, 1, "loading models takes time.", "Use 600.")
        at_least("hang-after", self.hang_after, 1, "an update takes time.", "Use 900.")
        at_least("log-every", self.log_every, 1, "it counts updates.", "Use 1.")
        if self.replay.uses > self.max_lag + 1:
            raise ConfigError(
                f"--replay.uses is {self.replay.uses}, but with a lag of at most {self.max_lag} "
                f"(--replay.max-lag, --synchronous) a group lasts for {self.max_lag + 1} updates, "
                f"once in each. Use at most {self.max_lag + 1}, or a larger lag."
            )
        if self.weights.listen and not self.replay.listen:
            raise ConfigError(
                f"--weights.listen is {self.weights.listen}, but actors join by --replay.listen first, "
                "which is not set. Set --replay.listen tcp://ADDRESS:PORT too, or leave --weights.listen out."
            )
        check_recipe(self.algorithm, self.correction, self.critic)

    @property
    def max_lag(self) -> int:
        """The lag bound that holds in this run, in policy versions."""
        return 0 if self.synchronous else self.replay.max_lag


def to_json(config: TrainConfig) -> str:
    """Write a configuration so that `load_file` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_file(path: Path) -> TrainConfig:
    """Read a configuration from TOML (or a run's config.json); absent settings keep their defaults.

    Raises:
        ConfigError: the file is missing, not valid, or has an unknown or wrong-typed setting.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). `asyncrl configs` lists the shipped ones."
        ) from None
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:] or 'TOML'}: {error}.") from None
    return overlay(TrainConfig(), table, str(path))


def overlay(config: Any, table: Any, where: str) -> Any:
    """Return `config` with the settings of `table` (nested like the configuration) in place of its own."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of settings, found {type(table).__name__}.")
    known = {f.name: f for f in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Perhaps you meant {near[0]!r}." if near else f" Known: {', '.join(sorted(known))}."
            raise ConfigError(f"{where} sets {key!r}, which does not exist.{hint}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            changes[name] = overlay(current, value, f"{where} [{key}]")
        else:
            choices = typing.get_args(typing.get_type_hints(type(config))[name])
            changes[name] = _typed(value, current, f"{where}: {key}", choices)
    return dataclasses.replace(config, **changes)


def _typed(value: Any, current: Any, where: str, choices: tuple[str, ...]) -> Any:
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(current):
        raise ConfigError(f"{where} is {value!r}, expected {type(current).__name__} like {current!r}.")
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"Perhaps you meant {near[0]!r}." if near else f"Choose one of: {', '.join(choices)}."
        raise ConfigError(f"{where} is {value!r}, which does not exist. {hint}")
    return value


def parse(arguments: list[str], prog: str = "asyncrl train", description: str | None = None) -> TrainConfig:
    """Read `[CONFIG.toml] [--flags]`: the file gives the defaults, the flags win. Help and errors exit."""
    import tyro

    arguments = list(arguments)
    default = TrainConfig()
    if arguments and arguments[0].endswith((".toml", ".json")):
        default = load_file(Path(arguments.pop(0)))
    return tyro.cli(TrainConfig, args=arguments, default=default, prog=prog, description=description)
