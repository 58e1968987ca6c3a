"""`asyncrl fit policy|world|reward|starts|keyframes|decoder`: fit models to recordings; pick start states."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tqdm import tqdm

from asyncrl.commands.fit_decoder import FitDecoder, fit_decoder_command
from asyncrl.errors import ConfigError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitKeyframes, FitPolicy, FitReward, FitStarts, FitWorld
from asyncrl.fitting.world import (
    FittedWorld,
    WorldOptions,
    check_recordings,
    check_same_size,
    fit_class,
    load_fitted,
)
from asyncrl.launch.job import read_job
from asyncrl.launch.own_device import take_device
from asyncrl.storage.assets import policy_folder, world_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.evaluation.audit import Models
    from asyncrl.fitting.frame_file import FrameFile
    from asyncrl.fitting.loop import Schedule
    from asyncrl.records import StartState


def fit_policy_command(config: FitPolicy, recordings: Recordings) -> None:
    """Clone the recordings and write the policy."""
    import torch

    from asyncrl.fitting.fit_policy import check_imitable, fit_policy, fresh_policy, write_statistics
    from asyncrl.policies.openvla.autoregressive import load_policy

    if config.refine and _fine_tunes_policy(config):
        return _fine_tune_policy(config, recordings)
    torch.manual_seed(config.seed)
    device = take_device(config.device)
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
        _schedule(config, compiled=config.compile),
        drawn=drawn,
        average=config.average,
    )
    policy.save(config.out, dtype=torch.bfloat16)
    write_statistics(config.out, policy, recordings)
    print(f"policy in {config.out}: {loss:.3f} nats per action token")


def _fine_tunes_policy(config: FitPolicy) -> bool:
    """True if a large policy may be meant: it is then written in the type that it computes in."""
    from asyncrl.policies.openvla.names import UNUSED_NORM
    from asyncrl.storage.tensor_files import TensorFiles

    if config.asked_of_fine_tuning() or config.statistics != "auto" or read_job().size > 1:
        return True
    # Policies that asyncrl saves lack the unused tensors.
    return UNUSED_NORM in TensorFiles(policy_folder(config.refine)).names()


def _fine_tune_policy(config: FitPolicy, recordings: Recordings) -> None:
    from asyncrl.launch.fine_tune import fine_tune_policy

    device = take_device(config.device, read_job().local_rank)
    drawn = redrawn(world_folder(config.world), recordings, device) if config.world else None
    if told := fine_tune_policy(config, recordings, device, drawn):
        print(told, flush=True)


CANDIDATES = 2
"""Candidates per key frame, of which those with an open outcome are taken."""
ROWS = 32
"""Episodes imagined together."""


def fit_keyframes_command(config: FitKeyframes, recordings: Recordings) -> None:
    """Write key frames of the recorded episodes."""
    from asyncrl.fitting.starts import keyframe_states, write_trajectories
    from asyncrl.worlds.start_states import save_start_states

    if config.layout == "npy":
        starts, written = write_trajectories(recordings, config.out)
        print(f"{starts} starts and {written} key frames in {config.out}")
        return
    states = _open(config, recordings) if config.policy else keyframe_states(recordings, config.count)
    save_start_states(config.out, states)
    print(f"{len(states)} key frames of {len({state.task for state in states})} tasks in {config.out}")


def _open(config: FitKeyframes, recordings: Recordings) -> list[StartState]:
    """Choose key frames from which the outcome of --policy in --world is open."""
    from asyncrl.evaluation.reimagine import open_starts
    from asyncrl.fitting.starts import balanced, keyframe_states

    models = _models(config, sorted(set(recordings.tasks)))
    candidates = keyframe_states(recordings, CANDIDATES * config.count)
    candidates = [state for state in candidates if state.elapsed < models.max_decisions]
    with tqdm(total=len(candidates) * config.siblings, unit="episode", mininterval=2.0) as bar:
        found = open_starts(
            models, candidates, siblings=config.siblings, rows=ROWS, seed=config.seed, progress=bar.update
        )
    print(f"{len(found)} of {len(candidates)} candidates have an open outcome")
    if not found:
        raise ConfigError(
            f"From none of {len(candidates)} candidates some of the {config.siblings} episodes that --policy "
            f"{config.policy} imagines in --world {config.world} succeed and some do not. Use more "
            "--siblings or --data, or leave --policy out to take them all."
        )
    return balanced(found, config.count)


def _models(config: FitKeyframes, tasks: list[str]) -> Models:
    from asyncrl.config.run import TrainConfig
    from asyncrl.evaluation.audit import Models
    from asyncrl.launch.environment import with_world_defaults
    from asyncrl.launch.named_models import named_policy, named_reward, named_world
    from asyncrl.policies.interface import SamplingParams

    device = take_device(config.device)
    settings, _ = with_world_defaults(TrainConfig(world=config.world))
    world = named_world(config.world, ())
    reward = named_reward("", world.folder, ())
    policy = named_policy(config.policy, ())
    return Models(
        policy=policy.kind.load(policy.folder, device, **policy.settings),
        world=world.kind.load(world.folder, device, settings.imagination, **world.settings),
        reward=reward.kind.load(reward.folder, device, tasks, **reward.settings),
        sampling=SamplingParams(temperature=config.temperature, top_k=0),
        max_decisions=settings.actor.max_decisions,
        threshold=settings.actor.success_threshold,
        success_frames=settings.success_frames,
    )


def redrawn(world: Path, recordings: Recordings, device: torch.device) -> FrameFile:
    """Return the recordings' frames after the world's autoencoder: ``[F, H, W, 3]`` uint8."""
    loaded = load_fitted(world, device)
    check_same_size(loaded, recordings, "world")
    return loaded.redraw(recordings)


def _schedule(config: FitPolicy | FitWorld | FitReward, *, compiled: bool = False) -> Schedule:
    from asyncrl.fitting.loop import Schedule

    return Schedule(
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        compiled=compiled,
    )


def fit_world_command(config: FitWorld, recordings: Recordings) -> None:
    """Fit autoencoder and network (or refine the network) and write the world."""
    import torch

    if _fine_tunes_world(config):
        from asyncrl.launch.fine_tune import fine_tune_world

        if line := fine_tune_world(config, recordings):
            print(line, flush=True)
        return
    torch.manual_seed(config.seed)
    device = take_device(config.device)
    options = WorldOptions(context_sigma=config.context_sigma, camera=config.camera)
    check_recordings(recordings)
    if config.refine:
        world = load_fitted(world_folder(config.refine), device, torch.float32)
        check_same_size(world, recordings, "refine")
    else:
        world = fit_class(config.kind).fresh(config.size, config.vae_size, recordings, options)
        world.to(device)
    schedule = _schedule(config, compiled=config.compile)
    if not config.refine:
        _give_autoencoder(world, config, recordings, schedule)
    loss = world.fit_network(recordings, schedule, options)
    world.save(config.out, config.version)
    print(f"world version {config.version} in {config.out}: velocity error {loss:.4f}")


def _give_autoencoder(
    world: FittedWorld, config: FitWorld, recordings: Recordings, schedule: Schedule
) -> None:
    """Take over or fit the autoencoder of a fresh world."""
    import torch

    if config.autoencoder:
        source = load_fitted(world_folder(config.autoencoder), world.world.device, torch.float32)
        return world.take_autoencoder(source)
    own = replace(
        schedule, steps=config.vae_steps, batch=config.vae_batch, learning_rate=config.vae_learning_rate
    )
    loss = world.fit_autoencoder(recordings, own)
    print(f"autoencoder: weighted absolute error {loss:.4f}", flush=True)


def _fine_tunes_world(config: FitWorld) -> bool:
    """True if a large world may be meant: it is then written as it was read."""
    from asyncrl.launch.fine_tune import can_fine_tune
    from asyncrl.worlds.kinds import is_published

    if not config.refine:
        return False
    if config.asked_of_fine_tuning() or read_job().size > 1:
        return True
    folder = world_folder(config.refine)
    return is_published(folder) and can_fine_tune(folder)


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
    import torch

    # float32 products round their inputs to TF32 where the GPU can: several times faster.
    torch.set_float32_matmul_precision("high")
    if isinstance(config, FitDecoder):
        fit_decoder_command(config)
    elif isinstance(config, FitStarts) and config.pictures:
        _write_picture_starts(config)
    else:
        _fit_recordings(config)
    if read_job().rank == 0:
        print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _refuse_ranks(config: Any) -> None:
    """Refuse several ranks where each would do the same and write the same files."""
    if (ranks := read_job().size) > 1 and not getattr(config, "refine", ""):
        raise ConfigError(
            f"torchrun started {ranks} ranks, but only a policy or a world of --refine is shared out "
            "to several. Start `asyncrl fit` without torchrun, or name one."
        )


def _fit_recordings(config: FitPolicy | FitWorld | FitReward | FitStarts | FitKeyframes) -> None:
    if isinstance(config, FitWorld) and _fine_tunes_world(config):
        from asyncrl.launch.fine_tune import check_fine_tuning

        check_fine_tuning(config)  # Before the recordings are read, which may take long.
    speaks = read_job().rank == 0
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


def fit_reward_command(config: FitReward, recordings: Recordings) -> None:
    """Fit the reward model into the world's folder."""
    import torch

    from asyncrl.fitting.fit_reward import fit_reward, fresh_reward
    from asyncrl.rewards.resnet import save_reward

    torch.manual_seed(config.seed)
    device = take_device(config.device)
    reward = fresh_reward(config.size, recordings, device)
    drawn = redrawn(config.world, recordings, device)
    loss = fit_reward(reward, recordings, drawn, _schedule(config))
    reward.network.to(torch.bfloat16)  # halves the file; `load_reward` computes in float32 again
    save_reward(config.world, reward)
    print(f"reward model in {config.world}: cross-entropy {loss:.4f}")


def _write_picture_starts(config: FitStarts) -> None:
    from asyncrl.fitting.starts import picture_starts
    from asyncrl.worlds.start_states import save_start_states

    pictures, instructions = Path(config.pictures), Path(config.instructions)
    states = picture_starts(pictures, instructions, config.dataset, config.count)
    save_start_states(config.out, states)
    print(f"{len(states)} start states with {len({s.task for s in states})} instructions in {config.out}")


def write_starts(config: FitStarts, recordings: Recordings) -> None:
    """Write first frames of episodes as start states."""
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
