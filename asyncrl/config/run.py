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
from asyncrl.config.bounds import SECONDS, SEEDS, AtLeast, Bounded, check_path
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
    """Go on with --run-dir, or the newest run: from its newest checkpoint."""
    inline: bool = False
    """All roles in one process, in turns: for debugging and tests. The lag is exactly --replay.max-lag, and a
    run can be repeated exactly."""
    placement: str = "auto"
    """Roles of ranks: 'learner=0,actor=1-3'. A rank may be both. policy=2,world=3 is an actor on two devices.
    auto: rank 0 learns, the others imagine, or as the run that is resumed measured; collocated: all do both;
    disaggregated: the first half learns, the rest imagines; hybrid: all learn, the first half has policies,
    the second their worlds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models. auto: cuda if there is a GPU."""
    policy: str = "tabletop"
    """Policy to start from: 'tabletop' (shipped), a policy folder, a published OpenVLA(-OFT) folder, or your
    own package.module:Class@FOLDER."""
    world: str = "tabletop"
    """World model: 'tabletop' (shipped), a folder with world.json and weights, a folder of RLinf
    (RLinf-Wan-LIBERO-*), or your own package.module:Class@FOLDER. Or a simulator: tabletop_true (shipped),
    libero_spatial, maniskill_stack_cube ..., or your own package.module:make; a folder of that name is
    ./NAME."""
    reward: str = ""
    """Reward model of the frames: a folder, or your own class. Empty: the one in the world's folder."""
    policy_settings: tuple[str, ...] = ()
    """Settings of a published --policy folder, or of your own class, as key=value; in TOML
    [policy.settings]."""
    world_settings: tuple[str, ...] = ()
    """Settings of a simulator or of your own --world as key=value; in TOML [world.settings]."""
    reward_settings: tuple[str, ...] = ()
    """Settings of your own --reward as key=value; in TOML [reward.settings]."""
    start_states: str = "tabletop"
    """Starts of episodes: 'tabletop' (shipped), an HDF5 file of start states, or a folder of traj*.npy. By
    default a world's own: in its folder 'dataset', or shipped with it."""
    keyframes: bool = True
    """Use the keyframe files (*_kir.npy) of a folder of traj*.npy, which begin on the way to the goal."""
    checkpoint_every: Annotated[int, AtLeast(1, "it counts updates.", "Use 10.")] = 5
    """Updates between two checkpoints."""
    keep_checkpoints: Annotated[int, AtLeast(1, "the newest one must stay.", "Use 3.")] = 3
    """Newest checkpoints that are kept."""
    evaluate_every: Annotated[int, AtLeast(0, "it counts updates.", "Use 5, or 0 for never.")] = 0
    """Updates between two true measurements. The success in a simulator, besides the first and the last
    policy's. 0: never. The best version stays in checkpoints/best."""
    log_with: tuple[str, ...] = ()
    """Trackers besides TensorBoard: wandb, trackio, mlflow, aim, comet_ml, clearml, dvclive, swanlab
    (docs/tracking.md)."""
    batch_timeout: Annotated[
        float, AtLeast(1, "imagining a batch takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds without progress (admitted episodes, reported decisions) while the learner waits for a batch,
    after which the run ends with a checkpoint and an error."""
    startup_timeout: Annotated[
        float, AtLeast(1, "loading models takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds for all processes to load their models, meet, and receive the first weights."""
    hang_timeout: Annotated[float, AtLeast(1, "an update takes time.", "Use 900.", highest=SECONDS)] = 900.0
    """Seconds for a round of an actor, or for a micro-batch of an update. Then the stacks of all processes
    are written and the process is ended: an actor is respawned, a learner is a failed rank for torchrun."""
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
        for name in ("run_dir", "policy", "world", "reward", "start_states"):
            check_path(name.replace("_", "-"), getattr(self, name))
        if self.evaluate_every and self.inline:
            raise ConfigError(
                f"--evaluate-every is {self.evaluate_every}, but it takes a process of its own, and --inline "
                "is one process. Leave one of them out; `asyncrl evaluate RUN` measures afterwards."
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
        """`ActorSettings.success_frames` of this run."""
        return "last" if self.guard.kind == "lasting" else self.actor.success_frames

    @property
    def trust_region(self) -> float:
        """`CorrectionSettings.trust_region` of this run."""
        chosen = self.correction.trust_region
        return TRUST_REGIONS[self.replay.max_lag > SMALL_LAG] if chosen == "auto" else chosen
