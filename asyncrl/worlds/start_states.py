"""Read and write start states, and draw them in an order that follows from a seed.

Our file is HDF5 (``*.h5``, ``*.hdf5``), one row per start state, with attribute ``format``::

    name, task  bytes [S]  fixed length, UTF-8          frame  uint8 [S, H, W, 3]
    context_length   int64 [S], 0 or K                  context_frames  uint8 [S, K, H, W, 3]
    context_actions  float32 [S, K, A]                  ee_pose  float32 [S, 8], NaN where unknown
    elapsed          int64 [S]

Contexts are left out when no start state has one, poses likewise, and ``elapsed`` when all are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, ConfigError
from asyncrl.facts import check_pictures
from asyncrl.records import ACTION_DIM, POSE_DIM, StartState
from asyncrl.storage.atomic import replacing
from asyncrl.storage.untrusted import dataset_in, files_in, open_hdf5

T = TypeVar("T")
FORMAT: Final = "asyncrl-start-states-1"
_SUFFIXES: Final = (".h5", ".hdf5")


def save_start_states(path: Path, states: Sequence[StartState]) -> None:
    """Write start states of one image size and context; a reader sees the old file or the new one."""
    _check_alike(path, states)
    length = max(len(state.context_frames) for state in states)
    numbers = max(state.context_actions.shape[1] for state in states)
    arrays: dict[str, NDArray[np.generic]] = {
        "name": np.array([state.name.encode() for state in states]),
        "task": np.array([state.task.encode() for state in states]),
        "frame": np.stack([state.frame for state in states]),
        "context_length": np.array([len(state.context_frames) for state in states], dtype=np.int64),
    }
    if length:
        shape = states[0].frame.shape
        blank = (np.zeros((length, *shape), np.uint8), np.zeros((length, numbers), np.float32))
        rows = [(s.context_frames, s.context_actions) if len(s.context_frames) else blank for s in states]
        arrays["context_frames"] = np.stack([frames for frames, _ in rows])
        arrays["context_actions"] = np.stack([actions for _, actions in rows]).astype(np.float32)
    if any(state.ee_pose is not None for state in states):
        unknown = np.full(POSE_DIM, np.nan, np.float32)
        poses = [unknown if state.ee_pose is None else state.ee_pose for state in states]
        arrays["ee_pose"] = np.stack(poses).astype(np.float32)
    if any(state.elapsed for state in states):
        arrays["elapsed"] = np.array([state.elapsed for state in states], dtype=np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, h5py.File(part, "w", locking=False) as file:
        file.attrs["format"] = FORMAT
        for name, array in arrays.items():
            images = array.ndim > 2 and array.dtype == np.uint8
            file.create_dataset(name, data=array, compression="gzip" if images else None)


def _check_alike(path: Path, states: Sequence[StartState]) -> None:
    if not states:
        raise AssetError(f"there are no start states to write to {path}.")
    if len({state.name for state in states}) != len(states):
        raise AssetError(f"two start states for {path} share a name; names must be unique.")
    frames = {state.frame.shape for state in states}
    contexts = {len(state.context_frames) for state in states} - {0}
    if len(frames) != 1 or len(contexts) > 1:
        raise AssetError(
            f"start states for {path} differ in image shape ({sorted(frames)}) or in context length "
            f"({sorted(contexts)}). Write one file per size."
        )


def load_start_states(path: Path, *, keyframes: bool = True, image_size: int = 0) -> list[StartState]:
    """Read start states of a file or folder, ours or RLinf's; `keyframes` includes ``_kir`` trajectories."""
    if path.is_dir():
        files, trajectories = files_in(path, *_SUFFIXES), files_in(path, ".npy")
        if files and trajectories:
            raise AssetError(
                f"{path} holds start states of two kinds, {files[0].name} and {trajectories[0].name}. Keep "
                "those of one, or name a file: --start-states FILE."
            )
        if trajectories:
            from asyncrl.worlds.rlinf_start_states import load_trajectories

            return load_trajectories(path, keyframes=keyframes, image_size=image_size)
        if not files:
            raise AssetError(f"{path} holds no start states (looked for *.h5 and *.npy). Set --start-states.")
        return [state for file in files for state in load_start_states(file)]
    if not path.is_file():
        raise AssetError(f"start states {path} do not exist. Set --start-states to a .h5 file or a folder.")
    if path.suffix.lower() == ".npy":
        from asyncrl.worlds.rlinf_start_states import load_trajectory

        return [load_trajectory(path, image_size=image_size)]
    try:
        with open_hdf5(path) as file:
            return _read(path, file)
    except ConfigError:
        raise
    except (OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError) as error:
        raise AssetError(f"{path} cannot be read as start states ({error}). Write it again.") from error


def _read(path: Path, file: h5py.File) -> list[StartState]:
    if file.attrs["format"] != FORMAT:
        raise AssetError(f"{path} is not a file of start states (format {file.attrs['format']!r}).")
    arrays: dict[str, NDArray[Any]] = {name: dataset_in(file, name)[...] for name in map(str, file)}
    frames, count = arrays["frame"], len(arrays["frame"])
    check_pictures(frames, (-1, -1, -1, 3), f"{path}: frames")
    if (context := arrays.setdefault("context_frames", frames[:, None][:, :0])).shape[1:2] != (0,):
        check_pictures(context, (count, -1, *frames.shape[1:]), f"{path}: context_frames")
    most, used = context.shape[1], arrays["context_length"]
    actions = arrays.setdefault("context_actions", np.zeros((count, 0, ACTION_DIM), np.float32))
    poses = arrays.setdefault("ee_pose", np.full((count, POSE_DIM), np.nan, np.float32))
    elapsed = arrays.setdefault("elapsed", np.zeros(count, np.int64))
    for name, kind, shape in (
        ("name", "S", [count]),
        ("task", "S", [count]),
        ("context_length", "int64", [count]),
        ("context_actions", "float32", [count, most, actions.shape[-1]]),
        ("elapsed", "int64", [count]),
        ("ee_pose", "float32", [count, POSE_DIM]),
    ):
        array = arrays[name]
        if list(array.shape) != shape or (array.dtype != kind and array.dtype.kind != kind):
            raise AssetError(
                f"{path}: {name} is {array.dtype}{list(array.shape)}, expected {kind} {shape}. Write it "
                "again."
            )
    known = np.isfinite(poses)
    for name, right in (
        ("elapsed is below 0", elapsed >= 0),
        (f"context_length is neither 0 nor {most}", np.isin(used, (0, most))),
        ("context_actions are not all finite", np.isfinite(actions)),
        ("ee_pose is neither finite nor all NaN", known == known[:, :1]),
        ("a name stands there twice", [len(set(arrays["name"].tolist())) == count]),
    ):
        if not np.all(right):
            raise AssetError(f"{path}: {name}. Write it again.")
    return [
        StartState(
            name=bytes(arrays["name"][i]).decode(),
            task=arrays["task"][i],
            frame=frames[i],
            context_frames=context[i, : used[i]],
            context_actions=actions[i, : used[i]],
            ee_pose=poses[i] if known[i].all() else None,
            elapsed=int(elapsed[i]),
        )
        for i in range(count)
    ]


def check_beginnings(
    states: Sequence[StartState],
    *,
    image_size: int,
    context: int = 0,
    action_dim: int = ACTION_DIM,
    needs_pose: bool = False,
) -> None:
    """Check that a world that takes `context` frames of context, or none, can begin with start states."""
    for state in states:
        for frame in (state.frame, *state.context_frames):
            if frame.shape != (image_size, image_size, 3):
                raise ConfigError(
                    f"start state {state.name} has a frame of shape {list(frame.shape)}, but the world draws "
                    f"{image_size}x{image_size} pixels. Use start states recorded at that size "
                    "(--start-states)."
                )
        if len(state.context_frames) not in (0, context):
            wanted = f"0 or {context}. Record start states with {context}" if context else "none. Use others"
            raise ConfigError(
                f"start state {state.name} has {len(state.context_frames)} context frames; the world needs "
                f"{wanted} (--start-states)."
            )
        if len(state.context_actions) and (width := state.context_actions.shape[1]) != action_dim:
            raise ConfigError(
                f"start state {state.name} has a context of actions of {width} numbers, but the world's have "
                f"{action_dim}. Use start states of the same robot (--start-states)."
            )
        if needs_pose:
            check_pose(state)


def check_pose(state: StartState) -> None:
    """Check the pose of the hand in a start state, for a world that needs it."""
    pose = state.ee_pose
    if pose is None or np.shape(pose) != (POSE_DIM,) or not np.isfinite(pose).all():
        raise ConfigError(
            f"start state {state.name} does not say where the robot's hand is, and this world draws it into "
            f"its maps. Use start states with a pose of {POSE_DIM} finite numbers (--start-states): ee_pose "
            "in our files, init_ee_pose or abs_action in RLinf's."
        )


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, turn: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, turn]).permutation(count).tolist())


def start_state_at(states: Sequence[T], seed: int, n: int) -> T:
    """Return the n-th start state of the stream `seed`: all states in random order, repeatedly."""
    round_number, position = divmod(n, len(states))
    return states[_shuffled(len(states), seed, round_number)[position]]


def check_elapsed(states: Sequence[StartState], max_decisions: int) -> None:
    """Check that episodes from key frames have decisions left."""
    late = next((state for state in states if max_decisions and state.elapsed >= max_decisions), None)
    if late is not None:
        raise ConfigError(
            f"start state {late.name} begins after {late.elapsed} decisions, but an episode ends after "
            f"--actor.max-decisions {max_decisions}. Raise it, or use earlier key frames."
        )


class StartStateStream:
    """An endless list of start states; element n depends on `seed` and n only."""

    def __init__(self, states: Sequence[StartState], seed: int) -> None:
        if not states:
            raise AssetError("a stream of start states needs at least one. Set --start-states.")
        self.states, self.seed = list(states), seed

    def __getitem__(self, n: int) -> StartState:
        return start_state_at(self.states, self.seed, n)

    def left(self, quarantined: Collection[str]) -> int:
        """Count the start states that are not quarantined."""
        return sum(state.name not in quarantined for state in self.states)
