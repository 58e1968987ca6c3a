"""Refit a world and its reward model on true episodes: the fits of `asyncrl fit`, for a few steps."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from asyncrl.config.pace import PaceSettings
from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_reward import fit_reward, shows_both
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recordings import Recordings, chosen, read_part, recording_files
from asyncrl.fitting.worlds.interface import FineTunes, KeepsLayout, WorldOptions, fit_class, load_fitted
from asyncrl.observability import process_status
from asyncrl.pace.side_by_side import side_by_side
from asyncrl.pace.version_folder import copy_world
from asyncrl.rewards.kinds import reward_kind
from asyncrl.rewards.model import load_reward, save_reward
from asyncrl.worlds.kinds import is_published, world_kind

WARMUP_SHARE: Final = 5
"""A fifth of a refit's few steps leads to the peak of its learning rate."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundData:
    """Recordings of a round."""

    fitted: Recordings
    """On which models are refitted."""
    audited: Recordings
    """On which they are judged."""


def load_round(folders: Sequence[Path], settings: PaceSettings, seed: int) -> RoundData:
    """Read the true episodes of all rounds, and as many of --pace.base as their share leaves room for.

    Args:
        folders: Of the rounds, the newest last: a part of that one is held out.
        settings: Of the run.
        seed: Of the choice.
    """
    rng = np.random.default_rng(seed)
    own = [file for folder in folders for file in recording_files(folder)]
    newest = sum(len(read_part(file).tasks) for file in recording_files(folders[-1]))
    fresh = sum(len(read_part(file).tasks) for file in own)
    held_out = min(max(1, round(newest * settings.held_out)), newest - 1)
    wanted = round((fresh - held_out) * (1 - settings.fresh) / settings.fresh)
    recordings = load_recordings([*own, *_some_files(settings.base, wanted, rng)])
    audited = set((fresh - newest + rng.permutation(newest)[:held_out]).tolist())
    fitted = [number for number in range(fresh) if number not in audited]
    others = fresh + rng.permutation(len(recordings) - fresh)[:wanted]
    return RoundData(
        fitted=chosen(recordings, [*fitted, *sorted(others.tolist())]),
        audited=chosen(recordings, sorted(audited)),
    )


def _some_files(folders: Sequence[str], episodes: int, rng: np.random.Generator) -> list[Path]:
    """Choose files by chance until they have so many episodes; all of them where there are fewer."""
    files = [file for folder in folders for file in recording_files(Path(folder))]
    found, count = list[Path](), 0
    for number in rng.permutation(len(files)):
        if count >= episodes:
            break
        found.append(files[number])
        count += len(read_part(files[number]).tasks)
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What a refit is made of, and where."""

    present: Path
    """Folder of the world that is refitted; of our own layout or a published one."""
    reward: Path
    """Folder of its reward model, often the same."""
    out: Path
    """Made anew: a folder that --world takes, of the layout of `present`."""
    version: int
    """Of the new world."""
    device: torch.device
    """Where the models are fitted."""
    seed: int
    """Of examples and noise."""
    patience: float = 0.0
    """Seconds without progress after which a fit is said to hang; 0: any."""
    at_once: bool = False
    """Fit world and reward model in two threads; see `side_by_side`."""


def refit(made: Refit, recordings: Recordings, settings: PaceSettings) -> None:
    """Write a world's next version.

    Args:
        made: Of what, and where to.
        recordings: What is fitted.
        settings: Of the run.

    Raises:
        CheckpointError: A file cannot be read any more.
        ConfigError: The recordings do not fit.
        RunError: A loss stopped being finite.
    """
    copy_world(made.present, made.reward, made.out, made.version)
    parts: dict[str, Callable[[], None]] = {}
    if settings.world_steps:
        parts["refitting the world"] = lambda: _refit_world(made, recordings, settings)
    if settings.reward_steps and not shows_both(recordings):
        _log.warning("the reward model stays as it is: all of the round's episodes end alike")
    elif settings.reward_steps:
        parts["refitting the reward model"] = lambda: _refit_reward(made, recordings, settings)
    side_by_side(parts, patience=made.patience, at_once=made.at_once)


def _refit_world(made: Refit, recordings: Recordings, settings: PaceSettings) -> None:
    """Train what draws latents in float32, and write it over the copy of the world's folder."""
    world = load_fitted(made.present, made.device, torch.float32)
    said = {
        name: getattr(settings, name) for name in ("context_sigma", "own_memory") if name in world.options
    }
    options = WorldOptions(only_refreshed=True, **said)
    if is_published(made.present):
        assert isinstance(world, KeepsLayout)  # `check_refittable`
        if isinstance(world, FineTunes):
            world.check_fine_tuning(recordings, options)
        world.fit_network(recordings, _schedule(settings, made.seed), options)
        world.write_refreshed(made.present, made.out)
        return
    world.fit_network(recordings, _schedule(settings, made.seed), options)
    kept = world.world.modules().keys() - world.world.refreshed().keys()
    world.save(made.out, made.version)
    for name in kept:  # Actors keep them to the last bit; `save` rounds.
        if (file := made.present / f"{name}.safetensors").is_file():
            shutil.copyfile(file, made.out / file.name)


def _refit_reward(made: Refit, recordings: Recordings, settings: PaceSettings) -> None:
    """Train the reward model, half on frames that the autoencoder drew, and write it in our layout."""
    judge = load_reward(made.reward, tasks=sorted(set(recordings.tasks)), device=made.device)
    judge.network.requires_grad_(True)
    process_status.describe("redrawing frames for the reward model")
    redrawn = to_redraw(recordings, settings.reward_steps // 2 * settings.batch, made.seed)
    drawn = load_fitted(made.present, made.device).redraw(redrawn)
    process_status.describe("refitting the reward model")
    torch.manual_seed(made.seed)  # Of dropout. Nothing that may run beside it draws from this generator.
    fit_reward(
        judge,
        recordings,
        drawn,
        drawn_of=redrawn,
        steps=settings.reward_steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        seed=made.seed,
        warmup=settings.reward_steps // WARMUP_SHARE,
    )
    save_reward(made.out, judge)


def to_redraw(recordings: Recordings, looks: int, seed: int) -> Recordings:
    """Choose whose frames the autoencoder draws for a refit that looks at so many of them.

    Half of what it looks at shows the task solved, which few frames of an episode do. Drawing takes longer
    than the whole fit, so no more episodes are drawn than have as many of these as there are looks at them.

    Args:
        recordings: With both verdicts (`shows_both`), as those that are returned.
        looks: Drawn frames in all batches together.
        seed: Of the choice.
    """
    order = np.random.default_rng(seed).permutation(len(recordings))
    solved = np.cumsum([recordings.success[recordings.span(int(number))].sum() for number in order])
    episodes = 1 + int(np.searchsorted(solved[:-1], looks // 2))
    part = chosen(recordings, sorted(order[:episodes].tolist()))
    while not shows_both(part):
        episodes += 1
        part = chosen(recordings, sorted(order[:episodes].tolist()))
    return part


def _schedule(settings: PaceSettings, seed: int) -> Schedule:
    return Schedule(
        steps=settings.world_steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        seed=seed,
        warmup=settings.world_steps // WARMUP_SHARE,
    )


def check_refittable(present: Path, reward: Path, settings: PaceSettings) -> None:
    """Check that a world and its reward model can be refitted, of whichever layout they are.

    Raises:
        ConfigError: One cannot; says which flag leaves it as it is.
        CheckpointError: The world's folder holds no world, or several reward models.
    """
    every = f"--pace.every is {settings.every}"
    kind = world_kind(present)
    published = is_published(present)
    if published and settings.world_steps and not issubclass(fit_class(kind), KeepsLayout):
        raise ConfigError(
            f"{every}, but --world {present} has a published layout, which worlds of kind {kind} cannot be "
            "written in. Use a world that `asyncrl fit world` wrote, or --pace.world-steps 0."
        )
    if settings.own_memory and "own_memory" not in fit_class(kind).options:
        raise ConfigError(
            f"{every} and --pace.own-memory {settings.own_memory:g}, but --world {present} is of kind "
            f"{kind}, whose training has no such choice. Leave --pace.own-memory out."
        )
    if settings.reward_steps and reward_kind(reward) == "libero_long":
        raise ConfigError(
            f"{every} and --pace.reward-steps {settings.reward_steps}, but the reward model of {reward} is "
            "six networks that judge LIBERO-Long together, which are not refitted. Use --pace.reward-steps "
            "0: the world alone is refitted then."
        )
