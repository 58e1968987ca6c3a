"""The doors through which facts come in from outside: what each reads of one episode, one start or one text.

A door is a function of a folder and of facts by keyword, which go through it as other people's data would.
It returns what was read; a value that its format cannot hold raises `Unstorable`. To sweep another fact, add
its keyword to the doors that take it, and its values to `tests/test_doors.py`.
"""

import csv
import inspect
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.evaluation.contact_sheet import imagine_again
from asyncrl.evaluation.success_rate import evaluate
from asyncrl.fitting.robomimic import open_libero
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.starts import keyframe_states, picture_starts
from asyncrl.launch.conformance import check_simulator
from asyncrl.policies.openvla.preprocess import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.records import ActionSpec
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork, save_reward
from asyncrl.simulators.interface import Seen, SimStart, SimulatorSource, SimulatorSpec, Stepped
from asyncrl.simulators.one_by_one import OneByOne, Outcome
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Observations, Play, chosen_tasks
from asyncrl.simulators.vector_env import VectorEnvSimulator
from asyncrl.worlds.start_states import load_start_states

TASK = "put the cube on the \u00e9tag\u00e8re"
STEPS, SIDE = 20, 32
PLAYED = ("instruction", "success", "reward", "end", "picture")
"""Facts that simulators say."""


class Unstorable(Exception):
    """The format of a door has no place for a value."""


@dataclass(kw_only=True)
class Read:
    """What came in; None where the door says nothing of it."""

    task: str | None = None
    solved: bool | None = None
    terminated: bool | None = None
    picture: bytes | None = None
    """Levels of the first picture, ``[H, W, 3]``."""


Door = Callable[..., Read]
DOORS: dict[str, Door] = {}


def door(function: Door) -> Door:
    """Enter a function in the table, under its own name."""
    DOORS[function.__name__] = function
    return function


def doors_of(fact: str) -> list[str]:
    """Names of the doors that take a fact; those of simulators take all that `Own.facts` may hold."""
    taken = {name: inspect.signature(function).parameters for name, function in DOORS.items()}
    return [name for name, facts in taken.items() if fact in facts or ("facts" in facts and fact in PLAYED)]


# ---- files ----


def text(value: Any) -> Any:
    """A value as HDF5 holds it: texts in UTF-8."""
    if value is None or isinstance(value, dict):
        raise Unstorable
    if isinstance(value, list):
        return list(map(text, value))
    try:
        return value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise Unstorable from error


def column(value: Any, steps: int = STEPS) -> np.ndarray:
    """Zeros of the value's type, and the value in the last step."""
    values = np.repeat(np.zeros_like(np.array(text(value)))[None], steps, axis=0)
    values[-1] = text(value)
    return values


def noise(steps: int = STEPS) -> np.ndarray:
    """Pictures ``[steps, H, W, 3]``."""
    return np.random.default_rng(0).integers(0, 256, (steps, SIDE, SIDE, 3), dtype=np.uint8)


PICTURE = noise(1)[0]


def shown(picture: Any, steps: int = STEPS) -> np.ndarray:
    """A picture in all steps."""
    if not isinstance(picture, np.ndarray):
        raise Unstorable
    return np.repeat(picture[None], steps, axis=0)


def moves(steps: int = STEPS) -> np.ndarray:
    """Actions ``[steps, 7]``, in which the gripper closes on the way."""
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, -1] = np.where(np.arange(steps) > steps // 2, 1, -1)
    return actions


def write_recording(
    path: Path, instruction: Any, success: Any, steps: int = STEPS, picture: Any = PICTURE
) -> Path:
    with h5py.File(path, "w") as file:
        file.attrs.update(format="asyncrl-recordings-2", simulator="mine", cameras=json.dumps(["main"]))
        file["frames"], file["actions"] = shown(picture, steps), moves(steps)
        file["success"] = column(success, steps)
        file["offsets"], file["tasks"] = [0, steps], np.array([text(instruction)])
        file["seeds"], file["task_ids"] = [0], [-1]
    return path


@door
def recordings(folder: Path, instruction: Any = TASK, success: Any = 1, picture: Any = PICTURE) -> Read:
    path = write_recording(folder / "part-00000.h5", instruction, success, picture=picture)
    read = load_recordings([path])
    return Read(task=read.tasks[0], solved=bool(read.solved()[0]), picture=read.frames[0].tobytes())


@door
def key_frames(folder: Path, instruction: Any = TASK) -> Read:
    read = load_recordings([write_recording(folder / "part-00000.h5", instruction, 1, steps=60)])
    return Read(task=keyframe_states(read, 4)[0].task)


def write_demonstration(
    path: Path, key: str = "", value: Any = None, picture: Any = PICTURE, **attributes: Any
) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        demo = data.create_group("demo_0")
        demo["obs/agentview_image"], demo["actions"] = shown(picture), moves()
        if key:
            demo[key] = column(value)
        for name, given in attributes.items():
            text(given)
            demo.attrs[name] = given
    return path


def read_demonstration(path: Path, **settings: Any) -> Read:
    read = load_recordings([path], DataSetSettings(**settings))
    first = read.frames[int(read.offsets[-2])]  # Of the last demonstration.
    return Read(task=read.tasks[0], solved=bool(read.solved()[0]), picture=first.tobytes())


@door
def robomimic_attributes(folder: Path, instruction: Any = TASK, success: Any = 1) -> Read:
    return read_demonstration(write_demonstration(folder / "a.hdf5", task=instruction, success=success))


@door
def robomimic_pictures(folder: Path, picture: Any = PICTURE) -> Read:
    if np.shape(picture)[:1] == (3,):
        raise Unstorable  # Colours first are read too.
    return read_demonstration(write_demonstration(folder / "a.hdf5", picture=picture, task=TASK))


@door
def robomimic_later_pictures(folder: Path, picture: Any = PICTURE) -> Read:
    path = write_demonstration(folder / "a.hdf5", task=TASK)
    with h5py.File(path, "a") as file:
        file.copy("data/demo_0", "data/demo_1")
        del file["data/demo_1/obs/agentview_image"]
        file["data/demo_1/obs/agentview_image"] = shown(picture)
    return read_demonstration(path)


@door
def robomimic_ep_meta(folder: Path, instruction: Any = TASK) -> Read:
    if isinstance(instruction, bytes):
        raise Unstorable
    return read_demonstration(
        write_demonstration(folder / "a.hdf5", ep_meta=json.dumps({"lang": instruction}))
    )


@door
def robomimic_key(folder: Path, success: Any = 1) -> Read:
    path = write_demonstration(folder / "a.hdf5", "solved", success)
    return read_demonstration(path, success="solved", task=TASK)


@door
def dataset_task(folder: Path, instruction: Any = TASK) -> Read:
    if not isinstance(instruction, str):
        raise Unstorable  # A flag is a text.
    return read_demonstration(write_demonstration(folder / "a.hdf5", success=1), task=instruction)


@door
def libero_demonstrations(
    folder: Path, instruction: Any = TASK, success: Any = 1, picture: Any = PICTURE
) -> Read:
    if np.shape(picture)[:1] == (3,):
        raise Unstorable  # Colours first are read too.
    with h5py.File(folder / "any.hdf5", "w") as file:
        data = file.create_group("data")
        if isinstance(instruction, bytes | list):
            raise Unstorable  # A list of letters is joined.
        data.attrs["problem_info"] = json.dumps({"language_instruction": instruction})
        demo = data.create_group("demo_0")
        demo["actions"], demo["rewards"] = moves(), column(success)
        demo["obs/ee_states"], demo["obs/gripper_states"] = np.zeros((STEPS, 6)), np.zeros((STEPS, 2))
        for camera in ("agentview_rgb", "eye_in_hand_rgb"):
            demo[f"obs/{camera}"] = shown(picture)
    (read,) = open_libero([folder / "any.hdf5"], "libero_90", ["agentview"])
    (episode,) = read.episodes()
    upright = episode.frames[0, ::-1, ::-1].tobytes()
    return Read(task=episode.task, solved=episode.solved, picture=upright)


@door
def lerobot(folder: Path, instruction: Any = TASK, success: Any = 1, picture_file: bytes = b"") -> Read:
    pa, pq, _ = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet", "av"))
    picture = {"bytes": picture_file or picture_as(), "path": None}
    verdicts, one = column(success).tolist(), {"shape": [1], "names": None}
    rows = [
        {
            "action": action.tolist(),
            "next.success": verdict,
            "see": picture,
            "episode_index": 0,
            "task_index": 0,
        }
        for action, verdict in zip(moves(), verdicts, strict=True)
    ]
    place = {"episode_index": 0, "length": STEPS, "data/chunk_index": 0, "data/file_index": 0}
    tables = {
        "data/chunk-000/file-000.parquet": lambda: pa.Table.from_pylist(rows),
        "meta/episodes/chunk-000/file-000.parquet": lambda: pa.Table.from_pylist([place]),
        "meta/tasks.parquet": lambda: pa.table({"task_index": [0], "task": [instruction]}),
    }
    for name, make in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(make(), folder / name)
        except (pa.ArrowException, UnicodeEncodeError) as error:
            raise Unstorable from error
    kind = "bool" if isinstance(success, bool) else "float32"
    features = {
        "see": {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": [7], "names": None},
        "next.success": {"dtype": kind, **one},
    }
    info = {"codebase_version": "v3.0", "fps": 10, "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return read_demonstration(folder)


@door
def rlinf_trajectories(folder: Path, instruction: Any = TASK, picture: Any = PICTURE) -> Read:
    frames = np.empty(1, object)
    frames[0] = {"image": picture, "delta_action": moves(1)[0], "instruction": instruction}
    try:
        np.save(folder / "traj0.npy", frames, allow_pickle=True)
    except UnicodeEncodeError as error:
        raise Unstorable from error
    (read,) = load_start_states(folder)
    return Read(task=read.task, picture=read.frame.tobytes())


@door
def start_states(folder: Path, instruction: Any = TASK, picture: Any = PICTURE) -> Read:
    with h5py.File(folder / "starts.h5", "w") as file:
        file.attrs["format"] = "asyncrl-start-states-1"
        file["name"], file["task"] = np.array([b"one"]), np.array([text(instruction)])
        file["frame"], file["context_length"] = shown(picture, 1), [0]
    (read,) = load_start_states(folder / "starts.h5")
    return Read(task=read.task, picture=read.frame.tobytes())


@door
def contexts(folder: Path, picture: Any = PICTURE) -> Read:
    with h5py.File(folder / "starts.h5", "w") as file:
        file.attrs["format"] = "asyncrl-start-states-1"
        file["name"], file["task"], file["frame"] = np.array([b"one"]), np.array([TASK.encode()]), noise(1)
        file["context_length"], file["context_actions"] = [4], moves(4)[None]
        file["context_frames"] = shown(picture, 4)[None]
    (read,) = load_start_states(folder / "starts.h5")
    return Read(picture=read.context_frames[0].tobytes())


def picture_as(kind: str = "PNG", picture: Image.Image | None = None, **settings: Any) -> bytes:
    """A picture file."""
    file = io.BytesIO()
    (picture or Image.fromarray(PICTURE)).save(file, kind, **settings)
    return file.getvalue()


def read_pictures(folder: Path, instructions: Path, content: bytes = b"") -> Read:
    (folder / "a.png").write_bytes(content or picture_as())
    (read,) = picture_starts(folder, instructions, DataSetSettings(), 1)
    return Read(task=read.task, picture=read.frame.tobytes())


@door
def picture_folders(folder: Path, picture_file: bytes) -> Read:
    (folder / "i.txt").write_text(TASK)
    return read_pictures(folder, folder / "i.txt", picture_file)


@door
def pictures_with_lines(folder: Path, instruction: Any = TASK) -> Read:
    content = text(instruction)
    if not isinstance(content, bytes) or len((instruction or "").splitlines()) > 1:
        raise Unstorable
    (folder / "i.txt").write_bytes(content)
    return read_pictures(folder, folder / "i.txt")


@door
def pictures_with_rows(folder: Path, instruction: Any = TASK) -> Read:
    text(instruction)
    if not isinstance(instruction, str):
        raise Unstorable
    with (folder / "i.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("picture", "instruction"), ("a.png", instruction)])
    return read_pictures(folder, folder / "i.csv")


@door
def reward_network(folder: Path, instruction: Any = TASK) -> Read:
    config = RewardConfig.tiny([TASK], SIDE)
    save_reward(folder, ResNetReward(RewardNetwork(config), config))
    content = json.loads((folder / "reward.json").read_text())
    if isinstance(instruction, bytes):
        raise Unstorable
    content["config"]["tasks"] = [instruction]
    (folder / "reward.json").write_text(json.dumps(content))
    ResNetReward.check(folder, [TASK])
    return Read(task=TASK)


# ---- simulators ----


class Own:
    """A simulator by the protocol itself, which says what the class attributes hold."""

    facts: ClassVar[dict[str, Any]] = {}

    def __init__(self, places: int = 1, image_size: int = 0) -> None:
        size: dict[str, Any] = {"image_size": SIDE, "places": places}
        tasks = self.facts.get("tasks", (TASK,))
        self.spec = SimulatorSpec(name="own", tasks=tasks, trials=0, max_steps=8, **size)

    def reset(self, places: list[int], starts: list[SimStart]) -> Seen:
        self.seed, self.steps = starts[0].seed, 0
        tasks: Any = (self.facts.get("instruction", TASK),) * len(places)
        return self.look(places)._replace(tasks=self.facts.get("all_tasks", tasks))

    def step(self, places: list[int], actions: np.ndarray, *, draw: bool) -> Stepped:
        self.steps, count = self.steps + 1, len(places)
        last = self.steps == self.spec.max_steps
        success: Any = [self.facts.get("success", 1) if last else False] * count
        rewards: Any = [self.facts.get("reward", 0.0)] * count
        ends: Any = [self.facts.get("end", False) if last else False] * count
        return Stepped(self.look(places), rewards, success, ends, np.full(count, last))

    def look(self, places: list[int]) -> Seen:
        return Seen(seen_by(self, len(places), 1), np.zeros((len(places), 0), np.float32))

    def close(self) -> None:
        pass


def seen_by(simulator: Any, *places: int) -> Any:
    """The picture of `Own.facts` in each place, or one that tells seed and step."""
    level = np.full((SIDE, SIDE, 3), simulator.seed % 200 + simulator.steps, np.uint8)
    picture = Own.facts.get("picture", level)
    return np.tile(picture, (*places, *[1] * picture.ndim)) if isinstance(picture, np.ndarray) else picture


class OwnPlace:
    """One place of a simulator of independent ones."""

    def reset(self, start: SimStart) -> Any:
        self.steps, self.seed = 0, start.seed
        return Own.facts.get("instruction", TASK)

    def step(self, action: np.ndarray) -> Outcome:
        self.steps += 1
        success = Own.facts.get("success", 1) if self.steps == 8 else False
        end = Own.facts.get("end", False) if self.steps == 8 else False
        return Outcome(success=success, reward=Own.facts.get("reward"), terminated=end)

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        return seen_by(self, 1), np.zeros(0, np.float32)


class OwnPlaces(OneByOne[OwnPlace]):
    def __init__(self, places: int = 1, image_size: int = 0) -> None:
        size: dict[str, Any] = {"image_size": SIDE, "places": places}
        spec = SimulatorSpec(name="places", tasks=(TASK,), trials=0, max_steps=8, **size)
        super().__init__(spec, [OwnPlace() for _ in range(places)])


class Environment:
    """Enough of a `gymnasium.vector.VectorEnv` that plays one episode of 8 steps."""

    metadata: ClassVar = {"autoreset_mode": SimpleNamespace(name="DISABLED")}
    num_envs, spec = 1, None
    single_observation_space = SimpleNamespace(shape=(SIDE, SIDE, 3), dtype=np.dtype(np.uint8))
    single_action_space = SimpleNamespace(
        low=-np.ones(7), high=np.ones(7), shape=(7,), dtype=np.dtype(np.float32)
    )

    def reset(self, *, seed: list[int | None], options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.seed, self.steps = int(seed[0] or 0), 0
        return self._see(), {"task": [Own.facts.get("instruction", TASK)]}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.steps += 1
        success = Own.facts.get("success", 1) if self.steps == 8 else False
        reward, end = Own.facts.get("reward", 0.0), Own.facts.get("end", False) if self.steps == 8 else False
        return self._see(), [reward], [end], [self.steps == 8], {"success": [success]}

    def close(self) -> None:
        pass

    def _see(self) -> np.ndarray:
        return seen_by(self, 1)


def own_environment(places: int, image_size: int) -> VectorEnvSimulator:
    return VectorEnvSimulator(Environment(), task=Own.facts.get("task", ""), max_steps=8, name="vector")


def still(shown: Observations) -> np.ndarray:
    """A policy that does not move."""
    return np.zeros((len(shown.tasks), 8, 7), np.float32)


def play(name: str, **facts: Any) -> Read:
    """Evaluate one episode in a simulator of this module."""
    Own.facts = facts
    with SimulatorPool(SimulatorSource(name=f"support.doors:{name}"), workers=0) as pool:
        start = SimStart(name="own/seed-1", task="", seed=1)
        _, (episode,) = evaluate(pool, still, [Play(start=start)])
    first = episode.frames[0].tobytes()
    return Read(task=episode.task, solved=episode.solved, terminated=episode.terminated, picture=first)


@door
def own_simulator(folder: Path, **facts: Any) -> Read:
    return play("Own", **facts)


@door
def own_simulators_tasks(folder: Path, instruction: Any = TASK) -> Read:
    Own.facts = {"tasks": (instruction,)}
    return Read(task=SimulatorSource(name="support.doors:Own").spec().tasks[0])


@door
def one_by_one(folder: Path, **facts: Any) -> Read:
    return play("OwnPlaces", **facts)


@door
def checked_simulator(folder: Path, instruction: Any = TASK, success: Any = True, reward: Any = 0.0) -> Read:
    Own.facts = {"instruction": instruction, "success": success, "reward": reward}
    list(check_simulator(OwnPlaces()))
    return Read(task=TASK, solved=float(success) > 0.5)


@door
def vector_env(folder: Path, **facts: Any) -> Read:
    return play("own_environment", **facts)


@door
def vector_envs_task(folder: Path, instruction: Any = TASK) -> Read:
    if instruction in ("", None):
        raise Unstorable  # Then info has it.
    return play("own_environment", task=instruction)


@door
def chosen_of_tasks(folder: Path, instruction: Any = TASK) -> Read:
    if not isinstance(instruction, str):
        raise Unstorable
    Own.facts = {"tasks": ("open the drawer", TASK)}
    (number,) = chosen_tasks(Own().spec, [instruction])
    return Read(task=Own().spec.tasks[number])


class OwnWorld:
    """A world that draws one picture."""

    image_size, action_spec = SIDE, ActionSpec()

    def __init__(self, picture: Any) -> None:
        self.picture = picture

    def start(self, states: Any, *, decisions: int) -> None:
        pass

    def imagine(self, state: Any, actions: np.ndarray, seeds: Any) -> tuple[Any, Any]:
        drawn = torch.from_numpy(np.tile(self.picture, (len(actions), 8, *[1] * self.picture.ndim)))
        return drawn, SimpleNamespace(finite=torch.ones(len(actions), dtype=torch.bool))


@door
def own_world(folder: Path, picture: Any = PICTURE) -> Read:
    if not isinstance(picture, np.ndarray):
        raise Unstorable
    path = write_recording(folder / "part-00000.h5", TASK, 1)
    read = load_recordings([path])
    episode: Any = SimpleNamespace(
        actions=read.actions, frames=read.frames[:STEPS], task=TASK, seed=0, poses=read.poses
    )
    world: Any = OwnWorld(picture)
    return Read(picture=imagine_again(world, [episode])[0][1].tobytes())


# ---- the prompt ----


@door
def prompt(folder: Path, instruction: Any = TASK) -> Read:
    if isinstance(instruction, list | dict):
        raise Unstorable  # Prompts are kept by their texts.
    tokenizer = PromptTokenizer(build_word_tokenizer(words_for([TASK])), pad_id=999)
    return Read(task=TASK if tokenizer.ids(instruction) == tokenizer.ids(TASK) else "another")
