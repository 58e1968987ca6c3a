"""A task of ManiSkill3: each place alone on the CPU, or all of them in one batch on a GPU.

ManiSkill draws at every step; here a picture is drawn when it is wanted, and nothing is hidden: a goal that
ManiSkill draws only for people is shown, as a policy that sees cannot know it otherwise.

Letters: n places addressed, P in all, K cameras, H W picture size in pixels (equal), Q numbers of state,
A numbers per action.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import (
    Demonstrator,
    Flaws,
    Seen,
    SimStart,
    SimulatorSpec,
    Stepped,
    check_settings,
    check_step,
    hand_pose,
    plain_task,
)
from asyncrl.simulators.maniskill.expert import EXPERTS, SceneView, axis_angle
from asyncrl.simulators.maniskill.tasks import (
    TASKS,
    ManiSkillTask,
    load_maniskill,
    make_environment,
    renderer,
    reward_mode,
)

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

    Example:
        >>> reward = GraspReward(1)
        >>> reward.begin(0, held=False)
        >>> steps = [(np.array([success]), np.array([not success])) for success in (False, True)]
        >>> [reward.step([0], *step).round(1).tolist() for step in steps]
        [[0.1], [1.0]]
    """

    def __init__(self, places: int) -> None:
        self._in_row = np.zeros(places, np.int64)
        self._was_grasped = np.zeros(places, np.bool_)
        self._was_held = np.zeros(places, np.bool_)
        self._before = np.zeros(places)

    def begin(self, place: int, held: bool) -> None:
        """Begin an episode in a place."""
        self._in_row[place], self._was_grasped[place], self._was_held[place] = int(held), held, False
        self._before[place] = 0.0

    def step(
        self, places: list[int], success: NDArray[np.bool_], held: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return the rewards ``[n]`` of a step of n places, after which `success` and `held` are so."""
        self._in_row[places] = np.where(held, self._in_row[places] + 1, 0)
        self._was_grasped[places] |= held
        self._was_held[places] |= self._in_row[places] >= HELD_STEPS
        worth = GRASPED * self._was_grasped[places] + HELD * self._was_held[places]
        worth += SOLVED * (success & self._was_grasped[places])
        paid = worth - self._before[places]
        self._before[places] = worth
        return paid


@dataclass(frozen=True, kw_only=True)
class ManiSkillSettings:
    """The keywords of --simulator-settings."""

    backend: Literal["cpu", "gpu"] = "cpu"
    """`cpu`: each place is a simulation of its own. `gpu`: all places are one simulation on a CUDA device;
    they step together."""
    render: Literal["auto", "cpu", "gpu"] = "auto"
    """Device that draws; `auto`: the GPU if there is one."""
    reward: Literal["success", "shaped", "dense"] = "success"
    """`success`; `shaped`: `GraspReward`; `dense`: ManiSkill's own between 0 and 1."""
    wrist: bool = False
    """Show the camera on the hand as a second picture."""
    rebuild: bool = True
    """Build the scene for every episode, about 0.2 s each; not with `backend=gpu`. The order in which PhysX
    solves contacts depends on the scene's past: without it an episode depends, from its first contact on, on
    earlier ones."""
    convention: Literal["", "asyncrl", "maniskill"] = ""
    """`asyncrl`: rotations are right-handed, gripper -1 = open. `maniskill`: numbers are handed on as they
    are: rotations of `pd_ee_delta_pose` have the other sign, gripper +1 = open. Empty: `maniskill` for tasks
    with published policies, else `asyncrl`."""
    module: str = ""
    """A module of yours that registers the environment with ManiSkill when it is imported."""
    objects: Literal["train", "test", "all"] = "train"
    """Set of objects that tasks with published policies draw from."""

    def check(self, name: str, task: ManiSkillTask) -> None:
        """Refuse unknown values, and what the task does not have."""
        check_settings(self)
        if self.wrist and not task.wrist:
            raise ConfigError(
                f"--simulator-settings wrist=true: the robot of {name} has no camera on its hand."
            )
        if self.reward == "shaped" and not task.grasped:
            graspable = ", ".join(f"maniskill_{other}" for other, its in TASKS.items() if its.grasped)
            raise ConfigError(
                f"--simulator-settings reward=shaped pays for grasping, but {name} does not say what is "
                f"grasped. Use reward=dense, or one of: {graspable}."
            )
        if self.backend == "cpu":
            return
        if task.reconfigures or task.published:
            raise ConfigError(
                f"--simulator-settings backend=gpu: {name} lays out all scenes of a batch together, so that "
                "no place can be reset by itself. Use backend=cpu with more --workers."
            )
        if not importlib.import_module("torch").cuda.is_available():
            raise ConfigError(
                f"--simulator-settings backend=gpu: {name} finds no CUDA device here. Use backend=cpu."
            )


class ManiSkill:
    """One task. Its classes are attributes of this module: ``pick_cube`` and so on.

    Args:
        places: Episodes played at once.
        image_size: Side of the pictures in pixels; 0: 128, or 224 for tasks with published policies.
        horizon: Steps until an episode is truncated; 0: ManiSkill's own number.
        settings: Fields of `ManiSkillSettings`.
    """

    name: ClassVar[str] = ""
    task: ClassVar[ManiSkillTask]
    usual_places: ClassVar[int] = 4
    any_image_size: ClassVar[bool] = True

    def __init__(self, *, places: int = 1, image_size: int = 0, horizon: int = 0, **settings: Any) -> None:
        task, chosen = self.task, ManiSkillSettings(**settings)
        chosen.check(self.name, task)
        self._reward, self._batched = chosen.reward, chosen.backend == "gpu"
        self._options: dict[str, Any] = {"obj_set": chosen.objects} if task.published else {}
        if chosen.rebuild and not self._batched:
            self._options["reconfigure"] = True
        size = image_size or (PUBLISHED_SIZE if task.published else IMAGE_SIZE)
        gym = load_maniskill(self.name, task, chosen.module)
        self._cameras = (task.camera, *([task.wrist] if chosen.wrist else []))
        made_with = {
            "reward_mode": reward_mode(self.name, task.environment, chosen.reward),
            "control_mode": task.control,
            "sim_backend": "physx_cuda" if self._batched else "physx_cpu",
            "render_backend": renderer(chosen.render),
        }
        if task.published:  # Their picture has a size of its own, and the robot is cut out of it.
            made_with["obs_mode"] = "rgb+segmentation"
        else:
            made_with |= {"obs_mode": "none", "sensor_configs": {"width": size, "height": size}}
        counts = [places] if self._batched else [1] * places
        self._envs = [make_environment(gym, task.environment, count, made_with) for count in counts]
        """One of P rows, or P of one."""
        self._shown: list[Any] = [None] * len(self._envs)  # Newest observation that each drew itself.
        self._steps = np.zeros(places, np.int64)
        self._playing = np.zeros(places, np.bool_)
        self._shaped = GraspReward(places)
        low, high = _bounds(self._envs[0].single_action_space)
        ours = (chosen.convention or ("maniskill" if task.published else "asyncrl")) == "asyncrl"
        self._signs = _signs(task, len(low)) if ours else np.ones(len(low))
        """``[A]`` factors between an action here and ManiSkill's; their own inverse."""
        self.spec = SimulatorSpec(
            name=self.name,
            tasks=(task.instruction,) if task.instruction else (),
            trials=0,
            max_steps=horizon or gym.spec(task.environment).max_episode_steps,
            image_size=size,
            cameras=("main", "wrist") if chosen.wrist else ("main",),
            state_dim=self._states(0).shape[1],
            poses=task.robot == "gripper" and not hasattr(self._envs[0].agent, "agents"),
            action_low=tuple(np.where(self._signs < 0, -high, low).tolist()),
            action_high=tuple(np.where(self._signs < 0, -low, high).tolist()),
            idle=tuple((_idle(task, len(low)) * self._signs + 0.0).tolist()),
            reward="success" if chosen.reward == "success" else "dense",
            places=places,
            lockstep=self._batched,
        )

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each place, alone: in a batch, its draws would depend on its neighbours."""
        tasks = []
        for place, start in zip(places, starts, strict=True):
            if start.seed >= 2**32:
                raise ConfigError(f"{start.name}: ManiSkill's seeds end below {2**32}. Use a smaller --seed.")
            index, row = self._where(place)
            env = self._envs[index]
            options = dict(self._options)
            if self._batched:
                options["env_idx"] = importlib.import_module("torch").tensor([row], device=env.device)
            self._shown[index], info = env.reset(seed=[start.seed] * env.num_envs, options=options)
            env._hidden_objects.clear()
            self._steps[place], self._playing[place] = 0, True
            self._shaped.begin(place, bool(_flags(info, self.task.grasped, env.num_envs)[row]))
            tasks.append(self.task.instruction or plain_task(env.get_language_instruction()[row]))
        return self.look(places)._replace(tasks=tuple(tasks))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n places."""
        rows = list(places)
        check_step(rows, actions, self.spec.action_dim, self._playing)
        if self._batched:
            self._playing[:] = False
        clipped = np.clip(actions.astype(np.float64), self.spec.action_low, self.spec.action_high)
        if self._batched:
            stepped = [self._step_environment(0, rows, clipped)]
        else:
            stepped = [self._step_environment(place, [0], clipped[[i]]) for i, place in enumerate(rows)]
        rewards, success, terminated, held = map(np.concatenate, zip(*stepped, strict=True))
        if self._reward != "dense":
            rewards = self._shaped.step(rows, success, held) if self._reward == "shaped" else success
        self._steps[rows] += 1
        truncated = (self._steps[rows] >= self.spec.max_steps) & ~terminated
        self._playing[rows] = ~(terminated | truncated)
        seen = self.look(rows) if draw else None
        return Stepped(seen, rewards.astype(np.float32), success, terminated, truncated)

    def look(self, places: Sequence[int]) -> Seen:
        """Draw n places as they are."""
        where = [self._where(place) for place in places]

        def gather(of_environment: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
            found = {index: of_environment(index) for index in dict.fromkeys(index for index, _ in where)}
            return np.stack([found[index][row] for index, row in where])

        seen = Seen(gather(self._draw), gather(self._states))
        return seen._replace(poses=gather(self._poses)) if self.spec.poses else seen

    def close(self) -> None:
        """Free the simulations. May be called again."""
        envs, self._envs = self._envs, []
        for env in envs:
            env.close()

    def _where(self, place: int) -> tuple[int, int]:
        return (0, place) if self._batched else (place, 0)

    def _step_environment(
        self, index: int, rows: list[int], actions: NDArray[np.float64]
    ) -> tuple[NDArray[Any], ...]:
        """Step rows of one environment, the others with the idle action; return numbers of these rows.

        They are ManiSkill's reward, and whether the task is fulfilled, cannot go on, and the object is held.
        """
        torch, env = importlib.import_module("torch"), self._envs[index]
        batch = np.tile(np.asarray(self.spec.idle), (env.num_envs, 1))
        batch[rows] = actions
        given: Any = torch.as_tensor((batch * self._signs).astype(np.float32), device=env.device)
        if hasattr(env.single_action_space, "spaces"):  # Several robots: by name.
            widths = [space.shape[0] for space in env.single_action_space.spaces.values()]
            given = dict(zip(env.single_action_space.spaces, given.split(widths, dim=1), strict=True))
        self._shown[index], rewards, _, _, info = env.step(given)
        flags = [_flags(info, key, env.num_envs)[rows] for key in ("success", "fail", self.task.grasped)]
        return rewards.float().cpu().numpy()[rows], *flags

    def _draw(self, index: int) -> NDArray[np.uint8]:
        env = self._envs[index]
        if self.task.published:
            images = self._shown[index]["sensor_data"][self.task.camera]["rgb"].cpu().numpy()
            return np.stack([_squeezed(image, self.spec.image_size) for image in images])[:, None]
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        pictures = []
        for camera in self._cameras:
            sensor = env.scene.sensors[camera]
            sensor.capture()
            shown = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
            if env.backend.render_device.is_cuda():  # It is drawn on a stream of its own.
                importlib.import_module("torch").cuda.synchronize()
            pictures.append(shown.cpu().numpy())
        return np.stack(pictures, axis=1)

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
        agent = self._envs[index].agent
        position, quaternion = (values.cpu().numpy() for values in (agent.tcp.pose.p, agent.tcp.pose.q))
        fingers = agent.robot.get_qpos()[:, -2:].cpu().numpy()
        low, high = agent.robot.get_qlimits()[0, -2:].cpu().numpy().T
        opened = ((fingers - low) / (high - low)).mean(axis=1)
        # ManiSkill has the real part first.
        rows = zip(position, np.roll(quaternion, -1, axis=1), opened, strict=True)
        return np.stack([hand_pose(*row) for row in rows])


class ManiSkillWithExpert(ManiSkill):
    """A task with a scripted expert."""

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert of the task."""
        index, row = self._where(place)
        make = EXPERTS[self.name.removeprefix("maniskill_")]
        act = make(SceneView(self._envs[index], row), Flaws(settings, rng))
        turned = _signs(self.task, self.spec.action_dim) * self._signs  # The expert uses our convention.
        return lambda: (act() * turned).astype(np.float32)


def _class_of(name: str) -> type[ManiSkill]:
    base = ManiSkillWithExpert if name in EXPERTS else ManiSkill
    known = {"name": f"maniskill_{name}", "task": TASKS[name], "any_image_size": not TASKS[name].published}
    return cast("type[ManiSkill]", type(name, (base,), known))


globals().update({name: _class_of(name) for name in TASKS})


def _flags(info: dict[str, Any], key: str, rows: int) -> NDArray[np.bool_]:
    return info[key].cpu().numpy().astype(np.bool_) if key in info else np.zeros(rows, np.bool_)


def _bounds(space: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    spaces = list(space.spaces.values()) if hasattr(space, "spaces") else [space]
    low, high = [np.concatenate([getattr(s, end) for s in spaces]) for end in ("low", "high")]
    return low.astype(np.float64), high.astype(np.float64)


def _signs(task: ManiSkillTask, width: int) -> NDArray[np.float64]:
    if task.robot == "hand":
        return np.ones(width)
    rotation = 1.0 if task.published else -1.0
    one = [1.0] * 3 + [rotation] * 3 + ([-1.0] if task.robot == "gripper" else [])
    return np.tile(one, width // len(one))


def _idle(task: ManiSkillTask, width: int) -> NDArray[np.float64]:
    idle = np.zeros(width)
    if task.robot == "gripper":
        idle[6::7] = 1.0
    return idle


def _squeezed(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize a picture ``[H, W, 3]`` to a square, as published policies of these tasks see it."""
    pillow = importlib.import_module("PIL.Image")
    return np.asarray(pillow.fromarray(image).resize((size, size), pillow.Resampling.BICUBIC))
