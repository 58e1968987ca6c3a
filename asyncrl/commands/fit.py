"""`asyncrl fit policy|world|reward|starts|keyframes|decoder`: fit models to recordings; pick start states."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro

from asyncrl.config.help import subcommands
from asyncrl.devices.tensors import take_device
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.fitting import settings
from asyncrl.fitting.loop import Kept, Schedule
from asyncrl.fitting.recording_files import FrameFile, Recordings
from asyncrl.fitting.sources import load_recordings
from asyncrl.launch.job import read_job
from asyncrl.storage.assets import policy_folder, start_states_path, world_folder
from asyncrl.storage.untrusted import remove

if TYPE_CHECKING:
    from asyncrl.fitting.fit_decoder import ImaginedVideos
    from asyncrl.records import StartState
    from asyncrl.rewards.interface import RewardModel

ARGUMENTS: Any = subcommands(
    {
        **{"policy": settings.FitPolicy, "world": settings.FitWorld, "reward": settings.FitReward},
        **{"starts": settings.FitStarts, "keyframes": settings.FitKeyframes, "decoder": settings.FitDecoder},
    }
)


def main(arguments: list[str]) -> int:
    """Fit one kind of model."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl fit")
    began = time.monotonic()
    # Without --refine each rank would do the same and write the same files.
    if (ranks := read_job().size) > 1 and not getattr(config, "refine", ""):
        raise ConfigError(
            f"torchrun started {ranks} ranks, but only a policy or a world of --refine is shared out "
            "to several. Start `asyncrl fit` without torchrun, or name one."
        )
    # float32 products round their inputs to TF32 where the GPU can: several times faster.
    torch.set_float32_matmul_precision("high")
    kept = Kept.of(config) if isinstance(config, settings.Trained) else None
    if kept is not None and kept.check() and read_job().rank == 0:
        print(f"goes on with the unfinished fit in {kept.folder}", flush=True)
    fits: dict[type, Callable[[Any], None]] = {settings.FitPolicy: _fit_policy, settings.FitWorld: _fit_world}
    fits |= dict.fromkeys((settings.FitStarts, settings.FitKeyframes), _write_states)
    fits[settings.FitReward] = _fit_reward
    fits.get(type(config), _fit_decoder)(config)
    if read_job().rank == 0:
        if kept is not None:
            remove(kept.folder)
        print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _read(config: settings.FromData) -> Recordings:
    prints = read_job().rank == 0
    if prints:
        print(f"reading {', '.join(map(str, config.data))}", flush=True)
    recordings = load_recordings(config.data, config.dataset)
    share = recordings.solved().mean()
    if prints:
        print(f"{len(recordings)} episodes, {len(recordings.frames)} frames, {share:.0%} solved", flush=True)
    return recordings


def _fit_policy(config: settings.FitPolicy) -> None:
    from asyncrl.fitting.fit_models import check_imitable, fit_policy, fresh_policy, write_statistics
    from asyncrl.launch.fine_tune import fine_tune_policy
    from asyncrl.policies.openvla.policy import load_policy

    device, recordings = take_device(config.device, read_job().local_rank), _read(config)
    if config.refine and _fine_tunes_policy(config):
        if message := fine_tune_policy(config, recordings, device, _redrawn(config, recordings, device)):
            print(message, flush=True)
        return
    torch.manual_seed(config.seed)
    if config.refine:
        policy = load_policy(policy_folder(config.refine))
    else:
        policy = fresh_policy(config.size, recordings, config.statistics)
    check_imitable(policy, recordings)
    policy.to(device).requires_grad_(True)
    drawn = _redrawn(config, recordings, device)
    loss = fit_policy(policy, recordings, Schedule.of(config), drawn=drawn, average=config.average)
    policy.save(config.out, dtype=torch.bfloat16)
    write_statistics(config.out, policy, recordings)
    print(f"policy in {config.out}: {loss:.3f} nats per action token")


def _fine_tunes_policy(config: settings.FitPolicy) -> bool:
    from asyncrl.policies.openvla.names import UNUSED_NORM
    from asyncrl.storage.tensor_files import TensorFiles

    if config.asked_of_fine_tuning() or config.statistics != "auto" or read_job().size > 1:
        return True
    # Policies that asyncrl saves lack the unused tensors.
    return UNUSED_NORM in TensorFiles(policy_folder(config.refine)).names()


def _redrawn(
    config: settings.FitPolicy | settings.FitReward, recordings: Recordings, device: torch.device
) -> FrameFile | None:
    from asyncrl.fitting.world import check_same_size, load_fitted

    if not config.world:
        return None
    folder = world_folder(config.world) if isinstance(config, settings.FitPolicy) else config.world
    world = load_fitted(folder, device)
    check_same_size(world, recordings, "world")
    return world.redraw(recordings)


def _fit_world(config: settings.FitWorld) -> None:
    from asyncrl.fitting.world import WorldOptions, check_same_size, fit_class, load_fitted

    if _fine_tunes_world(config):
        from asyncrl.launch.fine_tune import check_fine_tuning, fine_tune_world

        check_fine_tuning(config)  # Before the recordings are read, which may take long.
        if line := fine_tune_world(config, _read(config)):
            print(line, flush=True)
        return
    recordings = _read(config)
    torch.manual_seed(config.seed)
    device = take_device(config.device)
    options = WorldOptions.of(config)
    if config.refine:
        world = load_fitted(world_folder(config.refine), device, torch.float32)
        check_same_size(world, recordings, "refine")
    else:
        world = fit_class(config.kind).fresh(config.size, config.vae_size, recordings, options)
        world.world.to(device)
    world.check(recordings, options)
    schedule = Schedule.of(config)
    if config.autoencoder:
        world.take_autoencoder(load_fitted(world_folder(config.autoencoder), device, torch.float32))
    elif not config.refine:
        own = replace(
            schedule, steps=config.vae_steps, batch=config.vae_batch, learning_rate=config.vae_learning_rate
        )
        loss = world.fit_autoencoder(recordings, own)
        print(f"autoencoder: weighted absolute error {loss:.4f}", flush=True)
    loss = world.fit_network(recordings, schedule, options)
    world.save(config.out, config.version)
    print(f"world version {config.version} in {config.out}: velocity error {loss:.4f}")


def _fine_tunes_world(config: settings.FitWorld) -> bool:
    from asyncrl.fitting.world import fit_class
    from asyncrl.worlds.files import is_published, world_kind

    if not config.refine:
        return False
    if config.asked_of_fine_tuning() or read_job().size > 1:
        return True
    folder = world_folder(config.refine)
    return is_published(folder) and fit_class(world_kind(folder)).fine_tunes


def _fit_reward(config: settings.FitReward) -> None:
    from asyncrl.fitting.fit_models import fit_reward, fresh_reward
    from asyncrl.rewards.resnet import save_reward

    recordings = _read(config)
    torch.manual_seed(config.seed)
    device = take_device(config.device)
    reward = fresh_reward(config.size, recordings, device)
    drawn = _redrawn(config, recordings, device)
    assert drawn is not None
    loss = fit_reward(reward, recordings, drawn, Schedule.of(config))
    reward.network.to(torch.bfloat16)  # halves the file; `ResNetReward.load` computes in float32 again
    save_reward(config.world, reward)
    print(f"reward model in {config.world}: cross-entropy {loss:.4f}")


def _write_states(config: settings.FitStarts | settings.FitKeyframes) -> None:
    from asyncrl.fitting import starts
    from asyncrl.worlds.start_states import save_start_states

    what = "start states"
    if isinstance(config, settings.FitKeyframes):
        states, what = starts.keyframe_states(_read(config), config.count), "key frames"
    elif config.pictures:
        pictures, instructions = Path(config.pictures), Path(config.instructions)
        states = starts.picture_starts(pictures, instructions, config.dataset, config.count)
    else:
        states = starts.first_states(_read(config), config.count)
    save_start_states(config.out, states)
    print(f"{len(states)} {what} of {len({state.task for state in states})} tasks in {config.out}")


def _fit_decoder(config: settings.FitDecoder) -> None:
    from asyncrl.fitting.fit_decoder import compare, fit_decoder, fresh_decoder, write_decoder
    from asyncrl.fitting.world import load_fitted

    device = take_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    folder = world_folder(config.world)
    out = Path(config.out) if config.out else folder
    world = load_fitted(folder, device, dtype).world
    torch.manual_seed(config.seed)
    decoder = fresh_decoder(world).to(device)
    learned, held_out = _imagine(config, world, device, dtype)
    reward = _reward_in(folder, set(learned.tasks) | set(held_out.tasks), device)
    loss = fit_decoder(decoder, learned, Schedule.of(config))
    decoder.to(torch.bfloat16)  # as it is stored: halves the file, and what is measured is what will be used
    decoder.to(dtype)
    likeness = compare(decoder, held_out, reward, threshold=config.threshold)
    made = {name: getattr(config, name) for name in ("episodes", "decisions", "steps", "batch", "seed")}
    made |= {"learning_rate": config.learning_rate, "loss": round(loss, 5)} | likeness.as_dict()
    write_decoder(out, decoder.to(torch.bfloat16), world, made)
    print(f"against the full decoder on {len(held_out)} held-out episodes:")
    print(f"  PSNR {likeness.psnr:.2f} dB, worst hundredth of the frames below {likeness.worst_psnr:.2f} dB")
    if reward is not None:
        print(
            f"  same verdict (threshold {config.threshold}) on {likeness.same_verdict:.2%} of the frames and "
            f"{likeness.same_outcome:.1%} of the episodes, of which {likeness.success:.1%} succeed"
        )
    print(f"tiny decoder in {out}")


def _imagine(
    config: settings.FitDecoder, world: Any, device: torch.device, dtype: torch.dtype
) -> tuple[ImaginedVideos, ImaginedVideos]:
    from asyncrl.fitting.fit_decoder import imagine_episodes
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.policies.openvla.policy import load_policy
    from asyncrl.worlds.start_states import load_start_states, start_state_at

    policy = load_policy(policy_folder(config.policy), device=device, dtype=dtype).eval()
    path = start_states_path(config.start_states, config.world)
    states = load_start_states(path, image_size=world.image_size)
    if len(states) < 2:
        raise ConfigError(
            f"--start-states {config.start_states} holds {len(states)} start state, but some are to learn "
            "from and others to measure on. Give a file with more."
        )
    apart = min(len(states) - 1, max(1, len(states) // 8, min(config.held_out, len(states) // 2)))
    sampling = SamplingParams(temperature=config.temperature, top_k=0)

    def imagine(name: str, own: list[StartState], count: int, seed: int) -> ImaginedVideos:
        starts = [start_state_at(own, seed, n) for n in range(count)]
        made = {"decisions": config.decisions, "batch": config.imagine_batch, "seed": seed}
        return imagine_episodes(world, policy, sampling, starts, name=name, **made)

    learned = imagine("imagine", states[apart:], config.episodes, config.seed)
    return learned, imagine("imagine held-out", states[:apart], config.held_out, config.seed + 1)


def _reward_in(folder: Path, tasks: set[str], device: torch.device) -> RewardModel | None:
    from asyncrl.launch.named_models import named_reward

    try:
        named = named_reward("", folder)
        return named.kind.load(named.folder, device, sorted(tasks))
    except CheckpointError as error:
        print(f"The agreement of verdicts is not measured: {error}", flush=True)
        return None
