"""The scene of one LIBERO task: its physics is robosuite's, unchanged; its pictures are drawn here.

An episode follows from its start alone: where fixtures (cabinet, stove) stand is not part of LIBERO's stored
states, and a reset that keeps the compiled scene leaves the gripper's last command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import hand_pose
from asyncrl.simulators.libero.tasks import load_robosuite, quiet
from asyncrl.simulators.rendering import Renderer, count_egl_devices, environment, require_backend

CAMERAS: Final = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}  # Ours -> robosuite's.
STATE_DIM: Final = 8
OPEN: Final = 0.08  # Metres between the fingers of an open gripper.
CONTROL_HZ: Final = 20
_STATE: Final = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_LAYOUT_TRIES: Final = 20
_JOINT_NOISE: Final = 0.02  # Standard deviation of the arm's joints (rad) in stored starts.
_MAX_GEOMS: Final = 1000  # Most shapes that the official environment draws.


def drawing_device() -> str:
    """Return the number of the first EGL device that CUDA may use, for drawing; empty: EGL's first."""
    if require_backend() != "egl" or os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    first = visible.split(",")[0].strip()
    if first == "-1":  # As CUDA reads it: none.
        return ""
    if visible and not first.isdecimal():
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which does not tell what device LIBERO shall draw with: "
            "EGL numbers them. Set MUJOCO_EGL_DEVICE_ID to the number (0 where there is one)."
        )
    return first if first and int(first) < count_egl_devices() else ""


class Scene:
    """The scene of one task, with at most one episode under way.

    Args:
        cameras: Some of `CAMERAS`.
        files: Path of a file -> the one drawn in its place.
    """

    def __init__(
        self,
        bddl: Path,
        cameras: Sequence[str],
        files: Mapping[str, str],
        *,
        size: int,
        multisampling: bool,
        reflections: bool,
    ) -> None:
        load_robosuite()
        with quiet(), numpy_generator([0]):
            self._env: Any = build_environment(bddl, files)
        self.sim: Any = self._env.sim
        model = self.sim.model._model
        model.vis.global_.offwidth = max(size, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(size, model.vis.global_.offheight)
        if not multisampling:
            model.vis.quality.offsamples = 0
        names, without = [CAMERAS[name] for name in cameras], () if reflections else ("REFLECTION",)
        device = drawing_device()
        with environment(MUJOCO_EGL_DEVICE_ID=device) if device else contextlib.nullcontext():
            self._renderer = Renderer(model, names, size=size, most_shapes=_MAX_GEOMS, without=without)
        self._renderer.option.geomgroup[:2] = 0, 1  # Shapes for collisions, shapes to be seen
        self._fixtures = _take_over_fixtures(self._env)
        self._watch()

    def begin(self, entropy: Sequence[int], stored: NDArray[np.float64] | None) -> None:
        """Begin an episode in a state ``[1 + positions + velocities]``; None: a random one."""
        env = self._env
        with quiet(), numpy_generator(entropy):
            for fixture in self._fixtures:
                fixture.draw()
                # LIBERO adds the fixture's pose to the scene position of a region: right only at the origin.
                self._write(fixture, (0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))
            self._lay_out()
            for fixture in self._fixtures:
                self._write(fixture, fixture.position, fixture.rotation)
            env.robots[0].gripper.current_action = np.zeros_like(env.robots[0].gripper.current_action)
            state = self.sim.get_state().flatten() if stored is None else stored
            if stored is None:
                joints = 1 + np.asarray(env.robots[0]._ref_joint_pos_indexes)
                state[joints] += _JOINT_NOISE * np.random.standard_normal(len(joints))
            # As the official `set_init_state` does:
            self.sim.set_state_from_flattened(state)
            self.sim.forward()
            env._check_success()
            env._post_process()
            env._update_observables(force=True)
            self._seen = env._get_observations()

    def step(self, action: NDArray[np.float64]) -> bool:
        """Carry out an action ``[7]``; True if the task is fulfilled at its end."""
        self._seen, _, success, _ = self._env.step(action)
        return bool(success)

    def state(self) -> NDArray[np.float32]:
        """Return ``[8]``: hand position (m), its rotation as axis times angle (rad), two fingers (m)."""
        position, quaternion, fingers = (self._seen[name] for name in _STATE)
        return np.concatenate([position, axis_angle(quaternion), fingers]).astype(np.float32)

    def pose(self) -> NDArray[np.float32]:
        """Return the `hand_pose` ``[8]`` of the same observation as `state`."""
        position, quaternion, fingers = (self._seen[name] for name in _STATE)
        return hand_pose(position, quaternion, float(np.abs(fingers).sum()) / OPEN)

    def note(self) -> None:
        """Keep the cameras' view; the official environment observes shortly before a step ends."""
        self._renderer.note(self.sim.model._model, self.sim.data._data)

    def draw(self) -> NDArray[np.uint8]:
        """Draw the view that belongs to `state`: ``[K, H, W, 3]``, mirrored, as published policies expect."""
        return self._renderer.draw()[:, :, ::-1].copy()

    def position(self, name: str) -> NDArray[np.float64]:
        """Return the present position of an object, fixture or region of the task: ``[3]`` metres."""
        if name in self._env.obj_body_id:
            return self.sim.data.body_xpos[self._env.obj_body_id[name]].copy()
        return self.sim.data.get_site_xpos(name).copy()

    def hand(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return grip point ``[3]`` (m) and hand axes as columns ``[3, 3]``: fingers along y, outwards z."""
        robot, data = self._env.robots[0], self.sim.data
        axes = data.body_xmat[self.sim.model.body_name2id(robot.robot_model.eef_name)]
        return data.site_xpos[robot.eef_site_id].copy(), axes.reshape(3, 3).copy()

    def close(self) -> None:
        """Free the scene. May be called again."""
        if self._env is not None:
            self._renderer.close()
            with quiet():
                self._env.close()
            self._env, self.sim, self._fixtures = None, None, []
            gc.collect()  # Its parts refer to each other, and the next scene is as large.

    def _lay_out(self) -> None:
        failure = importlib.import_module("robosuite.utils.errors").RandomizationError
        for _ in range(_LAYOUT_TRIES):
            with contextlib.suppress(failure):
                self._env.reset()
                return
        raise ConfigError(
            f"no random layout of {self._env.bddl_file_name} was found in {_LAYOUT_TRIES} tries. "
            "Use another seed."
        )

    def _write(self, fixture: _Fixture, position: ArrayLike, rotation: ArrayLike) -> None:
        body = self.sim.model.body_name2id(fixture.root)
        self.sim.model.body_pos[body] = position
        self.sim.model.body_quat[body] = rotation

    def _watch(self) -> None:
        # Cameras and state are observed when the official environment does, and nothing else.
        observables = importlib.import_module("robosuite.utils.observables")

        @observables.sensor(modality="image")
        def noted(_: Any) -> float:
            self.note()
            return 0.0

        for name, observable in self._env._observables.items():
            observable._enabled = name in _STATE
        self._env.add_observable(
            observables.Observable(name="noted", sensor=noted, sampling_rate=CONTROL_HZ, active=False)
        )


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation of a quaternion (x, y, z, w) as ``[3]``: its axis times its angle in [0, 2 pi] rad.

    The angle is not brought into [0, pi]: published statistics belong to this form.

    >>> axis_angle(np.array([1.0, 0.0, 0.0, 0.0])).round(4).tolist()
    [3.1416, 0.0, 0.0]
    >>> axis_angle(np.array([0.0, 0.0, -0.5**0.5, -0.5**0.5])).round(4).tolist()
    [0.0, 0.0, -4.7124]
    """
    cosine = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - cosine * cosine)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * np.arccos(cosine) / sine


def quaternion_of(turn: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the quaternion (x, y, z, w) ``[4]`` of a rotation as `axis_angle` returns it: ``[3]`` rad.

    >>> quaternion_of(np.array([0.0, 0.0, -1.5 * np.pi])).round(4).tolist()
    [0.0, 0.0, -0.7071, -0.7071]
    """
    angle = float(np.linalg.norm(turn))
    half_sinc = 0.5 * np.sinc(angle / (2 * np.pi))  # sin(angle / 2) / angle, also at 0.
    return np.append(half_sinc * np.asarray(turn, np.float64), np.cos(angle / 2))


@contextlib.contextmanager
def numpy_generator(entropy: Sequence[int]) -> Iterator[None]:
    """Seed numpy's global generator, which LIBERO draws from, within the context only."""
    before = np.random.get_state()
    np.random.seed(np.random.SeedSequence(list(entropy)).generate_state(8))
    try:
        yield
    finally:
        np.random.set_state(before)


class _Fixture:
    """Replaces the sampler of a fixture: returns the pose that was drawn for the episode."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._body = sampler.mujoco_objects[0]
        self.root: str = self._body.root_body
        self.position: tuple[float, ...] = ()
        self.rotation: NDArray[np.float64] = np.zeros(4)

    def draw(self) -> None:
        self.position, self.rotation, _ = self._sampler.sample()[self._body.name]

    def sample(self, fixtures: Mapping[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Add the fixture's placement to those of others, as LIBERO's samplers do."""
        return {**(fixtures or {}), self._body.name: (self.position, self.rotation, self._body)}


def _take_over_fixtures(env: Any) -> list[_Fixture]:
    samplers = env.placement_initializer.samplers
    taken = {
        name: _Fixture(sampler)
        for name, sampler in samplers.items()
        if sampler.mujoco_objects[0].name in env.fixtures_dict
    }
    samplers.update(taken)
    return list(taken.values())


def build_environment(bddl: Path, files: Mapping[str, str]) -> Any:
    """Construct robosuite's environment as the official wrapper does, except for cameras and resets."""
    robosuite = importlib.import_module("robosuite")
    parser = importlib.import_module("libero.libero.envs.bddl_utils")
    kinds = importlib.import_module("libero.libero.envs.bddl_base_domain").TASK_MAPPING
    kind = kinds[parser.get_problem_info(str(bddl))["problem_name"]]
    if files:
        kind = _with_files(kind, files)
    return kind(
        bddl_file_name=str(bddl),
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        gripper_types="default",
        initialization_noise=None,
        use_camera_obs=False,
        has_renderer=False,
        has_offscreen_renderer=False,
        control_freq=CONTROL_HZ,
        ignore_done=True,
        hard_reset=False,
    )


def _with_files(kind: type, files: Mapping[str, str]) -> Callable[..., Any]:

    def initialize(self: Any, xml_string: str | None = None) -> None:
        def other(match: re.Match[str]) -> str:
            return f'file="{files.get(os.path.realpath(match[1]), match[1])}"'

        text = re.sub(r'file="([^"]+)"', other, xml_string or self.model.get_xml())
        kind._initialize_sim(self, text)  # type: ignore[attr-defined]

    # robosuite compares the class's name with the task's file.
    return type(kind)(kind.__name__, (kind,), {"_initialize_sim": initialize})
