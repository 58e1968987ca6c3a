"""A task of ManiSkill3, in simulations on the CPU, one per place.

ManiSkill draws at every step; here a picture is drawn when it is wanted, and nothing is hidden: a goal that
ManiSkill draws only for people is shown, as a policy could not see it otherwise.

Letters: K cameras, H W picture size in pixels (equal), Q numbers of state, A numbers per action.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators import interface
from asyncrl.simulators.maniskill import tasks
from asyncrl.simulators.maniskill.expert import EXPERTS, SceneView, axis_angle
from asyncrl.simulators.one_by_one import OneByOne, Outcome

IMAGE_SIZE: Final = 128  # Default side of the pictures: ManiSkill's own.
PUBLISHED_SIZE: Final = 224  # The same for tasks with published policies.
GRASPED: Final = 0.1
HELD: Final = 0.1
HELD_STEPS: Final = 5  # Steps in a row after which an object counts as held.
SOLVED: Final = 1.0


class GraspReward:
    """RLinf's shaped reward: 0.1 for a grasp, 0.1 for holding on, 1 while the task is fulfilled.

    Grasp and hold count once seen, to the end of the episode; success counts only after a grasp. Each step
    pays the difference to the step before, so an episode sums up to its last value.
    """

    def __init__(self) -> None:
        self.begin(held=False)

    def begin(self, *, held: bool) -> None:
        """Begin an episode."""
        self._in_row, self._was_grasped, self._was_held, self._before = int(held), held, False, 0.0

    def step(self, *, success: bool, held: bool) -> float:
        """Return the reward of a step with this success and grasp."""
        self._in_row = self._in_row + 1 if held else 0
        self._was_grasped |= held
        self._was_held |= self._in_row >= HELD_STEPS
        worth = GRASPED * self._was_grasped + HELD * self._was_held
        worth += SOLVED * (success and self._was_grasped)
        paid, self._before = worth - self._before, worth
        return paid


@dataclass(frozen=True, kw_only=True)
class ManiSkillSettings:
    """The keywords of --simulator-settings."""

    reward: Literal["success", "shaped", "dense"] = "success"
    """`success`; `shaped`: `GraspReward`; `dense`: ManiSkill's own between 0 and 1."""
    wrist: bool = False  # Show the camera on the hand as a second picture
    convention: Literal["", "asyncrl", "maniskill"] = ""
    """`asyncrl`: rotations are right-handed, gripper -1 = open. `maniskill`: numbers are passed on as they
    are: rotations of `pd_ee_delta_pose` have the other sign, gripper +1 = open. Empty: `maniskill` for tasks
    with published policies, else `asyncrl`."""
    module: str = ""  # A module of yours that registers the environment with ManiSkill when it is imported
    objects: Literal["train", "test", "all"] = "train"  # Set that tasks with published policies draw from

    def check(self, name: str, task: tasks.ManiSkillTask) -> None:
        """Refuse unknown values, and settings that the task lacks."""
        interface.check_settings(self)
        if self.wrist and not task.wrist:
            raise ConfigError(
                f"--simulator-settings wrist=true: the robot of {name} has no camera on its hand."
            )
        if self.reward == "shaped" and not task.grasped:
            graspable = ", ".join(f"maniskill_{other}" for other, its in tasks.TASKS.items() if its.grasped)
            raise ConfigError(
                f"--simulator-settings reward=shaped pays for grasping, but {name} does not say what is "
                f"grasped. Use reward=dense, or one of: {graspable}."
            )


class ManiSkillPlace:
    """One environment of a task.

    Args:
        env: Without wrappers, of one row.
        size: Side of the pictures in pixels.
        signs: ``[A]`` factors between an action here and ManiSkill's; their own inverse.
    """

    def __init__(
        self,
        env: Any,
        task: tasks.ManiSkillTask,
        settings: ManiSkillSettings,
        size: int,
        signs: NDArray[np.float64],
    ) -> None:
        self.env, self.signs = env, signs
        self._task, self._reward, self._size = task, settings.reward, size
        self._cameras = (task.camera, *([task.wrist] if settings.wrist else []))
        # PhysX solves contacts in an order that depends on the scene's past, so each episode has a new one.
        self._options: dict[str, Any] = {"reconfigure": True}
        self._options |= {"obj_set": settings.objects} if task.published else {}
        self._shown: Any = None  # Newest observation that the environment drew itself.
        self._shaped = GraspReward()

    def reset(self, start: interface.SimStart) -> str:
        """Begin the episode that belongs to a start; return its instruction."""
        if start.seed >= 2**32:
            raise ConfigError(f"{start.name}: ManiSkill's seeds end below {2**32}. Use a smaller --seed.")
        self._shown, info = self.env.reset(seed=[start.seed], options=dict(self._options))
        self.env._hidden_objects.clear()
        self._shaped.begin(held=_flag(info, self._task.grasped))
        return self._task.instruction or self.env.get_language_instruction()[0]

    def step(self, action: NDArray[np.float32]) -> Outcome:
        """Carry out an action ``[A]``."""
        torch, space = importlib.import_module("torch"), self.env.single_action_space
        given: Any = torch.as_tensor((action * self.signs).astype(np.float32)[None], device=self.env.device)
        if hasattr(space, "spaces"):  # Several robots: by name.
            widths = [own.shape[0] for own in space.spaces.values()]
            given = dict(zip(space.spaces, given.split(widths, dim=1), strict=True))
        self._shown, rewards, _, _, info = self.env.step(given)
        success, failed, held = (_flag(info, key) for key in ("success", "fail", self._task.grasped))
        paid = float(rewards[0]) if self._reward == "dense" else None
        if self._reward == "shaped":
            paid = self._shaped.step(success=success, held=held)
        return Outcome(success, paid, failed)

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Draw the place as it is."""
        if self._task.published:
            image = self._shown["sensor_data"][self._task.camera]["rgb"].cpu().numpy()[0]
            pillow = importlib.import_module("PIL.Image")  # To a square, as published policies see it.
            squeezed = pillow.fromarray(image).resize((self._size,) * 2, pillow.Resampling.BICUBIC)
            return np.asarray(squeezed)[None], self.state()
        scene = self.env.scene
        scene.update_render(update_sensors=True, update_human_render_cameras=False)
        pictures = []
        for camera in self._cameras:
            sensor = scene.sensors[camera]
            sensor.capture()
            shown = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
            if self.env.backend.render_device.is_cuda():  # It is drawn on a stream of its own.
                importlib.import_module("torch").cuda.synchronize()
            pictures.append(shown.cpu().numpy()[0])
        return np.stack(pictures), self.state()

    def state(self) -> NDArray[np.float32]:
        """Return ``[Q]``: each arm's position (3), axis-angle (3) and fingers (2), or all joints."""
        parts = []
        for arm in getattr(self.env.agent, "agents", [self.env.agent]):
            joints = arm.robot.get_qpos()[0].cpu().numpy()
            if self._task.robot != "gripper":
                parts.append(joints)
                continue
            position, quaternion = (values[0].cpu().numpy() for values in (arm.tcp.pose.p, arm.tcp.pose.q))
            parts += [position, axis_angle(quaternion.astype(np.float64)), joints[-2:]]
        return np.concatenate(parts).astype(np.float32)

    def pose(self) -> NDArray[np.float32]:
        """Return the `hand_pose` ``[8]`` of the arm."""
        agent = self.env.agent
        position, quaternion = (values[0].cpu().numpy() for values in (agent.tcp.pose.p, agent.tcp.pose.q))
        fingers = agent.robot.get_qpos()[0, -2:].cpu().numpy()
        low, high = agent.robot.get_qlimits()[0, -2:].cpu().numpy().T
        opened = ((fingers - low) / (high - low)).mean()
        return interface.hand_pose(
            position, np.roll(quaternion, -1), opened
        )  # ManiSkill has the real part first.

    def close(self) -> None:
        """Free the simulation."""
        self.env.close()


class ManiSkill(OneByOne[ManiSkillPlace]):
    """One task. Its classes are attributes of this module: ``pick_cube`` and so on.

    Args:
        places: Episodes played at once.
        image_size: Side of the pictures in pixels; 0: 128, or 224 for tasks with published policies.
        horizon: Steps until an episode is truncated; 0: ManiSkill's own number.
        settings: Fields of `ManiSkillSettings`.
    """

    name: ClassVar[str] = ""
    task: ClassVar[tasks.ManiSkillTask]
    usual_places: ClassVar[int] = 4
    any_image_size: ClassVar[bool] = True

    def __init__(self, *, places: int = 1, image_size: int = 0, horizon: int = 0, **settings: Any) -> None:
        task, chosen = self.task, ManiSkillSettings(**settings)
        chosen.check(self.name, task)
        size = image_size or (PUBLISHED_SIZE if task.published else IMAGE_SIZE)
        gym = tasks.load_maniskill(self.name, task, chosen.module)
        made_with: dict[str, Any] = {
            "reward_mode": tasks.reward_mode(self.name, task.environment, chosen.reward),
            "control_mode": task.control,
            "sim_backend": "physx_cpu",
            "render_backend": tasks.renderer(),
        }
        if task.published:  # Their picture has a size of its own, and the robot is cut out of it.
            made_with["obs_mode"] = "rgb+segmentation"
        else:
            made_with |= {"obs_mode": "none", "sensor_configs": {"width": size, "height": size}}
        envs = [tasks.make_environment(gym, task.environment, made_with) for _ in range(places)]
        low, high = _bounds(envs[0].single_action_space)
        ours = (chosen.convention or ("maniskill" if task.published else "asyncrl")) == "asyncrl"
        signs = _signs(task, len(low)) if ours else np.ones(len(low))
        made = [ManiSkillPlace(env, task, chosen, size, signs) for env in envs]
        spec = interface.SimulatorSpec(
            name=self.name,
            tasks=(task.instruction,) if task.instruction else (),
            trials=0,
            max_steps=horizon or gym.spec(task.environment).max_episode_steps,
            image_size=size,
            cameras=("main", "wrist") if chosen.wrist else ("main",),
            state_dim=len(made[0].state()),
            poses=task.robot == "gripper" and not hasattr(envs[0].agent, "agents"),
            action_low=tuple(np.where(signs < 0, -high, low).tolist()),
            action_high=tuple(np.where(signs < 0, -low, high).tolist()),
            idle=tuple((_idle(task, len(low)) * signs + 0.0).tolist()),
            reward="success" if chosen.reward == "success" else "dense",
            places=places,
        )
        super().__init__(spec, made)


class ManiSkillWithExpert(ManiSkill):
    """A task with a scripted expert."""

    def expert(
        self, place: int, settings: interface.Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert of the task."""
        make, played = EXPERTS[self.name.removeprefix("maniskill_")], self.places[place]
        act = make(SceneView(played.env), interface.Flaws(settings, rng))
        turned = _signs(self.task, self.spec.action_dim) * played.signs  # The expert uses our convention.
        return lambda: (act() * turned).astype(np.float32)


def _class_of(name: str) -> type[ManiSkill]:
    base = ManiSkillWithExpert if name in EXPERTS else ManiSkill
    known = {
        "name": f"maniskill_{name}",
        "task": tasks.TASKS[name],
        "any_image_size": not tasks.TASKS[name].published,
    }
    return cast("type[ManiSkill]", type(name, (base,), known))


globals().update({name: _class_of(name) for name in tasks.TASKS})


def _flag(info: dict[str, Any], key: str) -> bool:
    return key in info and bool(info[key][0])


def _bounds(space: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    spaces = list(space.spaces.values()) if hasattr(space, "spaces") else [space]
    low, high = [np.concatenate([getattr(s, end) for s in spaces]) for end in ("low", "high")]
    return low.astype(np.float64), high.astype(np.float64)


def _signs(task: tasks.ManiSkillTask, width: int) -> NDArray[np.float64]:
    if task.robot == "hand":
        return np.ones(width)
    rotation = 1.0 if task.published else -1.0
    one = [1.0] * 3 + [rotation] * 3 + ([-1.0] if task.robot == "gripper" else [])
    return np.tile(one, width // len(one))


def _idle(task: tasks.ManiSkillTask, width: int) -> NDArray[np.float64]:
    idle = np.zeros(width)
    if task.robot == "gripper":
        idle[6::7] = 1.0
    return idle
