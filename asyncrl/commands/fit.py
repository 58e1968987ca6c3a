"""`asyncrl fit policy|world|reward|starts|decoder`: fit models to recordings, and pick start states."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from asyncrl.commands.fit_decoder import FitDecoder, fit_decoder_command
from asyncrl.config.algorithm import LoraSettings
from asyncrl.config.bounds import SEEDS, AtLeast, Bounded, Within
from asyncrl.errors import ConfigError
from asyncrl.fitting.datasets.settings import DataSetSettings
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.interface import (
    CONTEXT_SIGMA,
    DEFAULT_KIND,
    Size,
    WorldOptions,
    check_kind,
    check_recordings,
    check_same_size,
    fit_class,
    load_fitted,
)
from asyncrl.launch.placement import pick_device
from asyncrl.launch.rendezvous import local_rank, rank, world_size
from asyncrl.storage.asset_paths import policy_folder, world_folder
from asyncrl.storage.atomic import read_json

if TYPE_CHECKING:
    import torch

    from asyncrl.fitting.frame_file import FrameFile

MOST_EXAMPLES = 65_536
"""Examples of a step: more are computed in several steps."""


@dataclass(frozen=True, kw_only=True)
class _FromData(Bounded):
    data: tuple[Path, ...]
    """Recording folders, LeRobot v3 folders, or robomimic's HDF5 files."""
    dataset: DataSetSettings = field(default_factory=DataSetSettings)
    """How LeRobot and robomimic are read."""


@dataclass(frozen=True, kw_only=True)
class _FitSettings(_FromData):
    device: str = "auto"
    """cpu, cuda, or auto."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Of the weights and the order of examples."""


def _refuse_with_refine(config: FitPolicy | FitWorld, **defaults: str) -> None:
    for name, default in defaults.items():
        if config.refine and (value := getattr(config, name)) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is about fresh weights, but with --refine "
                f"{config.refine} that is decided already. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class FitPolicy(_FitSettings):
    """Behaviour cloning of an OpenVLA-OFT policy, at the recordings' picture size."""

    out: Path
    """Folder for the policy."""
    size: Size = "tiny"
    """tiny: about 2 million parameters. small: 11 million."""
    statistics: Literal["auto", "q01_q99", "none"] = "auto"
    """What the 256 tokens of a number span. q01_q99: the recordings' first to 99th percentile, the gripper
    apart. none: -1 to 1. auto: none for tabletop, q01_q99 for every other simulator."""
    refine: str = ""
    """Policy to start from instead of fresh weights, also a published OpenVLA-OFT: its size and words stay,
    and its statistics unless --statistics says otherwise."""
    policy_settings: tuple[str, ...] = ()
    """Of a published --refine: what it does not say about itself, as key=value; see `asyncrl train`."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    precision: Literal["fp32", "bf16"] = "fp32"
    """With --refine. bf16: passes in bfloat16, and weights that rest stay as they are. fp32: these become
    float32 too, and a GPU rounds only the factors of products. What is trained, and the optimizer's state,
    are float32 in both."""
    micro_batch: Annotated[int, AtLeast(0, "it counts examples.", "Use 0 for all.")] = 0
    """With --refine: examples that a rank computes at once; 0: all of its part of --batch."""
    gradient_checkpointing: bool = False
    """With --refine: compute the layers again in the backward pass instead of keeping what they made."""
    average: Annotated[float, Within(0, 1, "it is a share.", "Use 0.999, or 0 for none.")] = 0.999
    """Decay of the moving average of what is trained, which is what is written; 0: the last weights are."""
    world: str = ""
    """World folder whose autoencoder redraws half of the frames: the policy will see imagined ones."""
    steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 10_000
    """Optimizer steps."""
    batch: Annotated[
        int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=MOST_EXAMPLES)
    ] = 256
    """Examples per step."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 1e-3
    """Peak learning rate."""
    compile: bool = False
    """Compile the model first: a minute or two at the start, then about twice as fast on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_with_refine(self, size="tiny")
        fresh = [] if self.refine else [name for name, is_set in self._of_refine().items() if is_set]
        if fresh:
            raise ConfigError(
                f"--{fresh[0].replace('_', '-')} is about fine-tuning, but --refine names no policy. Give "
                "one, or leave it out: fresh policies are small."
            )

    def _of_refine(self) -> dict[str, bool]:
        """Return which settings of fine-tuning are set."""
        return {
            "policy_settings": bool(self.policy_settings),
            "lora.rank": self.lora.rank > 0,
            "precision": self.precision != "fp32",
            "micro_batch": self.micro_batch > 0,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def fine_tunes(self) -> bool:
        """Whether a large policy may be meant: it is then written in the type that it computes in."""
        if not self.refine:
            return False
        return any(self._of_refine().values()) or self.statistics != "auto" or world_size() > 1


@dataclass(frozen=True, kw_only=True)
class FitWorld(_FitSettings):
    """A world model at the recordings' picture size: its autoencoder, then the network that draws latents."""

    out: Path
    """Folder for the world model."""
    kind: str = DEFAULT_KIND
    """wan, opensora or evac: which published architecture and objective. docs/fitting.md compares them."""
    size: Size = "tiny"
    """Of the network that draws latents. tiny: 3 to 4 million parameters. small: 7 to 12 million."""
    vae_size: Size = "tiny"
    """Of the autoencoder. tiny: 1 to 2 million parameters. small: about 2.4 times as many."""
    autoencoder: str = ""
    """World folder whose autoencoder is taken over instead of fitting one. Of opensora and evac, whose
    autoencoders are alike: frames are then the same latents in both. No --vae-steps are made."""
    vae_steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 7_000
    """Optimizer steps of the autoencoder."""
    vae_batch: Annotated[
        int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=MOST_EXAMPLES)
    ] = 48
    """Clips of 17 frames per step; where each frame is encoded by itself, 17 frames from anywhere."""
    vae_learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 2e-3
    """Peak learning rate of the autoencoder."""
    steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 30_000
    """Optimizer steps of the network that draws latents."""
    batch: Annotated[
        int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=MOST_EXAMPLES)
    ] = 512
    """Windows per step."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 1e-3
    """Peak learning rate of the network that draws latents."""
    context_sigma: Annotated[float, Within(0, 1000, "it is a width.", "Use 0.1.")] = CONTEXT_SIGMA
    """Noise on the memory latent while training, against drift. Of wan only: others have a published one."""
    camera: str = ""
    """Of evac only: JSON file that says where the camera stands, for simulators of which it is not known."""
    refine: str = ""
    """World folder to start from instead of fresh weights; its autoencoder is kept as it is."""
    version: Annotated[int, AtLeast(0, "versions are counted.", "Use 0.")] = 0
    """World version that episodes will carry."""
    compile: bool = False
    """Compile the model first: a minute or two at the start, then about twice as fast on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.kind)
        _refuse_with_refine(self, kind=DEFAULT_KIND, size="tiny", vae_size="tiny", camera="", autoencoder="")


@dataclass(frozen=True, kw_only=True)
class FitReward(_FitSettings):
    """The task-conditioned ResNet that judges whether a frame shows success."""

    world: Path
    """World folder: its autoencoder redraws half of the frames; the reward model is written into it."""
    size: Size = "tiny"
    """tiny: 0.4 million parameters. small: 0.7 million."""
    steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 6_000
    """Optimizer steps."""
    batch: Annotated[
        int, AtLeast(4, "a step has frames of both kinds.", "Leave it out.", highest=MOST_EXAMPLES)
    ] = 256
    """Frames per step."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 1e-3
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class FitStarts(_FromData):
    """Start states for imagination: the first frames of recordings, or pictures with instructions."""

    data: tuple[Path, ...] = ()
    """Recording folders, LeRobot v3 folders, or robomimic's HDF5 files."""
    pictures: str = ""
    """Folder of pictures, instead of --data. Their size is set by --dataset.image-size."""
    instructions: str = ""
    """File with the instructions of --pictures: .txt, .csv or .json; docs/fitting.md says how."""
    out: Path
    """HDF5 file to write."""
    count: Annotated[int, AtLeast(1, "episodes begin somewhere.", "Use 512.", highest=1_000_000)] = 512
    """Start states to keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.data) == bool(self.pictures):
            raise ConfigError(
                "Start states are made of recordings or of pictures: set --data or --pictures, one of them."
            )
        if bool(self.pictures) != bool(self.instructions):
            raise ConfigError(
                "--pictures and --instructions belong together, but one of them is missing. Set both."
            )


_named = tyro.conf.subcommand
ARGUMENTS: Any = (
    Annotated[FitPolicy, _named(name="policy")]
    | Annotated[FitWorld, _named(name="world")]
    | Annotated[FitReward, _named(name="reward")]
    | Annotated[FitStarts, _named(name="starts")]
    | Annotated[FitDecoder, _named(name="decoder")]
)


def main(arguments: list[str]) -> int:
    """Fit one kind of model."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl fit")
    began = time.monotonic()
    _use_tensor_cores()
    if isinstance(config, FitDecoder):
        fit_decoder_command(config)
    elif isinstance(config, FitStarts) and config.pictures:
        _write_picture_starts(config)
    else:
        _fit_recordings(config)
    if rank() == 0:
        print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _fit_recordings(config: FitPolicy | FitWorld | FitReward | FitStarts) -> None:
    speaks = rank() == 0
    if speaks:
        print(f"reading {', '.join(map(str, config.data))}", flush=True)
    recordings = load_recordings(config.data, config.dataset)
    share = recordings.solved().mean()
    if speaks:
        print(f"{len(recordings)} episodes, {len(recordings.frames)} frames, {share:.0%} solved", flush=True)
    match config:
        case FitPolicy():
            fit_policy_command(config, recordings)
        case FitWorld():
            fit_world_command(config, recordings)
        case FitReward():
            fit_reward_command(config, recordings)
        case FitStarts():
            write_starts(config, recordings)


def _use_tensor_cores() -> None:
    """Let float32 matrix products round their inputs to TF32 where the GPU can: several times faster."""
    import torch

    torch.set_float32_matmul_precision("high")


def fit_policy_command(config: FitPolicy, recordings: Recordings) -> None:
    """Clone the recordings and write the policy."""
    import torch

    from asyncrl.fitting.fit_policy import check_imitable, fit_policy
    from asyncrl.fitting.fresh_models import fresh_policy, write_statistics
    from asyncrl.policies.checkpoints.folder import save_policy
    from asyncrl.policies.openvla.policy import load_policy

    if config.fine_tunes or (config.refine and _is_published(policy_folder(config.refine))):
        return _fine_tune(config, recordings)
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    if config.refine:
        policy = load_policy(policy_folder(config.refine))
    else:
        policy = fresh_policy(config.size, recordings, config.statistics)
    check_imitable(policy, recordings)
    policy.to(device).requires_grad_(True)
    drawn = redrawn(world_folder(config.world), recordings, device) if config.world else None
    loss = fit_policy(
        policy,
        recordings,
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        drawn=drawn,
        compiled=config.compile,
        average=config.average,
    )
    save_policy(policy, config.out, dtype=torch.bfloat16)
    write_statistics(config.out, policy, recordings)
    print(f"policy in {config.out}: {loss:.3f} nats per action token")


def _is_published(folder: Path) -> bool:
    from asyncrl.policies.checkpoints.published_policy import MODEL_TYPE

    return read_json(folder / "config.json").get("model_type") == MODEL_TYPE


def _fine_tune(config: FitPolicy, recordings: Recordings) -> None:
    from asyncrl.launch.fine_tune import FineTuning, fine_tune

    plan = FineTuning(
        source=config.refine,
        settings=config.policy_settings,
        lora=config.lora,
        precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing,
        statistics=config.statistics,
        steps=config.steps,
        batch=config.batch,
        micro_batch=config.micro_batch,
        learning_rate=config.learning_rate,
        average=config.average,
        seed=config.seed,
        device=config.device,
        compiled=config.compile,
    )
    device = pick_device(config.device, local_rank())
    drawn = redrawn(world_folder(config.world), recordings, device) if config.world else None
    if told := fine_tune(plan, recordings, config.out, drawn):
        print(told, flush=True)


def redrawn(world: Path, recordings: Recordings, device: torch.device) -> FrameFile:
    """Return the recordings' frames as the world's autoencoder draws them: ``[F, H, W, 3]`` uint8."""
    loaded = load_fitted(world, device)
    check_same_size(loaded, recordings, "world")
    return loaded.redraw(recordings)


def fit_world_command(config: FitWorld, recordings: Recordings) -> None:
    """Fit autoencoder and network (or refine the network) and write the world."""
    import torch

    from asyncrl.fitting.loop import Schedule

    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    options = WorldOptions(context_sigma=config.context_sigma, camera=config.camera)
    check_recordings(recordings)
    if config.refine:
        world = load_fitted(world_folder(config.refine), device, torch.float32)
        check_same_size(world, recordings, "refine")
    else:
        world = fit_class(config.kind).fresh(config.size, config.vae_size, recordings, options)
        world.to(device)
        if config.autoencoder:
            world.take_autoencoder(load_fitted(world_folder(config.autoencoder), device, torch.float32))
        else:
            vae_schedule = Schedule(
                steps=config.vae_steps,
                batch=config.vae_batch,
                learning_rate=config.vae_learning_rate,
                seed=config.seed,
                compiled=config.compile,
            )
            vae_loss = world.fit_autoencoder(recordings, vae_schedule)
            print(f"autoencoder: weighted absolute error {vae_loss:.4f}", flush=True)
    schedule = Schedule(
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        compiled=config.compile,
    )
    loss = world.fit_network(recordings, schedule, options)
    world.save(config.out, config.version)
    print(f"world version {config.version} in {config.out}: velocity error {loss:.4f}")


def fit_reward_command(config: FitReward, recordings: Recordings) -> None:
    """Fit the reward model into the world's folder."""
    import torch

    from asyncrl.fitting.fit_reward import fit_reward
    from asyncrl.fitting.fresh_models import fresh_reward
    from asyncrl.rewards.model import save_reward

    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    reward = fresh_reward(config.size, recordings, device)
    drawn = redrawn(config.world, recordings, device)
    loss = fit_reward(
        reward,
        recordings,
        drawn,
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
    reward.network.to(torch.bfloat16)  # halves the file; `load_reward` computes in float32 again
    save_reward(config.world, reward)
    print(f"reward model in {config.world}: cross-entropy {loss:.4f}")


def _write_picture_starts(config: FitStarts) -> None:
    """Write pictures as start states."""
    from asyncrl.fitting.datasets.interface import placing_of
    from asyncrl.fitting.picture_starts import picture_starts
    from asyncrl.worlds.start_states import save_start_states

    placing = placing_of(config.dataset)
    states = picture_starts(Path(config.pictures), Path(config.instructions), placing, config.count)
    save_start_states(config.out, states)
    print(f"{len(states)} start states with {len({s.task for s in states})} instructions in {config.out}")


def write_starts(config: FitStarts, recordings: Recordings) -> None:
    """Write the first frame of episodes as start states: of as many tasks as there are."""
    import numpy as np

    from asyncrl.records import StartState
    from asyncrl.worlds.start_states import save_start_states

    _, height, width, _ = recordings.frames.shape
    # Recordings lie task by task, so the chosen ones are spread over all of them.
    chosen = np.linspace(0, len(recordings) - 1, min(config.count, len(recordings))).round().astype(int)
    once = len(set(recordings.seeds[chosen])) == len(chosen)
    states = [
        StartState(
            name=f"seed-{recordings.seeds[e]}" if once else f"seed-{recordings.seeds[e]}-{e}",
            task=recordings.tasks[e],
            frame=recordings.frames[recordings.offsets[e]],
            context_frames=np.empty((0, height, width, 3), np.uint8),
            context_actions=np.empty((0, recordings.actions.shape[1]), np.float32),
            ee_pose=recordings.poses[recordings.offsets[e]] if len(recordings.poses) else None,
        )
        for e in chosen
    ]
    save_start_states(config.out, states)
    print(f"{len(states)} start states in {config.out}")
