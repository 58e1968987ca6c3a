"""Record a scripted expert of adjustable quality, or a policy, in a simulator."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import episodes_per_part, write_part
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSpec, random_start, stored_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT, Act, Play, SimulatedEpisode, chosen_tasks, rollout


def training_starts(
    spec: SimulatorSpec, *, episodes: int, seed: int, tasks: Sequence[str], stored: bool
) -> list[SimStart]:
    """List the starts of a recording, task by task."""
    if (stored or tasks) and not spec.trials:
        raise ConfigError(
            f"--stored and --tasks choose among stored starts, but in {spec.name} every seed is a start. "
            "Leave them out."
        )
    chosen = chosen_tasks(spec, tasks)
    if stored:
        of_all = [stored_start(spec, task, trial) for trial in range(spec.trials) for task in chosen]
        return sorted(of_all[:episodes], key=lambda start: (start.task_id, start.trial))
    # A seed's task is its remainder: where there are tasks, these are all seeds of the chosen ones.
    stride, offsets = (len(spec.tasks), chosen) if spec.trials else (1, [0])
    last = seed + -(-episodes // len(offsets))
    if not 0 <= seed <= last <= HELD_OUT // stride:
        raise ConfigError(
            f"--seed {seed} with --episodes {episodes} reaches the held-out seeds from {HELD_OUT // stride} "
            f"on{' of each task' if spec.trials else ''}. Use smaller ones."
        )
    seeds = [one * stride + offset for one in range(seed, last) for offset in offsets]
    starts = [random_start(spec, one) for one in seeds[:episodes]]
    return sorted(starts, key=lambda start: (start.task_id, start.seed))


def record(
    folder: Path,
    pool: SimulatorPool,
    act: Act | Demonstrator,
    starts: Sequence[SimStart],
    *,
    extra_decisions: int,
    about: dict[str, object],
) -> int:
    """Record one episode from each start, in order, whole decisions with all frames; return how many."""
    from tqdm import tqdm

    must_be_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    spec = pool.spec
    per_part = episodes_per_part((spec.max_steps + 1) * len(spec.cameras) * spec.image_size**2 * 3)
    places = {start.name: number for number, start in enumerate(starts)}
    parts: dict[int, dict[int, SimulatedEpisode]] = {}
    plays = [Play(start=start) for start in starts]
    written = 0
    with tqdm(total=len(starts), desc=f"record {folder.name}", unit="episode", mininterval=2.0) as bar:
        for episode in rollout(pool, act, plays, keep_frames=True, extra_decisions=extra_decisions):
            place = places[episode.start.name]
            number = place // per_part
            part = parts.setdefault(number, {})
            part[place] = episode
            if len(part) == min(per_part, len(starts) - number * per_part):
                episodes = [part[i] for i in sorted(parts.pop(number))]
                file = folder / f"part-{number:05d}.h5"
                written += write_part(file, episodes, spec.name, spec.cameras, about)
            bar.update(1)
    assert not parts, "every start was played once"
    return written


def must_be_new(folder: Path) -> None:
    """Check, without making it, that a folder can hold a new recording."""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise ConfigError(f"--out {folder} is a file, where a folder is expected. Choose another name.")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = errno.EACCES if above.is_dir() else errno.ENOTDIR
        raise ConfigError(f"--out {folder} cannot be made ({os.strerror(problem)}). Choose another folder.")
    if any(folder.glob("part-*.h5")):
        raise ConfigError(
            f"--out {folder} already holds recordings; they are not overwritten. Choose another folder."
        )
