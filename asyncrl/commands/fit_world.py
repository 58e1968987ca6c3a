"""Fits a world model to recordings, fresh or refined: `asyncrl fit world`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitWorld
from asyncrl.fitting.worlds.interface import (
    FittedWorld,
    WorldOptions,
    check_recordings,
    check_same_size,
    fit_class,
    load_fitted,
)
from asyncrl.launch.own_device import take_device
from asyncrl.launch.rendezvous import world_size
from asyncrl.storage.asset_paths import world_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.fitting.frame_file import FrameFile
    from asyncrl.fitting.loop import Schedule


def redrawn(world: Path, recordings: Recordings, device: torch.device) -> FrameFile:
    """Return the recordings' frames as the world's autoencoder draws them: ``[F, H, W, 3]`` uint8."""
    loaded = load_fitted(world, device)
    check_same_size(loaded, recordings, "world")
    return loaded.redraw(recordings)


def fit_world_command(config: FitWorld, recordings: Recordings) -> None:
    """Fit autoencoder and network (or refine the network) and write the world."""
    import torch

    from asyncrl.fitting.loop import Schedule

    if _fine_tunes(config):
        return _fine_tune(config, recordings)
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
    schedule = Schedule(
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        compiled=config.compile,
    )
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


def _fine_tunes(config: FitWorld) -> bool:
    """Tell whether a large world may be meant: it is then written as it was read."""
    from asyncrl.launch.fine_tune_world import can_fine_tune
    from asyncrl.worlds.kinds import is_published

    if not config.refine:
        return False
    if config.asked_of_fine_tuning() or world_size() > 1:
        return True
    folder = world_folder(config.refine)
    return is_published(folder) and can_fine_tune(folder)


def check_fit_world(config: FitWorld) -> None:
    """Check what can be known before the recordings are read, which may take long."""
    from asyncrl.launch.fine_tune_world import check_fine_tuning

    if _fine_tunes(config):
        check_fine_tuning(config)


def _fine_tune(config: FitWorld, recordings: Recordings) -> None:
    from asyncrl.launch.fine_tune_world import fine_tune_world

    if told := fine_tune_world(config, recordings):
        print(told, flush=True)
