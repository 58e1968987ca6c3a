"""Refit a world and its reward model on true episodes: the fits of `asyncrl fit`, for a few steps."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
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
from asyncrl.fitting.worlds.interface import WorldOptions, load_fitted
from asyncrl.observability import process_status
from asyncrl.rewards.model import load_reward, save_reward
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.regular_files import make_folder, remove

ABOUT: Final = "world.json"
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


def refit(
    present: Path,
    reward: Path,
    out: Path,
    recordings: Recordings,
    settings: PaceSettings,
    *,
    version: int,
    device: torch.device,
    seed: int,
) -> None:
    """Write a world's next version: a folder that --world takes.

    Args:
        present: Folder of the world that is refitted; in our own layout.
        reward: Folder of its reward model, often the same.
        out: Made anew.
        recordings: What is fitted.
        settings: Of the run.
        version: Of the new world.
        device: Where the models are fitted.
        seed: Of examples and noise.

    Raises:
        ConfigError: The recordings do not fit.
        RunError: A loss stopped being finite.
    """
    copy_world(present, reward, out, version)
    torch.manual_seed(seed)
    if settings.world_steps:
        world = load_fitted(present, device, torch.float32)
        options = WorldOptions(
            context_sigma=settings.context_sigma, own_memory=settings.own_memory, only_refreshed=True
        )
        world.fit_network(recordings, _schedule(settings, seed), options)
        kept = world.world.modules().keys() - world.world.refreshed().keys()
        world.save(out, version)
        del world
        for name in kept:  # Actors keep them to the last bit; `save` rounds.
            if (file := present / f"{name}.safetensors").is_file():
                shutil.copyfile(file, out / file.name)
    if settings.reward_steps and not shows_both(recordings):
        _log.warning("the reward model stays as it is: all of the round's episodes end alike")
    elif settings.reward_steps:
        judge = load_reward(reward, tasks=sorted(set(recordings.tasks)), device=device)
        judge.network.requires_grad_(True)
        process_status.describe("redrawing frames for the reward model")
        redrawn = to_redraw(recordings, settings.reward_steps // 2 * settings.batch, seed)
        drawn = load_fitted(present, device).redraw(redrawn)
        process_status.describe("refitting the reward model")
        fit_reward(
            judge,
            recordings,
            drawn,
            drawn_of=redrawn,
            steps=settings.reward_steps,
            batch=settings.batch,
            learning_rate=settings.learning_rate,
            seed=seed,
            warmup=settings.reward_steps // WARMUP_SHARE,
        )
        save_reward(out, judge)


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


def copy_world(present: Path, reward: Path, out: Path, version: int) -> None:
    """Copy a world and its reward model to `out`, made anew, under another version."""
    remove(out)
    make_folder(out)
    for source in (reward, present):
        for file in source.iterdir():
            if file.suffix in (".json", ".safetensors") and file.is_file():
                shutil.copyfile(file, out / file.name)
    write_json(out / ABOUT, read_json(out / ABOUT) | {"version": version})


def _schedule(settings: PaceSettings, seed: int) -> Schedule:
    return Schedule(
        steps=settings.world_steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        seed=seed,
        warmup=settings.world_steps // WARMUP_SHARE,
    )


def check_refittable(present: Path, reward: Path) -> None:
    """Check that a world can be refitted.

    Raises:
        ConfigError: It, or its reward model, is not in our own layout.
    """
    for folder, name, flag in ((present, ABOUT, "world"), (reward, "reward.json", "reward")):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--pace.every is set, but --{flag} {folder} has no {name}: only what `asyncrl fit` wrote is "
                "refitted during a run, not a published folder. Leave --pace.every out, or use a world of "
                "your own."
            )
