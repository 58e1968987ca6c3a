"""Turn LIBERO's published demonstrations (robomimic's HDF5 layout) into recordings.

One file holds the demonstrations of one task. What is read of it, and what is assumed:

    data                       attributes  problem_info   JSON with `language_instruction`
                                           macros_image_convention   "opengl" (as published) or "opencv"
    data/demo_0 ...            in the order of their numbers
        actions                [T, 7]  as the simulator takes them: gripper -1 opens, +1 closes
        rewards or dones       [T]     above 0 where the task is solved
        obs/agentview_rgb      [T, H, W, 3] uint8  camera `agentview`
        obs/eye_in_hand_rgb    [T, H, W, 3] uint8  camera `wrist`
        obs/ee_states          [T, 6]  position and axis-angle of the hand
        obs/gripper_states     [T, 2]  fingers

Observation i is what was seen *after* action i: LIBERO's own script plays an action, then stores what it
sees. That is the order of our recordings too. The first action's start was not stored, so the first picture
of an episode is the one after it, and the action is replaced by the idle one. Pictures of the OpenGL
convention are upside down and mirrored against what the simulator shows a policy: both axes are reversed.
Actions without a movement are kept.

Letters: T steps of a demonstration, H W picture size.
"""

from __future__ import annotations

import difflib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.recordings import write_part
from asyncrl.records import DUMMY_ACTION
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.simulators.interface import SimStart, SimulatorSpec, hand_pose
from asyncrl.simulators.libero.scene import OPEN, quaternion_of
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.untrusted import attribute_of, dataset_in, group_in, open_hdf5

CAMERAS: Final = ("agentview", "wrist")
_PICTURES: Final = {"agentview": "obs/agentview_rgb", "wrist": "obs/eye_in_hand_rgb"}
_SUFFIX: Final = "_demo"
EPISODES_PER_PART: Final = 25
_NUMBERS: Final = {
    "libero_spatial": (0, 2, 4, 6, 8, 1, 3, 5, 7, 9),
    "libero_object": (0, 3, 6, 8, 1, 4, 7, 9, 2, 5),
    "libero_goal": (0, 3, 5, 8, 1, 4, 6, 9, 2, 7),
    "libero_10": (5, 8, 7, 0, 1, 3, 4, 6, 9, 2),
}
"""The benchmark's number of each task in `SUITES`, whose order is that of the published reward models."""
_OTHERS: Final = "libero_90"
"""Its 90 tasks have 74 instructions, so that a file does not tell its task's number."""
_UNREADABLE: Final = (
    *(OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError),
    *(AttributeError, zlib.error),
)


@dataclass(frozen=True, kw_only=True)
class DemonstrationFile:
    """One file, of which only names are known."""

    path: Path
    instruction: str
    demos: tuple[str, ...]
    """Names of the demonstrations, ``demo_0`` first."""
    upright: bool
    """Whether lines are stored from the top on."""


def instruction_of(name: str) -> str:
    """Return the instruction that a task's name stands for, without the name of a scene before it.

    Example:
        >>> instruction_of("KITCHEN_SCENE3_turn_on_the_stove")
        'turn on the stove'
    """
    words = name.split("_")
    scene = next((i for i, word in enumerate(words) if word.startswith("SCENE")), -1)
    return " ".join(words[scene + 1 :]).lower()


def open_demonstrations(path: Path) -> DemonstrationFile:
    """Read what a file holds.

    The instruction is that of the file's name, as the simulator words it, where the name ends as published
    ones do (``NAME_demo.hdf5``); else the one in `problem_info`.
    """
    try:
        with open_hdf5(path) as file:
            data: Any = group_in(file, "data")
            numbers = sorted(int(n.removeprefix("demo_")) for n in data if n.startswith("demo_"))
            if not numbers:
                raise KeyError("there is no data/demo_0")
            said = json.loads(str(attribute_of(data, "problem_info")))["language_instruction"]
            convention = "macros_image_convention"
            return DemonstrationFile(
                path=path,
                instruction=instruction_of(path.stem.removesuffix(_SUFFIX))
                if path.stem.endswith(_SUFFIX)
                else "".join(said).strip(' ".').lower(),
                demos=tuple(f"demo_{number}" for number in numbers),
                upright=convention in data.attrs and str(attribute_of(data, convention)) == "opencv",
            )
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is not a file of LIBERO's demonstrations ({first_line(error)}). Give files as published, "
        "such as libero_spatial/NAME_demo.hdf5."
    )


def suite_of_files(files: Sequence[DemonstrationFile], simulator: str) -> str:
    """Return the simulator that demonstrations are of.

    Args:
        simulator: What was asked for; empty: the suite that has all of these tasks, else the folder's name.
    """
    said = {file.instruction for file in files}
    if simulator and simulator not in (known := (*SUITES, _OTHERS)):
        near = difflib.get_close_matches(simulator, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"--simulator {simulator} is no suite of LIBERO; the nearest is {near}.")
    homes = [name for name, tasks in SUITES.items() if said <= set(tasks)]
    folders = {file.path.resolve().parent.name for file in files}
    if simulator in SUITES and simulator not in homes:
        unknown = sorted(said - set(SUITES[simulator]))[0]
        raise ConfigError(
            f"--simulator {simulator} has no task {unknown!r}. Leave it out, or name the suite of these "
            "files."
        )
    if simulator:
        return simulator
    if len(homes) == 1:
        return homes[0]
    if len(folders) == 1 and (folder := folders.pop()).startswith("libero_") and folder not in SUITES:
        return folder
    raise ConfigError(
        f"The suite of these demonstrations cannot be told from their tasks ({sorted(said)[0]!r}, ...) and "
        "folders. Import one suite at a time, or say it with --simulator libero_90."
    )


def read_demonstrations(
    opened: DemonstrationFile, cameras: Sequence[str], *, simulator: str, task_id: int, first_seed: int
) -> Iterator[SimulatedEpisode]:
    """Yield the demonstrations of a file, one in memory at a time.

    Args:
        task_id: Number of the task; -1: it is not known.
    """
    try:
        with open_hdf5(opened.path) as file:
            for number, name in enumerate(opened.demos):
                arrays = _arrays(file, name, opened, cameras)
                start = SimStart(
                    name=f"{simulator}/{opened.path.stem if task_id < 0 else task_id}/{name}",
                    task=opened.instruction,
                    task_id=task_id,
                    seed=first_seed + number,
                )
                yield SimulatedEpisode(
                    start=start,
                    repeat=0,
                    task=opened.instruction,
                    terminated=False,
                    truncated=False,
                    seconds=0.0,
                    **arrays,
                )
    except _UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        raise _unreadable(opened.path, error) from error


def _arrays(
    file: h5py.File, name: str, opened: DemonstrationFile, cameras: Sequence[str]
) -> dict[str, NDArray[Any]]:
    demo: Any = group_in(group_in(file, "data"), name)
    group_in(demo, "obs")
    verdicts = "rewards" if "rewards" in demo else "dones"
    read = {what: dataset_in(file, f"data/{name}/{what}")[:] for what in ("actions", verdicts)}
    states = [dataset_in(file, f"data/{name}/obs/{what}")[:] for what in ("ee_states", "gripper_states")]
    pictures = [dataset_in(file, f"data/{name}/{_PICTURES[camera]}")[:] for camera in cameras]
    actions = read["actions"].astype(np.float32)
    steps = len(actions)
    shape = pictures[0].shape
    if actions.shape != (steps, len(DUMMY_ACTION)) or not np.isfinite(actions).all():
        raise ValueError(f"{name}/actions are {list(actions.shape)}, expected [T, 7] finite numbers")
    if any(p.shape != shape or p.dtype != np.uint8 for p in pictures) or shape[:1] != (steps,):
        raise ValueError(f"{name} has {steps} actions, but pictures {[list(p.shape) for p in pictures]}")
    if len(shape) != 4 or shape[-1] != 3 or any(len(s) != steps for s in (*states, read[verdicts])):
        raise ValueError(f"{name} has arrays of different lengths")
    shown = [p[:, :, ::-1] if opened.upright else p[:, ::-1, ::-1] for p in pictures]
    success = read[verdicts] > 0
    actions[0] = DUMMY_ACTION
    return {
        "frames": np.ascontiguousarray(shown[0]),
        "more_frames": np.stack(shown[1:], 1) if shown[1:] else np.zeros((steps, 0, *shape[1:]), np.uint8),
        "states": np.concatenate(states, axis=1).astype(np.float32),
        "poses": np.stack(list(map(_pose, *states))),
        "actions": actions,
        "rewards": success.astype(np.float32),
        "success": success,
    }


def _pose(hand: NDArray[np.floating], fingers: NDArray[np.floating]) -> NDArray[np.float32]:
    """Turn position and rotation ``[6]`` and two fingers ``[2]``, as published, into a pose ``[8]``."""
    return hand_pose(hand[:3], quaternion_of(hand[3:]), float(np.abs(fingers).sum()) / OPEN)


def import_demonstrations(
    paths: Sequence[Path], folder: Path, *, simulator: str = "", cameras: Sequence[str] = CAMERAS
) -> int:
    """Write recordings of the demonstrations of one suite, or nothing; return how many episodes.

    Args:
        folder: New; see `collect.must_be_new`.

    Raises:
        ConfigError: A file is none of demonstrations, or they are not of one suite.
    """
    files = [open_demonstrations(path) for path in paths]
    suite = suite_of_files(files, simulator)
    tasks = SUITES.get(suite) or tuple(sorted({file.instruction for file in files}))
    try:
        return _write(files, folder, suite, tasks, cameras)
    except BaseException:
        for part in folder.glob("part-*.h5"):  # The folder was new: half of an import is none.
            part.unlink()
        raise


def _write(
    files: Sequence[DemonstrationFile],
    folder: Path,
    suite: str,
    tasks: tuple[str, ...],
    cameras: Sequence[str],
) -> int:
    spec = SimulatorSpec(
        name=suite,
        tasks=tasks,
        trials=50,
        max_steps=1000,
        image_size=0,
        cameras=tuple(cameras),
        state_dim=8,
        poses=True,
    )
    written = parts = 0
    for file in tqdm(files, desc="import", unit="file", mininterval=2.0):
        task_id = _NUMBERS[suite][tasks.index(file.instruction)] if suite in _NUMBERS else -1
        episodes = read_demonstrations(file, cameras, simulator=suite, task_id=task_id, first_seed=written)
        about: dict[str, object] = {"imported": file.path.name, "demonstrations": len(file.demos)}
        for first in range(0, len(file.demos), EPISODES_PER_PART):
            some = islice(episodes, min(EPISODES_PER_PART, len(file.demos) - first))
            written += write_part(folder / f"part-{parts:05d}.h5", some, spec, about)
            parts += 1
    return written
