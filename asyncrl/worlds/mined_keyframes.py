"""Key frames of a run's own true episodes: start states that travel with each version of its world.

    fitter: states -> keyframes.h5 of the version -> tensors of one shape -> actors: tensors -> states

A channel carries tensors whose shapes never change, so there are as many rows as there can be key frames;
those that a version lacks have no task. Names follow from version and row alone, so that everybody who has
the world has them.

Dimension letters:
    S  rows     H, W  image size in pixels     K  context frames     A  numbers per step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from asyncrl.keyframe_names import keyframe_name
from asyncrl.records import POSE_DIM, ActionSpec, StartState
from asyncrl.worlds.rlinf_start_states import CONTEXT
from asyncrl.worlds.start_states import load_start_states, save_start_states

FILE: Final = "keyframes.h5"
"""Of a world's version, beside its weights."""


def save(folder: Path, version: int, states: Sequence[StartState]) -> None:
    """Write key frames, if there are any, into the folder of a world's version, under the names of it."""
    if states:
        named = [replace(state, name=keyframe_name(version, row)) for row, state in enumerate(states)]
        save_start_states(folder / FILE, named)


def load(folder: Path) -> list[StartState]:
    """Return the key frames in the folder of a world's version; none, where it has no file.

    Raises:
        AssetError: The file cannot be read.
    """
    path = folder / FILE
    return load_start_states(path) if path.is_file() else []


class MinedKeyframes:
    """Key frames as tensors in host memory that are written over in place."""

    def __init__(self, count: int, image_size: int, action_spec: ActionSpec, tasks: Sequence[str]) -> None:
        """Make room for `count` key frames of `tasks`; there are none yet."""
        self._tasks = sorted(tasks)
        size = (image_size, image_size, 3)
        self._version = torch.full((1,), -1)
        self._task = torch.full((count,), -1)
        self._elapsed = torch.zeros(count, dtype=torch.int64)
        self._frame = torch.zeros(count, *size, dtype=torch.uint8)
        self._context_frames = torch.zeros(count, CONTEXT, *size, dtype=torch.uint8)
        self._context_actions = torch.zeros(count, CONTEXT, action_spec.dim)
        self._ee_pose = torch.full((count, POSE_DIM), torch.nan)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return what travels, by name.

        Behind ``keyframes.``: ``version [1]``, ``task [S]`` (-1: the row has no key frame), ``elapsed [S]``
        int64; ``frame [S, H, W, 3]``, ``context_frames [S, K, H, W, 3]`` uint8; ``context_actions [S, K,
        A]``, ``ee_pose [S, 8]`` float32 (NaN: not known).
        """
        return {
            "keyframes.version": self._version,
            "keyframes.task": self._task,
            "keyframes.elapsed": self._elapsed,
            "keyframes.frame": self._frame,
            "keyframes.context_frames": self._context_frames,
            "keyframes.context_actions": self._context_actions,
            "keyframes.ee_pose": self._ee_pose,
        }

    @property
    def version(self) -> int:
        """Return the version of the world they came with; -1: none has come."""
        return int(self._version)

    @property
    def states(self) -> list[StartState]:
        """Return them; copies, which a later version does not change."""
        return [self._state(row) for row in range(len(self._task)) if self._task[row] >= 0]

    def fill(self, version: int, states: Sequence[StartState]) -> None:
        """Write over them with those of a version.

        Args:
            version: Of the world.
            states: As `save` wrote them; of the tasks that are not the run's, none is taken.
        """
        known = [state for state in states if state.task in self._tasks][: len(self._task)]
        self._version.fill_(version)
        self._task.fill_(-1)
        self._ee_pose.fill_(torch.nan)
        for row, state in enumerate(known):
            self._task[row] = self._tasks.index(state.task)
            self._elapsed[row] = state.elapsed
            self._frame[row] = torch.tensor(state.frame)
            self._context_frames[row] = torch.tensor(state.context_frames)
            self._context_actions[row] = torch.tensor(state.context_actions)
            if state.ee_pose is not None:
                self._ee_pose[row] = torch.tensor(state.ee_pose)

    def _state(self, row: int) -> StartState:
        pose = self._ee_pose[row]
        return StartState(
            name=keyframe_name(self.version, row),
            task=self._tasks[int(self._task[row])],
            frame=self._frame[row].numpy().copy(),
            context_frames=self._context_frames[row].numpy().copy(),
            context_actions=self._context_actions[row].numpy().copy(),
            ee_pose=pose.numpy().copy() if bool(pose.isfinite().all()) else None,
            elapsed=int(self._elapsed[row]),
        )
