"""Holds what a user can set about a run. `loading` reads it from flags and files. Imports no torch.

Every field's docstring is its `--help` text. A value that cannot work raises `ConfigError` where it is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from asyncrl.config.algorithm import (
    SMALL_LAG,
    TRUST_REGIONS,
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    check_recipe,
)
from asyncrl.config.bounds import SECONDS, SEEDS, AtLeast, Bounded, Within, check_path
from asyncrl.config.sections import (
    ActorSettings,
    EvaluationSettings,
    GuardSettings,
    ImaginationSettings,
    LearnerSettings,
    LoraSettings,
    MonitorSettings,
    OptimizerSettings,
    ReplaySettings,
    SimulatorSettings,
    SuccessFrames,
    WeightSettings,
)
from asyncrl.errors import ConfigError
from asyncrl.observability.trackers import check_names
from asyncrl.registry import check_name


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
    devices. auto: rank 0 learns, the others imagine, unless a run
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
        if self.learner.frozen_precision == "float8" and not self.lora.rank:
            raise ConfigError(
                "--learner.frozen-precision is float8, but --lora.rank is 0: all weights are trained, and "
                "none is frozen. Set --lora.rank 32, or use --learner.frozen-precision stored."
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
