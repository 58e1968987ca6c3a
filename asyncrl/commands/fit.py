"""`asyncrl fit policy|world|reward|starts|keyframes|decoder`: fit models to recordings; pick start states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from asyncrl.commands.fit_decoder import FitDecoder, fit_decoder_command
from asyncrl.commands.fit_keyframes import fit_keyframes_command
from asyncrl.commands.fit_policy import fit_policy_command
from asyncrl.commands.fit_world import check_fit_world, fit_world_command, redrawn
from asyncrl.errors import ConfigError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitKeyframes, FitPolicy, FitReward, FitStarts, FitWorld
from asyncrl.launch.own_device import take_device
from asyncrl.launch.rendezvous import rank, world_size

_named = tyro.conf.subcommand
ARGUMENTS: Any = (
    Annotated[FitPolicy, _named(name="policy")]
    | Annotated[FitWorld, _named(name="world")]
    | Annotated[FitReward, _named(name="reward")]
    | Annotated[FitStarts, _named(name="starts")]
    | Annotated[FitKeyframes, _named(name="keyframes")]
    | Annotated[FitDecoder, _named(name="decoder")]
)


def main(arguments: list[str]) -> int:
    """Fit one kind of model."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl fit")
    began = time.monotonic()
    _refuse_ranks(config)
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


def _refuse_ranks(config: Any) -> None:
    """Refuse several ranks where each would do the same and write the same files."""
    if world_size() > 1 and not getattr(config, "refine", ""):
        raise ConfigError(
            f"torchrun started {world_size()} ranks, but only a policy or a world of --refine is shared out "
            "to several. Start `asyncrl fit` without torchrun, or name one."
        )


def _fit_recordings(config: FitPolicy | FitWorld | FitReward | FitStarts | FitKeyframes) -> None:
    if isinstance(config, FitWorld):
        check_fit_world(config)
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
        case FitKeyframes():
            fit_keyframes_command(config, recordings)


def _use_tensor_cores() -> None:
    """Let float32 matrix products round their inputs to TF32 where the GPU can: several times faster."""
    import torch

    torch.set_float32_matmul_precision("high")


def fit_reward_command(config: FitReward, recordings: Recordings) -> None:
    """Fit the reward model into the world's folder."""
    import torch

    from asyncrl.fitting.fit_reward import fit_reward
    from asyncrl.fitting.fresh_models import fresh_reward
    from asyncrl.rewards.resnet import save_reward

    torch.manual_seed(config.seed)
    device = take_device(config.device)
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
