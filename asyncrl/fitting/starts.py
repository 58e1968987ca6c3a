"""Choose the key frames of recorded episodes, and make start states of them.

Imagination that begins on the way makes fewer decisions, so a world's errors add up less. How WoVR (arXiv
2602.13977) chose its key frames was not published; this is the rule here. Only true frames are used, and
nothing that a robot could not know but whether the task was solved. An episode has at most two, both at the
end of a decision:

    contact   one decision before the one in which the gripper's command changes for the first time
    late      one decision before the one that solves the task; of an episode that was not solved, two before
              its end: there a world's error is small and the outcome still open

A key frame with nothing after it, or within the first decision, is none.

Make start states of a folder of pictures and a file of instructions, for those who recorded nothing.

instructions.txt     one instruction per line: every picture is a start of each of them
instructions.json    a list of instructions, likewise; or an object: name of a picture -> instruction, or
a list of instructions
instructions.csv     the columns picture and instruction, a row for every start
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.datasets.interface import plain_task
from asyncrl.fitting.datasets.pictures import FILE_BYTES, Placing, decoded
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import ACTION_DIM, CHUNK, StartState
from asyncrl.storage.untrusted import parse_json, read_bytes
from asyncrl.worlds.rlinf_start_states import CONTEXT

_GRIPPER: Final = -1
T = TypeVar("T")


def keyframes(actions: NDArray[np.float32], success: NDArray[np.bool_]) -> list[int]:
    """Choose the steps of an episode at which imagination may begin.

    Args:
        actions: ``[F, 7]``; action i produced frame i.
        success: ``[F]``.

    Returns:
        Multiples of 8, in order.

    Example:
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
    """Make start states of key frames: of every task as many, as far as it has them.

    Returns:
        In the order of the recordings; each with the episode's first frame, the four frames up to the key
        frame with their actions, and the decisions that were made until then.

    Raises:
        ConfigError: No episode has a key frame.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for episode, task in enumerate(recordings.tasks):
        span = recordings.span(episode)
        steps = keyframes(recordings.actions[span], recordings.success[span])
        found.setdefault(task, []).extend((episode, step) for step in steps)
    places = sorted(
        place for task, share in _shares(found, count).items() for place in spread(found[task], share)
    )
    if not places:
        raise ConfigError(
            f"None of the {len(recordings)} episodes of --data has a key frame: they are shorter than three "
            "decisions. Record longer ones."
        )
    return [state_at(recordings, episode, step) for episode, step in places]


def balanced(states: Sequence[StartState], count: int) -> list[StartState]:
    """Choose at most so many, of every task as many as it has, each spread over those of its task."""
    found: dict[str, list[StartState]] = {}
    for state in states:
        found.setdefault(state.task, []).append(state)
    return [state for task, share in _shares(found, count).items() for state in spread(found[task], share)]


def _shares(found: Mapping[str, Sequence[object]], count: int) -> dict[str, int]:
    """Say how many key frames each task gives: alike, and what one lacks the others give."""
    shares, left = dict.fromkeys(found, 0), count
    while left:
        open_tasks = [task for task in found if shares[task] < len(found[task])]
        if not open_tasks:
            break
        for task in open_tasks[:left]:
            shares[task] += 1
        left -= min(left, len(open_tasks))
    return shares


def spread(places: Sequence[T], count: int) -> list[T]:
    """Choose so many of the places, spread over all of them."""
    rows = np.linspace(0, len(places) - 1, count).round().astype(int) if count else []
    return [places[row] for row in rows]


def state_at(recordings: Recordings, episode: int, step: int) -> StartState:
    """Make a start state of an episode: where it began, or on the way."""
    first = int(recordings.offsets[episode])
    seen = slice(first + step - CONTEXT + 1, first + step + 1) if step else slice(0)
    return StartState(
        name=f"episode-{episode}-seed-{recordings.seeds[episode]}-step-{step}",
        task=recordings.tasks[episode],
        frame=recordings.frames[first],
        context_frames=recordings.frames[seen],
        context_actions=recordings.actions[seen].astype(np.float32),
        ee_pose=recordings.poses[first + step] if len(recordings.poses) else None,
        elapsed=step // CHUNK,
    )


SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
"""Of files that are taken for pictures."""


def picture_starts(pictures: Path, instructions: Path, placing: Placing, count: int) -> list[StartState]:
    """Read pictures and make a start state of each with each of its instructions.

    Args:
        count: Start states at most; they are spread over all that there could be.

    Returns:
        Start states of one picture size, without a context and without a pose.

    Raises:
        ConfigError: There are no pictures or instructions, a picture that is named is not there or cannot be
            read, or they are not square or not of one size.
    """
    files = {file.name: file for file in _picture_files(pictures)}
    pairs = list(_pairs(instructions, files))
    if not pairs:
        raise ConfigError(f"--instructions {instructions} has no instruction. Write one per line.")
    chosen = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
    if len(set(pairs)) < len(pairs):
        raise ConfigError(
            f"--instructions {instructions} has an instruction twice for a picture. Leave one out."
        )
    states: list[StartState] = []
    frame, last, of_it = np.empty((0, 0, 3), np.uint8), "", 0
    for name, task in (pairs[number] for number in chosen):
        if name != last:
            frame, last, of_it = _placed(files[name], placing), name, 0
        if states and frame.shape != states[0].frame.shape:
            raise ConfigError(
                f"{files[name]} has {frame.shape[0]} x {frame.shape[1]} pixels, but {states[0].name} has "
                f"{states[0].frame.shape[0]} x {states[0].frame.shape[1]}. Set the size that your world "
                "draws: --dataset.image-size 128."
            )
        states.append(_start(f"{name}/{of_it}", task, frame))
        of_it += 1
    return states


def _start(name: str, task: str, frame: np.ndarray) -> StartState:
    return StartState(
        name=name,
        task=task,
        frame=frame,
        context_frames=np.empty((0, *frame.shape), np.uint8),
        context_actions=np.empty((0, ACTION_DIM), np.float32),
    )


def _picture_files(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not found:
        raise ConfigError(
            f"--pictures {folder} is no folder with pictures ({', '.join(SUFFIXES)}). Check the path."
        )
    return found


def _placed(file: Path, placing: Placing) -> np.ndarray:
    try:
        frame = placing.place(decoded(read_bytes(file, FILE_BYTES)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {first_line(error)}. Write it again, or leave it out.") from error
    if frame.shape[0] != frame.shape[1]:
        raise ConfigError(
            f"{file} has {frame.shape[0]} x {frame.shape[1]} pixels, but models look at square pictures. Set "
            "--dataset.image-size 128, with --dataset.aspect stretch, crop or pad."
        )
    return frame


def _pairs(path: Path, files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield names of pictures with an instruction, in the order of the pictures' names."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
        told = _READERS.get(path.suffix.lower(), _lines)(text)
        if isinstance(told, list):
            told = dict.fromkeys(files, told)
        named = {name: _instructions(of_it) for name, of_it in told.items()}
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"--instructions {path} cannot be read ({first_line(error)}). Write one instruction per line "
            "(.txt), the columns picture and instruction (.csv), or an object of them (.json)."
        ) from error
    if missing := sorted(set(named) - set(files)):
        raise ConfigError(
            f"--instructions {path} names {missing[0]}, which is not in the folder of --pictures. Correct "
            "the name, or add the picture."
        )
    for name in sorted(named):
        for task in named[name]:
            yield name, task


def _instructions(told: Any) -> list[str]:
    listed = told if isinstance(told, list) else [told]
    if not all(isinstance(one, str) and plain_task(one) for one in listed):
        raise ValueError("an instruction is empty or no text")
    return [plain_task(one) for one in listed]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _rows(text: str) -> dict[str, list[str]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    if not {"picture", "instruction"} <= set(reader.fieldnames or ()):
        raise ValueError("its first line is not picture,instruction")
    found: dict[str, list[str]] = {}
    for row in reader:
        found.setdefault(str(row["picture"]), []).append(str(row["instruction"] or ""))
    return found


def _object(text: str) -> Any:
    try:
        return parse_json(text.encode(), dict)
    except ValueError:
        return parse_json(text.encode(), list)


_READERS: Final[Mapping[str, Any]] = {".txt": _lines, ".csv": _rows, ".json": _object}
