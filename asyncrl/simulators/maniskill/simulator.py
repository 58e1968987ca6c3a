"""Simulate a task of ManiSkill3: each place alone on the CPU, or all of them in one batch on a GPU.

Physics by PhysX, pictures by Vulkan. ManiSkill shows, rewards and draws at every step; here a picture is
drawn when somebody wants it, and nothing is hidden: a goal that ManiSkill draws only for people is shown, as
a policy that sees cannot know it otherwise.

Dimension letters:
    n  places addressed      P  places in all      K  cameras      H, W  picture size in pixels (equal)
    Q  numbers of state      A  numbers per action

RLinf's shaped reward of ManiSkill's pick-and-place tasks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, Seen, SimStart, SimulatorSpec, Stepped, hand_pose
from asyncrl.simulators.maniskill.expert import EXPERTS, SceneView, axis_angle, make_expert
from asyncrl.simulators.maniskill.tasks import (
    TASKS,
    ManiSkillTask,
    load_maniskill,
    make_environment,
    renderer,
    reward_mode,
)

GRASPED: Final = 0.1
HELD: Final = 0.1
HELD_STEPS: Final = 5
"""Steps in a row after which an object counts as held."""
SOLVED: Final = 1.0


class GraspReward:
    """Pays for what was reached: 0.1 for a grasp, 0.1 for holding on, 1 while the task is fulfilled.

    Grasp and hold count once they were seen, to the end of the episode; the success counts at its moment, and
    only after a grasp. Each step pays the difference to the step before, so an episode sums up to what it has
    in the end.

    Args:
        places: Number of places.
        grasped: Whether the environment says that an object is held; empty: it does not.

    Example:
        >>> reward = GraspReward(1, "is_grasped")
        >>> reward.begin(0, held=False)
        >>> [round(reward.step(0, success, held), 1) for success, held in [(False, True), (True, False)]]
        [0.1, 1.0]
    """

    def __init__(self, places: int, grasped: str) -> None:
        self.grasped = grasped
        self._in_row = np.zeros(places, np.int64)
        self._was_grasped = np.zeros(places, np.bool_)
        self._was_held = np.zeros(places, np.bool_)
        self._before = np.zeros(places)

    def begin(self, place: int, held: bool) -> None:
        """Begin an episode in a place; `held`: whether the object is held from the beginning."""
        self._in_row[place], self._was_grasped[place], self._was_held[place] = int(held), held, False
        self._before[place] = 0.0

    def step(self, place: int, success: bool, held: bool) -> float:
        """Return the reward of a step after which `success` and `held` are so."""
        self._in_row[place] = self._in_row[place] + 1 if held else 0
        self._was_grasped[place] |= held
        self._was_held[place] |= self._in_row[place] >= HELD_STEPS
        worth = GRASPED * self._was_grasped[place] + HELD * self._was_held[place]
        worth += SOLVED * (success and self._was_grasped[place])
        paid = worth - self._before[place]
        self._before[place] = worth
        return float(paid)


IMAGE_SIZE: Final = 128
"""Side of the pictures where nobody says another: ManiSkill's own."""
PUBLISHED_SIZE: Final = 224
"""Likewise of tasks with published policies, which see 224 pixels."""
_CHOICES: Final = {
    "backend": ("cpu", "gpu"),
    "render": ("auto", "cpu", "gpu"),
    "reward": ("success", "shaped", "dense"),
    "convention": ("", "asyncrl", "maniskill"),
    "objects": ("train", "test", "all"),
}


class ManiSkill:
    """One task. Its classes are attributes of this module: ``pick_cube`` and so on.

    Args:
        places: Episodes played at once.
        image_size: Side of the pictures in pixels; 0: 128, or 224 for tasks with published policies.
        horizon: Steps until an episode is truncated; 0: ManiSkill's own number.
        backend: ``cpu``: each place is a simulation of its own. ``gpu``: all places are one simulation on a
            CUDA device; they step together.
        render: Where pictures are drawn; ``auto``: on the GPU where there is one.
        reward: ``success``; ``shaped``: RLinf's (`shaping.GraspReward`); ``dense``: ManiSkill's own between 0
            and 1.
        wrist: Whether the camera on the hand is seen too, as a second picture.
        rebuild: Whether every episode begins in a scene that is built anew, about 0.2 s each. The order in
            which PhysX solves contacts depends on what happened before: without it an episode depends, from
            its first contact on, on those that were played before it. Not with `backend=gpu`.
        convention: ``asyncrl``: rotations are right-handed, gripper -1 = open. ``maniskill``: numbers are
            handed on as they are: rotations of `pd_ee_delta_pose` have the other sign, gripper +1 = open.
            Empty: `maniskill` for tasks with published policies, else `asyncrl`.
        module: A module of yours that registers the environment with ManiSkill when it is imported.
        objects: Which set of objects tasks with published policies draw from.

    Raises:
        AssetError: The extra is not installed, there is no Vulkan device, or files of the task are missing.
        ConfigError: An option is unknown, or the task does not have it.
    """

    name: ClassVar[str] = ""
    task: ClassVar[ManiSkillTask]
    usual_places: ClassVar[int] = 4
    any_image_size: ClassVar[bool] = True

    def __init__(
        self,
        *,
        places: int = 1,
        image_size: int = 0,
        horizon: int = 0,
        backend: str = "cpu",
        render: str = "auto",
        reward: str = "success",
        wrist: bool = False,
        rebuild: bool = True,
        convention: str = "",
        module: str = "",
        objects: str = "train",
    ) -> None:
        chosen = {"backend": backend, "render": render, "reward": reward, "convention": convention}
        _check_choices(self.name, chosen | {"objects": objects})
        _check_fits(self.name, self.task, batched=backend == "gpu", reward=reward, wrist=wrist)
        self._options: dict[str, Any] = {"obj_set": objects} if self.task.published else {}
        self._reward, self._batched = reward, backend == "gpu"
        if rebuild and not self._batched:
            self._options["reconfigure"] = True
        size = image_size or (PUBLISHED_SIZE if self.task.published else IMAGE_SIZE)
        gym = load_maniskill(self.name, self.task, module)
        self._cameras = (self.task.camera, *([self.task.wrist] if wrist else []))
        settings = {
            "reward_mode": reward_mode(self.name, self.task.environment, reward),
            "control_mode": self.task.control,
            "sim_backend": "physx_cuda" if self._batched else "physx_cpu",
            "render_backend": renderer(render),
        }
        if self.task.published:  # Their picture has a size of its own, and the robot is cut out of it.
            settings["obs_mode"] = "rgb+segmentation"
        else:
            settings |= {"obs_mode": "none", "sensor_configs": {"width": size, "height": size}}
        counts = [places] if self._batched else [1] * places
        self._envs = [make_environment(gym, self.task.environment, count, settings) for count in counts]
        """One of P rows, or P of one."""
        self._shown: list[Any] = [None] * len(self._envs)
        """What each showed last, where drawing is the environment's own affair."""
        self._steps = np.zeros(places, np.int64)
        self._playing = np.zeros(places, np.bool_)
        self._shaped = GraspReward(places, self.task.grasped)
        low, high = _bounds(self._envs[0].single_action_space)
        ours = (convention or ("maniskill" if self.task.published else "asyncrl")) == "asyncrl"
        self._signs = _signs(self.task, len(low)) if ours else np.ones(len(low))
        """``[A]`` what an action is multiplied with to be ManiSkill's. Its own inverse."""
        self.spec = SimulatorSpec(
            name=self.name,
            tasks=(self.task.instruction,) if self.task.instruction else (),
            trials=0,
            max_steps=horizon or gym.spec(self.task.environment).max_episode_steps,
            image_size=size,
            cameras=("main", "wrist") if wrist else ("main",),
            state_dim=self._states(0).shape[1],
            poses=self.task.robot == "gripper" and not hasattr(self._envs[0].agent, "agents"),
            action_low=tuple(np.where(self._signs < 0, -high, low).tolist()),
            action_high=tuple(np.where(self._signs < 0, -low, high).tolist()),
            idle=tuple((_idle(self.task, len(low)) * self._signs + 0.0).tolist()),
            reward="success" if reward == "success" else "dense",
            places=places,
            lockstep=self._batched,
        )

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each place, alone: in a batch, its draws would depend on its neighbours."""
        tasks = []
        for place, start in zip(places, starts, strict=True):
            if start.trial >= 0:
                raise ConfigError(f"{start.name} is a stored start, but {self.name}'s starts are seeds.")
            if start.seed >= 2**32:
                raise ConfigError(f"{start.name}: ManiSkill's seeds end below {2**32}. Use a smaller --seed.")
            index, row = self._where(place)
            env = self._envs[index]
            options = dict(self._options)
            if self._batched:
                torch = importlib.import_module("torch")
                options["env_idx"] = torch.tensor([row], device=env.device)
            shown, info = env.reset(seed=[start.seed] * env.num_envs, options=options)
            env._hidden_objects.clear()
            self._shown[index] = shown
            self._steps[place], self._playing[place] = 0, True
            self._shaped.begin(place, bool(_flags(info, self.task.grasped, env.num_envs)[row]))
            tasks.append(self.task.instruction or _plain(env.get_language_instruction()[row]))
        return self.look(places)._replace(tasks=tuple(tasks))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """See `Simulator.step`."""
        rows, width = list(places), self.spec.action_dim
        if actions.shape != (len(rows), width) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite [{len(rows)}, {width}], got shape {actions.shape}")
        if over := [place for place in rows if not self._playing[place]]:
            raise ValueError(f"places {over} have no episode under way: it ended, or was left out of a step")
        if self._batched:
            self._playing[:] = False
        clipped = np.clip(actions.astype(np.float64), self.spec.action_low, self.spec.action_high)
        rewards, success, failed = np.zeros(len(rows), np.float32), [False] * len(rows), [False] * len(rows)
        for index, members in self._by_environment(rows).items():
            given, info = self._step_environment(index, members, clipped)
            count = self._envs[index].num_envs
            solved, fell = _flags(info, "success", count), _flags(info, "fail", count)
            held = _flags(info, self.task.grasped, count)
            for i, row in members:
                success[i], failed[i] = bool(solved[row]), bool(fell[row])
                if self._reward == "shaped":
                    rewards[i] = self._shaped.step(rows[i], success[i], bool(held[row]))
                else:
                    rewards[i] = success[i] if self._reward == "success" else given[row]
        self._steps[rows] += 1
        terminated = np.array(failed, np.bool_)
        truncated = (self._steps[rows] >= self.spec.max_steps) & ~terminated
        self._playing[rows] = ~(terminated | truncated)
        seen = self.look(rows) if draw else None
        return Stepped(seen, rewards, np.array(success, np.bool_), terminated, truncated)

    def look(self, places: Sequence[int]) -> Seen:
        """Draw places as they are. See `Simulator.look`."""
        groups = self._by_environment(list(places))
        pictures = {index: self._draw(index) for index in groups}
        states = {index: self._states(index) for index in groups}
        where = [self._where(place) for place in places]
        seen = Seen(
            np.stack([pictures[index][row] for index, row in where]),
            np.stack([states[index][row] for index, row in where]),
        )
        if not self.spec.poses:
            return seen
        poses = {index: self._poses(index) for index in groups}
        return seen._replace(poses=np.stack([poses[index][row] for index, row in where]))

    def close(self) -> None:
        """Free the simulations. May be called again."""
        envs, self._envs = self._envs, []
        for env in envs:
            env.close()

    def _where(self, place: int) -> tuple[int, int]:
        """Return which environment a place is in, and which row of it."""
        return (0, place) if self._batched else (place, 0)

    def _by_environment(self, places: list[int]) -> dict[int, list[tuple[int, int]]]:
        """Return, by environment, which of `places` and which rows are in it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, place in enumerate(places):
            index, row = self._where(place)
            found.setdefault(index, []).append((i, row))
        return found

    def _step_environment(
        self, index: int, members: list[tuple[int, int]], actions: NDArray[np.floating]
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Step one environment; rows that no member has get the idle action."""
        torch, env = importlib.import_module("torch"), self._envs[index]
        batch = np.tile(np.asarray(self.spec.idle), (env.num_envs, 1))
        for i, row in members:
            batch[row] = actions[i]
        given: Any = torch.as_tensor((batch * self._signs).astype(np.float32), device=env.device)
        if hasattr(env.single_action_space, "spaces"):  # Several robots: by name.
            widths = [space.shape[0] for space in env.single_action_space.spaces.values()]
            given = dict(zip(env.single_action_space.spaces, given.split(widths, dim=1), strict=True))
        self._shown[index], rewards, _, _, info = env.step(given)
        return rewards.float().cpu().numpy(), info

    def _draw(self, index: int) -> NDArray[np.uint8]:
        """Return the pictures ``[rows, K, H, W, 3]`` of one environment."""
        env = self._envs[index]
        if self.task.published:
            images = self._shown[index]["sensor_data"][self.task.camera]["rgb"].cpu().numpy()
            return np.stack([_squeezed(image, self.spec.image_size) for image in images])[:, None]
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        found = []
        for camera in self._cameras:
            sensor = env.scene.sensors[camera]
            sensor.capture()
            shown = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
            if env.backend.render_device.is_cuda():  # It is drawn on a stream of its own.
                importlib.import_module("torch").cuda.synchronize()
            found.append(shown.cpu().numpy())
        return np.stack(found, axis=1)

    def _states(self, index: int) -> NDArray[np.float32]:
        """Return ``[rows, Q]``: of each arm position 3, axis-angle 3 and fingers 2; else all joints."""
        agent = self._envs[index].agent
        parts = []
        for arm in getattr(agent, "agents", [agent]):
            joints = arm.robot.get_qpos().cpu().numpy()
            if self.task.robot != "gripper":
                parts.append(joints)
                continue
            pose = arm.tcp.pose
            turned = np.stack([axis_angle(q) for q in pose.q.cpu().numpy().astype(np.float64)])
            parts += [pose.p.cpu().numpy(), turned, joints[:, -2:]]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _poses(self, index: int) -> NDArray[np.float32]:
        """Return ``[rows, 8]`` where the only arm's hand is: see `hand_pose`."""
        agent = self._envs[index].agent
        position, quaternion = (values.cpu().numpy() for values in (agent.tcp.pose.p, agent.tcp.pose.q))
        fingers = agent.robot.get_qpos()[:, -2:].cpu().numpy()
        low, high = agent.robot.get_qlimits()[0, -2:].cpu().numpy().T
        opened = ((fingers - low) / (high - low)).mean(axis=1)
        # ManiSkill has the real part first.
        rows = zip(position, np.roll(quaternion, -1, axis=1), opened, strict=True)
        return np.stack([hand_pose(*row) for row in rows])


class ManiSkillWithExpert(ManiSkill):
    """A task that `asyncrl collect` and `evaluate --policy expert` can show."""

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return what chooses the next action from the true state. See `HasExpert.expert`."""
        index, row = self._where(place)
        act = make_expert(
            self.name.removeprefix("maniskill_"), SceneView(self._envs[index], row), settings, rng
        )
        turned = _signs(self.task, self.spec.action_dim) * self._signs  # The expert speaks our convention.
        return lambda: (act() * turned).astype(np.float32)


def _class_of(name: str) -> type[ManiSkill]:
    base = ManiSkillWithExpert if name in EXPERTS else ManiSkill
    known = {"name": f"maniskill_{name}", "task": TASKS[name], "any_image_size": not TASKS[name].published}
    return cast("type[ManiSkill]", type(name, (base,), known))


_CLASSES: Final = {name: _class_of(name) for name in TASKS}


def __getattr__(name: str) -> type[ManiSkill]:
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def _check_choices(name: str, chosen: dict[str, str]) -> None:
    for option, value in chosen.items():
        if value not in _CHOICES[option]:
            raise ConfigError(
                f"--simulator-settings {option}={value} is unknown to {name}. Use one of: "
                f"{', '.join(filter(None, _CHOICES[option]))}."
            )


def _check_fits(name: str, task: ManiSkillTask, *, batched: bool, reward: str, wrist: bool) -> None:
    """Refuse what a task does not have."""
    if wrist and not task.wrist:
        raise ConfigError(f"--simulator-settings wrist=true: the robot of {name} has no camera on its hand.")
    if reward == "shaped" and not task.grasped:
        graspable = ", ".join(f"maniskill_{other}" for other, its in TASKS.items() if its.grasped)
        raise ConfigError(
            f"--simulator-settings reward=shaped pays for grasping, but {name} does not say what is grasped. "
            f"Use reward=dense, or one of: {graspable}."
        )
    if batched and (task.reconfigures or task.published):
        raise ConfigError(
            f"--simulator-settings backend=gpu: {name} lays out all scenes of a batch together, so that no "
            "place can be reset by itself. Use backend=cpu with more --workers."
        )
    if batched and not importlib.import_module("torch").cuda.is_available():
        raise ConfigError(
            f"--simulator-settings backend=gpu: {name} finds no CUDA device here. Use backend=cpu."
        )


def _flags(info: dict[str, Any], key: str, rows: int) -> NDArray[np.bool_]:
    """Return ``[rows]`` what info says of each row; where it says nothing, no."""
    return info[key].cpu().numpy().astype(np.bool_) if key in info else np.zeros(rows, np.bool_)


def _bounds(space: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return lowest and highest actions ``[A]``, of several robots behind each other."""
    spaces = list(space.spaces.values()) if hasattr(space, "spaces") else [space]
    low, high = [np.concatenate([getattr(s, end) for s in spaces]) for end in ("low", "high")]
    return low.astype(np.float64), high.astype(np.float64)


def _signs(task: ManiSkillTask, width: int) -> NDArray[np.float64]:
    """Return ``[A]`` signs between our convention and ManiSkill's."""
    if task.robot == "hand":
        return np.ones(width)
    rotation = 1.0 if task.published else -1.0
    one = [1.0] * 3 + [rotation] * 3 + ([-1.0] if task.robot == "gripper" else [])
    return np.tile(one, width // len(one))


def _idle(task: ManiSkillTask, width: int) -> NDArray[np.float64]:
    """Return ``[A]`` ManiSkill's numbers that move nothing and open the gripper."""
    idle = np.zeros(width)
    if task.robot == "gripper":
        idle[6::7] = 1.0
    return idle


def _squeezed(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize a picture ``[H, W, 3]`` to a square, as published policies of these tasks see it."""
    pillow = importlib.import_module("PIL.Image")
    return np.asarray(pillow.fromarray(image).resize((size, size), pillow.Resampling.BICUBIC))


def _plain(task: str) -> str:
    return task.strip().rstrip(".").lower()
