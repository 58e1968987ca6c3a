"""Start states from the key frames of recordings or from pictures.

Letters: F frames of an episode, H W picture size.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.facts import check_instruction
from asyncrl.fitting.data_sets import decode_picture, place_picture
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.records import ACTION_DIM, CHUNK, StartState
from asyncrl.storage.untrusted import files_in, read_bytes
from asyncrl.worlds.rlinf_start_states import CONTEXT

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp")  # Of pictures.
_GRIPPER: Final = -1
_log = logging.getLogger(__name__)
T = TypeVar("T")


def keyframes(actions: NDArray[np.float32], success: NDArray[np.bool_]) -> list[int]:
    """Choose the steps of an episode, multiples of 8, at which imagination may begin: at most two.

    Imagination that begins midway makes fewer decisions, so a world's errors add up less. How WoVR (arXiv
    2602.13977) chose its key frames was not published; the rule here:

        contact   one decision before the one in which the gripper's command changes for the first time
        late      one decision before the one that solves the task; if none does, two before the end

    Neither is within the first decision or at the end. Row i of `actions` ``[F, 7]`` produced frame i.

    >>> grasp = np.repeat(np.array([-1.0, 1.0]), [31, 19])[:, None] * np.ones(7)
    >>> keyframes(grasp, np.arange(50) == 45)
    [16, 32]
    """
    last = (len(actions) - 1) // CHUNK
    changed = np.flatnonzero(np.diff(np.sign(actions[1:, _GRIPPER])) != 0) + 2
    deciding = (int(changed[0]) - 1) // CHUNK if len(changed) else 0
    solving = (int(success.argmax()) - 1) // CHUNK if success.any() else last - 1
    chosen = {deciding - 1, solving - 1}
    return [CHUNK * decision for decision in sorted(chosen) if 1 <= decision < last]


def keyframe_states(recordings: Recordings, count: int) -> list[StartState]:
    """Make start states of key frames, balanced over the tasks, in the order of the recordings."""
    found: dict[str, list[tuple[int, int]]] = {}
    for episode, task in enumerate(recordings.tasks):
        span = recordings.span(episode)
        steps = keyframes(recordings.actions[span], recordings.success[span])
        found.setdefault(task, []).extend((episode, step) for step in steps)
    places = sorted(_balanced(found, count))
    if not places:
        raise ConfigError(
            f"None of the {len(recordings)} episodes of --data has a key frame: they are shorter than three "
            "decisions. Record longer ones."
        )
    names = (f"episode-{episode}-seed-{recordings.seeds[episode]}-step-{step}" for episode, step in places)
    return [_state_at(recordings, *place, name) for place, name in zip(places, names, strict=True)]


def first_states(recordings: Recordings, count: int) -> list[StartState]:
    """Make start states of the first frames of at most `count` episodes, evenly spread."""
    # Recordings lie task by task, so the chosen ones are spread over all of them.
    chosen = _spread(range(len(recordings)), min(count, len(recordings)))
    seeds = recordings.seeds
    once = len(set(seeds[chosen])) == len(chosen)
    names = (f"seed-{seeds[episode]}" + ("" if once else f"-{episode}") for episode in chosen)
    return [_state_at(recordings, episode, 0, name) for episode, name in zip(chosen, names, strict=True)]


def _state_at(recordings: Recordings, episode: int, step: int, name: str) -> StartState:
    first = int(recordings.offsets[episode])
    seen = slice(first + step - CONTEXT + 1, first + step + 1) if step else slice(0)
    return StartState(
        name=name,
        task=recordings.tasks[episode],
        frame=recordings.frames[first],
        context_frames=recordings.frames[seen],
        context_actions=recordings.actions[seen].astype(np.float32),
        ee_pose=recordings.poses[first + step] if len(recordings.poses) else None,
        elapsed=step // CHUNK,
    )


def _balanced(found: Mapping[str, Sequence[T]], count: int) -> list[T]:
    # The same number of every task; the others make up for tasks that have fewer.
    shares, left = dict.fromkeys(found, 0), count
    while left and (open_tasks := [task for task in found if shares[task] < len(found[task])]):
        for task in open_tasks[:left]:
            shares[task] += 1
        left -= min(left, len(open_tasks))
    return [one for task, share in shares.items() for one in _spread(found[task], share)]


def _spread(places: Sequence[T], count: int) -> list[T]:
    rows = np.linspace(0, len(places) - 1, count).round().astype(int) if count else []
    return [places[row] for row in rows]


def picture_starts(
    pictures: Path, instructions: Path, settings: DataSetSettings, count: int
) -> list[StartState]:
    """Make start states of pictures with each of their instructions; at most `count`, evenly spread."""
    files = {file.name: file for file in files_in(pictures, *SUFFIXES)}
    if not files:
        raise ConfigError(
            f"--pictures {pictures} is no folder with pictures ({', '.join(SUFFIXES)}). Check the path."
        )
    if others := sorted(path.name for path in pictures.glob("[!.]*") if path.name not in files):
        _log.warning(
            "Not read in %s: %s (pictures end in %s).", pictures, ", ".join(others), "".join(SUFFIXES)
        )
    pairs = _pairs(instructions, files)
    if not pairs:
        raise ConfigError(f"--instructions {instructions} has no instruction. Write one per line.")
    if len(set(pairs)) < len(pairs):
        raise ConfigError(
            f"--instructions {instructions} has an instruction twice for a picture. Leave one out."
        )
    states: list[StartState] = []
    frame, last, of_it = np.empty((0, 0, 3), np.uint8), "", 0
    for name, task in _spread(pairs, min(count, len(pairs))):
        if name != last:
            frame, last, of_it = _placed(files[name], settings), name, 0
        if states and frame.shape != states[0].frame.shape:
            raise ConfigError(
                f"{files[name]} has {frame.shape[0]} x {frame.shape[1]} pixels, but {states[0].name} has "
                f"{states[0].frame.shape[0]} x {states[0].frame.shape[1]}. Set the size that your world "
                "draws: --dataset.image-size 128."
            )
        states.append(
            StartState(
                name=f"{name}/{of_it}",
                task=task,
                frame=frame,
                context_frames=np.empty((0, *frame.shape), np.uint8),
                context_actions=np.empty((0, ACTION_DIM), np.float32),
            )
        )
        of_it += 1
    return states


def _placed(file: Path, settings: DataSetSettings) -> NDArray[np.uint8]:
    try:
        frame = place_picture(decode_picture(read_bytes(file)), settings)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {first_line(error)}. Write it again, or leave it out.") from error
    if frame.shape[0] != frame.shape[1]:
        raise ConfigError(
            f"{file} has {frame.shape[0]} x {frame.shape[1]} pixels, but models look at square pictures. Set "
            "--dataset.image-size 128, with --dataset.aspect stretch, crop or pad."
        )
    return frame


def _pairs(path: Path, files: Mapping[str, Path]) -> list[tuple[str, str]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
        if path.suffix.lower() == ".csv":
            reader = csv.DictReader(io.StringIO(text), strict=True)
            if not {"picture", "instruction"} <= set(reader.fieldnames or ()):
                raise ValueError("its first line is not picture,instruction")
            rows = [(str(row["picture"]), row["instruction"]) for row in reader]
        else:
            rows = [(name, line) for name in files for line in text.splitlines() if line.strip()]
        pairs = [(name, check_instruction(line, f"of {name}")) for name, line in rows]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"--instructions {path} cannot be read ({first_line(error)}). Write one instruction per line "
            "(.txt), or the columns picture and instruction (.csv)."
        ) from error
    if missing := sorted({name for name, _ in pairs} - set(files)):
        raise ConfigError(
            f"--instructions {path} names {missing[0]}, which is not in the folder of --pictures. Correct "
            "the name, or add the picture."
        )
    return sorted(pairs, key=lambda pair: pair[0])
