"""`asyncrl fit policy|world|reward|starts|decoder`: fit models to recordings, and pick start states."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from asyncrl.commands.fit_decoder import FitDecoder, fit_decoder_command
from asyncrl.config.bounds import SEEDS, AtLeast, Bounded, Within
from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import Recordings, load_recordings
from asyncrl.launch.placement import pick_device
from asyncrl.storage.asset_paths import policy_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.fitting.frame_file import FrameFile

Size = Literal["tiny", "small"]

MOST_EXAMPLES = 65_536
"""Examples of a step: more are computed in several steps."""


@dataclass(frozen=True, kw_only=True)
class _FitSettings(Bounded):
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

    data: tuple[Path, ...]
    """Recording folders to imitate."""
    out: Path
    """Folder for the policy."""
    size: Size = "tiny"
    """tiny: about 2 million parameters. small: 11 million."""
    statistics: Literal["auto", "q01_q99", "none"] = "auto"
    """What the 256 tokens of a number span. q01_q99: the recordings' first to 99th percentile, the gripper
    apart. none: -1 to 1. auto: none for tabletop, q01_q99 for every other simulator."""
    refine: str = ""
    """Policy to start from instead of fresh weights: its size, statistics and words stay."""
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
        _refuse_with_refine(self, size="tiny", statistics="auto")


@dataclass(frozen=True, kw_only=True)
class FitWorld(_FitSettings):
    """The Wan autoencoder, then the action-conditioned Wan transformer, at the recordings' picture size."""

    data: tuple[Path, ...]
    """Recording folders to learn from."""
    out: Path
    """Folder for the world model."""
    size: Size = "tiny"
    """Of the transformer. tiny: 3 million parameters. small: 7 million."""
    vae_size: Size = "tiny"
    """Of the autoencoder. tiny: 2 million parameters. small: 4.5 million, and twice the time to decode."""
    vae_steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 7_000
    """Optimizer steps of the autoencoder."""
    vae_batch: Annotated[
        int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=MOST_EXAMPLES)
    ] = 48
    """Clips of 17 frames per step."""
    vae_learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 2e-3
    """Peak learning rate of the autoencoder."""
    steps: Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")] = 30_000
    """Optimizer steps of the transformer."""
    batch: Annotated[
        int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=MOST_EXAMPLES)
    ] = 512
    """Windows per step."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 1e-3
    """Peak learning rate of the transformer."""
    context_sigma: Annotated[float, Within(0, 1000, "it is a width.", "Use 0.1.")] = 0.1
    """Noise on the memory latent while training, against drift."""
    refine: str = ""
    """World folder to start from instead of fresh weights; its autoencoder is kept as it is."""
    version: Annotated[int, AtLeast(0, "versions are counted.", "Use 0.")] = 0
    """World version that episodes will carry."""
    compile: bool = False
    """Compile the model first: a minute or two at the start, then about twice as fast on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_with_refine(self, size="tiny", vae_size="tiny")


@dataclass(frozen=True, kw_only=True)
class FitReward(_FitSettings):
    """The task-conditioned ResNet that judges whether a frame shows success."""

    data: tuple[Path, ...]
    """Recording folders to learn from."""
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
class FitStarts(Bounded):
    """Start states for imagination: the first frames of recordings."""

    data: tuple[Path, ...]
    """Recording folders."""
    out: Path
    """HDF5 file to write."""
    count: Annotated[int, AtLeast(1, "episodes begin somewhere.", "Use 512.", highest=1_000_000)] = 512
    """Start states to keep."""


_named = tyro.conf.subcommand
KINDS: Any = (
    Annotated[FitPolicy, _named(name="policy")]
    | Annotated[FitWorld, _named(name="world")]
    | Annotated[FitReward, _named(name="reward")]
    | Annotated[FitStarts, _named(name="starts")]
    | Annotated[FitDecoder, _named(name="decoder")]
)


def main(arguments: list[str]) -> int:
    """Fit one kind of model."""
    config = tyro.cli(KINDS, args=arguments, prog="asyncrl fit")
    began = time.monotonic()
    _use_tensor_cores()
    if isinstance(config, FitDecoder):
        fit_decoder_command(config)
    else:
        _fit_recordings(config)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _fit_recordings(config: FitPolicy | FitWorld | FitReward | FitStarts) -> None:
    print(f"reading {', '.join(map(str, config.data))}", flush=True)
    recordings = load_recordings(config.data)
    share = recordings.solved().mean()
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

    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    if config.refine:
        policy = load_policy(policy_folder(config.refine))
    else:
        policy = fresh_policy(config.size, recordings, config.statistics)
    check_imitable(policy, recordings)
    policy.to(device).requires_grad_(True)
    drawn = redrawn(Path(config.world), recordings, device) if config.world else None
    loss = fit_policy(
        policy,
        recordings,
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        drawn=drawn,
        compiled=config.compile,
    )
    save_policy(policy, config.out, dtype=torch.bfloat16)
    write_statistics(config.out, policy, recordings)
    print(f"policy in {config.out}: {loss:.3f} nats per action token")


def redrawn(world: Path, recordings: Recordings, device: torch.device) -> FrameFile:
    """Return the recordings' frames as the world's autoencoder draws them: ``[F, H, W, 3]`` uint8."""
    from asyncrl.fitting.fit_reward import redraw
    from asyncrl.fitting.fit_vae import encode_recordings
    from asyncrl.fitting.fresh_models import check_same_size
    from asyncrl.worlds.wan.world import load_world

    loaded = load_world(world, device=device)
    check_same_size(loaded, recordings, "world")
    return redraw(loaded.vae, encode_recordings(loaded.vae, recordings), recordings)


def fit_world_command(config: FitWorld, recordings: Recordings) -> None:
    """Fit autoencoder and transformer (or refine the transformer) and write the world."""
    import torch

    from asyncrl.fitting.fit_vae import encode_recordings, fit_vae
    from asyncrl.fitting.fit_world import fit_world, windows
    from asyncrl.fitting.fresh_models import check_same_size, fresh_world
    from asyncrl.worlds.wan.world import load_world, save_world

    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    if config.refine:
        world = load_world(Path(config.refine), device=device)
        check_same_size(world, recordings, "refine")
        world.transformer.requires_grad_(True)
    else:
        world = fresh_world(config.size, config.vae_size, recordings)
        world.to(device)
        vae_loss = fit_vae(
            world.vae,
            recordings,
            steps=config.vae_steps,
            batch=config.vae_batch,
            learning_rate=config.vae_learning_rate,
            seed=config.seed,
            compiled=config.compile,
        )
        print(f"autoencoder: weighted absolute error {vae_loss:.4f}", flush=True)
    world.vae.requires_grad_(False)
    loss = fit_world(
        world.transformer,
        windows(recordings, encode_recordings(world.vae, recordings)),
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        context_sigma=config.context_sigma,
        seed=config.seed,
        compiled=config.compile,
    )
    world.version = config.version
    for module in (world.transformer, world.vae):
        torch.nn.Module.to(module, torch.bfloat16)  # halves the files; imagination computes in float32
    save_world(config.out, world)
    print(f"world version {config.version} in {config.out}: weighted velocity error {loss:.4f}")


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
            context_actions=np.empty((0, 7), np.float32),
        )
        for e in chosen
    ]
    save_start_states(config.out, states)
    print(f"{len(states)} start states in {config.out}")
