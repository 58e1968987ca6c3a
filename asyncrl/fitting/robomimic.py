"""HDF5 demonstrations ``data/demo_*``: robomimic observes before an action, LIBERO after.

Letters: T samples of a demonstration, H W picture size.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.facts import check_array, check_instruction, check_pictures, check_verdicts
from asyncrl.fitting.data_sets import DataSet, check_numbers, place_picture
from asyncrl.fitting.recording_files import UNREADABLE, Looks
from asyncrl.fitting.settings import NONE, DataSetSettings
from asyncrl.records import ACTION_DIM
from asyncrl.simulators.interface import SimStart, hand_pose
from asyncrl.simulators.libero.scene import OPEN, quaternion_of
from asyncrl.simulators.libero.tasks import INSTRUCTIONS, SUITES, instruction
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.untrusted import dataset_in, group_in, open_hdf5, parse_json

_STATES: Final = (
    ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    ("robot_state",),
)  # Usual states: robosuite's, and that of our own exports.
LIBERO_CAMERAS: Final = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}  # Our name -> key.
LIBERO_NUMBERS: Final = {
    "libero_spatial": (0, 2, 4, 6, 8, 1, 3, 5, 7, 9),
    "libero_object": (0, 3, 6, 8, 1, 4, 7, 9, 2, 5),
    "libero_goal": (0, 3, 5, 8, 1, 4, 6, 9, 2, 7),
    "libero_10": (5, 8, 7, 0, 1, 3, 4, 6, 9, 2),
}
"""The benchmark's number of each task in `INSTRUCTIONS`, whose order differs."""


def holds_libero(file: h5py.File) -> bool:
    """Return True for a file of LIBERO's demonstrations."""
    data = group_in(file, "data")
    obs = group_in(data, f"{next(iter(data), '')}/obs") if "problem_info" in data.attrs else ()
    return "agentview_rgb" in obs and "ee_states" in obs


def _number(demo: str) -> int:
    return int(demo.removeprefix("demo_"))


class RobomimicFile(DataSet):
    """One file of robomimic's: observation t was made before action t."""

    REFUSAL = "{path} cannot be read as a robomimic file ({reason}). Mend it, or leave it out."

    def __init__(self, path: Path, settings: DataSetSettings) -> None:
        super().__init__(path, settings)
        with self._opened() as file:
            names = list(map(str, group_in(file, "data")))
            if odd := [name for name in names if not re.fullmatch(r"demo_[0-9]{1,18}", name)]:
                raise ValueError(f"data/{odd[0]} is not called demo_ and a number: rename it")
            self.demos = sorted(names, key=_number)[: settings.episodes or None]
            if not self.demos:
                raise ValueError("there is no data/demo_0")
            self._check_kind(file)
            first = f"data/{self.demos[0]}"
            demo, obs = group_in(file, first), group_in(file, f"{first}/obs")
            seen = list(map(str, obs))
            sizes = {key: size for key in seen if (size := _picture_size(obs, key))}
            height, width = self.choose_cameras(sizes)
            self._stored = {key: dataset_in(obs, key).shape[1:] for key in self.cameras}
            keys = [key for key in map(str, demo) if _described(demo, key) is not None]
            state_keys = [key for key in seen if key not in sizes]
            self.choose_keys(keys, state_keys, action="actions", states=_STATES, reward="rewards")
            self.state_dim = sum(_width(dataset_in(file, f"{first}/obs/{key}")) for key in self.state)
            simulator, rate = self._environment(file)
            self.looks = Looks(
                simulator=simulator,
                cameras=tuple(key.removesuffix("_image") for key in self.cameras),
                height=height,
                width=width,
                action_dim=_width(dataset_in(file, f"{first}/{self.action}")),
                rate=rate / settings.stride,
            )
            lengths = [len(dataset_in(file, f"data/{name}/{self.action}")) for name in self.demos]
            if min(lengths) < 1:
                raise ValueError("a demonstration has no action")
            self.frames = self.count_frames(lengths)

    def _check_kind(self, file: h5py.File) -> None:
        if holds_libero(file):
            raise ConfigError(
                f"{self.path} has LIBERO's demonstrations, whose pictures come after their actions and are "
                "upside down. Import them first: asyncrl recordings import FILES --out FOLDER."
            )

    def _environment(self, file: h5py.File) -> tuple[str, float]:
        env = self._json_in(group_in(file, "data"), "env_args")
        given = env.get("env_kwargs")
        kwargs: dict[str, Any] = given if isinstance(given, dict) else {}
        if kwargs.get("sample") == "decision":
            raise ConfigError(
                f"{self.path} has one sample per decision: the pictures and actions between are not in it. "
                "Export with --rate step."
            )
        name, rate = env.get("env_name"), kwargs.get("control_freq", kwargs.get("steps_per_second", 0))
        rate = 0 if rate is None else rate
        if type(rate) not in (int, float) or not 0 <= rate <= 10_000:
            raise ValueError(f"env_args has {rate!r} steps a second")
        named = name if isinstance(name, str) and name else "robomimic"
        return self.settings.simulator or named, float(rate)

    def _json_in(self, group: h5py.Group, name: str) -> dict[str, Any]:
        if name not in group.attrs:
            return {}
        try:
            found = group.attrs[name]
            return parse_json(found if isinstance(found, bytes) else str(found).encode())
        except ValueError as error:
            self.note(f"{group.name}: {name} is not read ({first_line(error)})")
            return {}

    @contextmanager
    def _opened(self) -> Iterator[h5py.File]:
        try:
            with open_hdf5(self.path) as file:
                yield file
        except ConfigError:
            raise
        except UNREADABLE as error:
            raise ConfigError(self.REFUSAL.format(path=self.path, reason=first_line(error))) from error

    def episodes(self) -> Iterator[SimulatedEpisode]:
        """Read one demonstration after the other."""
        with self._opened() as file:
            for name in self.demos:
                yield self._episode(file, name)

    def _episode(self, file: h5py.File, name: str) -> SimulatedEpisode:
        actions = self._numbers(file, name, self.action, "action")
        steps = len(actions)
        rewards = np.zeros(steps, np.float32)
        if self.reward:
            stored = self._numbers(file, name, self.reward, "reward")
            rewards = check_array(stored, (steps, 1), f"{self.path} {name}: its rewards")[:, 0]
        success = self._solved(file, name, rewards)
        where, demo = f"{self.path} {name}", group_in(file, f"data/{name}")
        if (said := demo.attrs.get("num_samples", steps)) != steps:
            raise ValueError(f"{name} has {steps} actions, but num_samples {said}")
        last = set(group_in(demo, "next_obs")) if "next_obs" in demo else set[str]()
        after = {*self.cameras, *self.state} <= last
        return self.episode(
            where,
            self._start(file, name),
            pictures=self._pictures(file, name, steps, after),
            states=self._states(file, name, steps, after),
            actions=actions,
            rewards=rewards,
            success=success,
        )

    def _start(self, file: h5py.File, name: str) -> SimStart:
        return SimStart(
            name=f"{self.looks.simulator}/{self.path.stem}/{name}",
            task=self._task(file, name),
            seed=_number(name),
        )

    def _numbers(self, file: h5py.File, name: str, key: str, flag: str) -> NDArray[np.float32]:
        stored = dataset_in(file, f"data/{name}/{key}")[:]
        stored = stored[:, None] if stored.ndim == 1 else stored
        return check_numbers(f"{self.path} {name}", key.rpartition("/")[2], stored, flag)

    def _pictures(self, file: h5py.File, name: str, steps: int, after: bool) -> NDArray[np.uint8]:
        kept = range(0, steps, self.settings.stride)
        shape = (len(kept) + after, len(self.cameras), self.looks.height, self.looks.width, 3)
        placed = np.empty(shape, np.uint8)
        for camera, key in enumerate(self.cameras):
            all_stored = [
                dataset_in(file, f"data/{name}/{of}/{key}") for of in ("obs", "next_obs")[: 1 + after]
            ]
            for stored in all_stored:
                check_pictures(stored, (steps, *self._stored[key]), f"{self.path} {name}: pictures of {key}")
            sources = [(all_stored[0], step) for step in kept] + [(all_stored[-1], -1)] * after
            for row, (source, step) in enumerate(sources):
                picture = source[step]
                upright = picture if picture.shape[-1] == 3 else picture.transpose(1, 2, 0)
                placed[row, camera] = place_picture(upright, self.settings)
        return placed

    def _states(self, file: h5py.File, name: str, steps: int, after: bool) -> NDArray[np.float32]:
        columns = [np.zeros((-(-steps // self.settings.stride) + after, 0), np.float32)]
        for key in self.state:
            numbers = self._numbers(file, name, f"obs/{key}", "state")
            if len(numbers) != steps:
                raise ValueError(f"{name} has {steps} actions, but states of another length")
            last = [self._numbers(file, name, f"next_obs/{key}", "state")[-1:]] if after else []
            columns.append(np.concatenate([numbers[:: self.settings.stride], *last]))
        return np.concatenate(columns, axis=1)

    def _solved(self, file: h5py.File, name: str, rewards: NDArray[np.float32]) -> NDArray[np.bool_]:
        where = f"{self.path} {name}: success (--dataset.success KEY, or none)"
        if self.success:
            stored = self._numbers(file, name, self.success, "success")
            return check_verdicts(stored, (len(rewards), 1), where)[:, 0]
        nothing, demo = np.zeros(len(rewards), bool), group_in(file, f"data/{name}")
        if self.settings.success != NONE and "success" in demo.attrs:
            nothing[-1] = check_verdicts(demo.attrs["success"], (), where)
        elif self.settings.success != NONE and self.reward and np.isin(rewards, (0, 1)).all():
            return rewards > 0
        else:
            self.note_no_success()
        return nothing

    def _task(self, file: h5py.File, name: str) -> str:
        data, demo = group_in(file, "data"), group_in(file, f"data/{name}")
        task: Any = self.settings.task
        task = task or ("task" in demo.attrs and demo.attrs["task"])
        task = task or self._json_in(demo, "ep_meta").get("lang")
        task = task or self._json_in(data, "problem_info").get("language_instruction")
        return check_instruction(task or "", f"{self.path} {name} (or --dataset.task)")


class LiberoFile(RobomimicFile):
    """The demonstrations of one of LIBERO's tasks, as published.

    Observation t was made after action t: the first action's start is not stored, so the episode begins with
    the picture after it. Pictures are mirrored and, unless the file is marked "opencv", upside down.
    """

    REFUSAL = (
        "{path} is not a file of LIBERO's demonstrations ({reason}). Give files as published, such as "
        "libero_spatial/NAME_demo.hdf5."
    )

    def __init__(self, path: Path, cameras: Sequence[str]) -> None:
        keys = tuple(LIBERO_CAMERAS[camera] for camera in cameras)
        super().__init__(path, DataSetSettings(cameras=keys, state=("ee_states", "gripper_states")))
        if (width := self.looks.action_dim) != ACTION_DIM:
            reason = f"its actions are {width} numbers wide, expected 7"
            raise ConfigError(self.REFUSAL.format(path=path, reason=reason))
        self.looks = replace(self.looks, cameras=tuple(cameras), rate=0.0)
        self.frames -= len(self.demos)
        self.task_id, self.first_seed = -1, 0

    def _check_kind(self, file: h5py.File) -> None:
        data = group_in(file, "data")
        demo, convention = group_in(data, self.demos[0]), "macros_image_convention"
        upright = convention in data.attrs and str(data.attrs[convention]) == "opencv"
        self.settings = replace(
            self.settings,
            flip="none" if upright else "vertical",
            success="rewards" if "rewards" in demo else "dones",
        )
        language = parse_json(str(data.attrs["problem_info"]).encode())["language_instruction"]
        stem = self.path.stem  # It has the simulator's wording where it is named as published.
        named = instruction(stem.removesuffix("_demo")) if stem.endswith("_demo") else ""
        language = "".join(language).strip('" ') if isinstance(language, str | list) else language
        self.instruction = check_instruction(named or language, str(self.path))

    def _start(self, file: h5py.File, name: str) -> SimStart:
        return SimStart(
            name=f"{self.looks.simulator}/{self.path.stem if self.task_id < 0 else self.task_id}/{name}",
            task=self.instruction,
            task_id=self.task_id,
            seed=self.first_seed + self.demos.index(name),
        )

    def episode(self, where: str, start: SimStart, **arrays: NDArray[Any]) -> SimulatedEpisode:
        """Start the episode at the picture after the first action, and mirror all pictures."""
        success = arrays["success"][1:]
        arrays |= {
            "actions": arrays["actions"][1:],
            "success": success,
            "rewards": success.astype(np.float32),
        }
        arrays["pictures"] = np.ascontiguousarray(arrays["pictures"][..., ::-1, :])
        return super().episode(where, start, **arrays)

    def _episode(self, file: h5py.File, name: str) -> SimulatedEpisode:
        episode = super()._episode(file, name)
        hand, fingers = (dataset_in(file, f"data/{name}/obs/{key}")[:] for key in self.state)
        poses = [
            hand_pose(h[:3], quaternion_of(h[3:]), float(np.abs(f).sum()) / OPEN)
            for h, f in zip(hand, fingers, strict=True)
        ]
        episode.poses = np.stack(poses)
        return episode


def open_libero(paths: Sequence[Path], simulator: str, cameras: Sequence[str]) -> list[LiberoFile]:
    """Open a suite's demonstrations; `simulator` '': the suite with all these tasks, else the folder's."""
    files = [LiberoFile(path, cameras) for path in paths]
    suite, seed = _suite_of(files, simulator), 0
    for file in files:
        file.looks, file.first_seed = replace(file.looks, simulator=suite), seed
        if suite in LIBERO_NUMBERS:
            file.task_id = LIBERO_NUMBERS[suite][INSTRUCTIONS[suite].index(file.instruction)]
        seed += len(file.demos)
    return files


def _suite_of(files: Sequence[LiberoFile], simulator: str) -> str:
    tasks = {file.instruction for file in files}
    # The 90 tasks of libero_90 have 74 instructions: a file does not tell its task's number.
    if simulator and simulator not in SUITES:
        near = difflib.get_close_matches(simulator, SUITES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"--simulator {simulator} is no suite of LIBERO; the nearest is {near}.")
    homes = [name for name, own in INSTRUCTIONS.items() if tasks <= set(own)]
    if simulator in INSTRUCTIONS and simulator not in homes:
        unknown = sorted(tasks - set(INSTRUCTIONS[simulator]))[0]
        raise ConfigError(
            f"--simulator {simulator} has no task {unknown!r}. Leave it out, or name the suite of these "
            "files."
        )
    folders = {file.path.resolve().parent.name for file in files}
    if simulator or len(homes) == 1:
        return simulator or homes[0]
    if len(folders) == 1 and (folder := folders.pop()).startswith("libero_") and folder not in INSTRUCTIONS:
        return folder
    raise ConfigError(
        f"The suite of these demonstrations does not follow from their tasks ({sorted(tasks)[0]!r}, ...) and "
        "folders. Import one suite at a time, or say it with --simulator libero_90."
    )


def _described(group: h5py.Group, name: str) -> h5py.Dataset | None:
    try:
        return dataset_in(group, name)
    except TypeError:  # A group, or a link to another file.
        return None


def _picture_size(obs: h5py.Group, key: str) -> tuple[int, int] | None:
    found = _described(obs, key)
    if found is None or found.ndim != 4 or not found.size:
        return None
    if found.shape[-1] == 3:
        return found.shape[1], found.shape[2]
    return (found.shape[2], found.shape[3]) if found.shape[1] == 3 else None


def _width(dataset: h5py.Dataset) -> int:
    return dataset.shape[1] if dataset.ndim > 1 else 1
