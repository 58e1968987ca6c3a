"""LIBERO's suites as simulators: official starts, pictures, states, instructions and horizons.

One object plays one episode. A reset takes a fraction of a second, with another task seconds: its scene is
built.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, Flaws, Seen, SimStart, SimulatorSpec, Stepped
from asyncrl.simulators.libero.expert import Expert, Grasp, MovePlan
from asyncrl.simulators.libero.light import light_files
from asyncrl.simulators.libero.scene import CAMERAS, STATE_DIM, Scene, drawing_device
from asyncrl.simulators.libero.tasks import TRIALS, bddl_file, instruction, stored_states, task_names

_BOWL: Final = Grasp(radius=0.047, height=0.034)


_OBJECTS: Final = (
    ("alphabet_soup_1", 90, 0.01),
    ("cream_cheese_1", 90, 0.0),
    ("salad_dressing_1", 0, 0.04),
    ("bbq_sauce_1", 0, 0.02),
    ("ketchup_1", 0, 0.04),
    ("tomato_sauce_1", 90, 0.01),
    ("butter_1", 90, 0.0),
    ("milk_1", 0, 0.025),
    ("chocolate_pudding_1", 90, 0.0),
    ("orange_juice_1", 0, 0.025),
)  # Item, direction of the fingers and height of the grip, by task id.


def _bowl_to_plate(*angles: float) -> MovePlan:
    return MovePlan(item="akita_black_bowl_1", goal="plate_1", grasp=replace(_BOWL, angles=angles))


def _to_basket(item: str, angle: float, height: float) -> MovePlan:
    grasp = Grasp(angles=(angle,), height=height)
    return MovePlan(item=item, goal="basket_1_contain_region", grasp=grasp, drop=0.05, over=0.22)


_USUAL: Final = _bowl_to_plate(90, 0, 180)
_IN_DRAWER: Final = replace(_BOWL, angles=(165.0, 350.0), inside="wooden_cabinet_1_top_region")
_BOTTLE: Final = Grasp(angles=(90.0, 0.0), height=0.13)
_CHEESE: Final = Grasp(angles=(90.0,))
PLANS: Final[dict[str, dict[int, MovePlan]]] = {
    "libero_spatial": dict.fromkeys(range(10), _USUAL)
    | {
        4: replace(_USUAL, grasp=_IN_DRAWER),
        6: _bowl_to_plate(180, 90, 0),
        8: _bowl_to_plate(-90, 0, 180),
        9: _bowl_to_plate(45, 135, 90),
    },
    "libero_object": {task: _to_basket(*item) for task, item in enumerate(_OBJECTS)},
    "libero_goal": {
        1: replace(_USUAL, goal="flat_stove_1_cook_region"),
        2: MovePlan(item="wine_bottle_1", goal="wooden_cabinet_1_top_side", grasp=_BOTTLE, drop=0.02),
        4: replace(_USUAL, goal="wooden_cabinet_1_top_side"),
        6: MovePlan(item="cream_cheese_1", goal="akita_black_bowl_1", grasp=_CHEESE, drop=0.05),
        8: _USUAL,
    },
}  # Suite -> task id -> plan of the scripted expert.


IMAGE_SIZE: Final = 256
IDLE: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


@dataclass(frozen=True, kw_only=True)
class LiberoSettings:
    """The keywords of --simulator-settings."""

    settle: int = 10
    """Idle steps before an episode begins, while objects come to rest; not counted."""
    horizon: int = 0
    """Steps until truncation; 0: the suite's own."""
    wrist: bool = True
    """Draw the camera at the wrist too, which doubles the cost of pictures."""
    scene: str = "stock"
    """`stock`: the shapes and textures of LIBERO. `light`: those that `asyncrl simulators lite` made of them,
    which are drawn faster and look slightly different; the physics is the same."""
    multisampling: bool = True
    """Smooth edges, as officially."""
    reflections: bool = True
    """Mirrors, as officially."""

    @property
    def protocol(self) -> str:
        """The scene and the settling steps, in words."""
        without = [name for name in ("multisampling", "reflections") if not getattr(self, name)]
        drawn = "".join(f", without {name}" for name in without)
        return f"{self.scene} scene{drawn}, {self.settle} settling steps"

    def __post_init__(self) -> None:
        for name in ("settle", "horizon"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 100_000:
                raise ConfigError(
                    f"--simulator-settings {name}={value} counts steps. Use a whole number from 0 on."
                )
        for name in ("wrist", "multisampling", "reflections"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(
                    f"--simulator-settings {name}={getattr(self, name)} is a switch. Use true or false."
                )
        if self.scene not in ("stock", "light"):
            raise ConfigError(f"--simulator-settings scene={self.scene} is neither stock nor light.")


class LiberoSuite:
    """A suite of LIBERO: one place, actions of robosuite's OSC_POSE controller at 20 Hz.

    An action is 7 numbers, clipped to [-1, 1]: translation (5 cm at 1), rotation vector (0.5 rad at 1),
    gripper (+1 closes). A success ends nothing; `terminated` is never set.

    Args:
        image_size: Side of the pictures in pixels, 16 to 1024; 0: 256.
        settings: Fields of `LiberoSettings`.
    """

    suite: ClassVar[str]
    official_horizon: ClassVar[int]
    most_places: ClassVar[int] = 1

    def __init__(self, *, places: int = 1, image_size: int = 0, **settings: Any) -> None:
        self._settings = LiberoSettings(**settings)
        self.spec = self.describe(places=places, image_size=image_size, **settings)
        drawing_device()  # Errors of drawing come before scenes are built.
        self._files = light_files(self.suite) if self._settings.scene == "light" else {}
        self._scene: Scene | None = None
        self._task_id = -1
        self._steps = 0
        self._success = False

    @classmethod
    def describe(cls, *, places: int = 1, image_size: int = 0, **settings: Any) -> SimulatorSpec:
        """Return the spec; builds no scene and imports no robosuite."""
        chosen = LiberoSettings(**settings)
        if places != 1:
            raise ConfigError(
                f"--simulator {cls.suite} plays one episode per process, but {places} places were asked for "
                "in one. Use more workers."
            )
        if type(image_size) is not int or (image_size != 0 and not 16 <= image_size <= 1024):
            raise ConfigError(
                f"image_size is {image_size}, but {cls.suite} draws pictures of 16 to 1024 pixels. Use 256."
            )
        return SimulatorSpec(
            name=cls.suite,
            tasks=tuple(instruction(task) for task in task_names(cls.suite)),
            trials=TRIALS,
            max_steps=chosen.horizon or cls.official_horizon,
            image_size=image_size or IMAGE_SIZE,
            cameras=tuple(CAMERAS)[: 2 if chosen.wrist else 1],
            state_dim=STATE_DIM,
            poses=True,
            idle=IDLE,
            protocol=chosen.protocol,
        )

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin the start's episode in place 0."""
        (start,) = starts
        self._check(start)
        scene = self._scene_of(start.task_id)
        key = [zlib.crc32(self.suite.encode()), start.task_id]
        if start.trial >= 0:
            scene.begin([*key, 0, start.trial], stored_states(self.suite, start.task_id)[start.trial])
        else:
            scene.begin([*key, 1, start.seed], None)
        for _ in range(self._settings.settle):
            scene.step(np.array(IDLE))
        self._steps, self._success = 0, False
        return self._seen((self.spec.tasks[start.task_id],))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in place 0; after the horizon nothing moves."""
        scene = self._begun(places)
        if actions.shape != (1, len(IDLE)) or not np.isfinite(actions).all():
            raise ConfigError(f"an action of {self.suite} is 7 finite numbers, got {actions.tolist()}.")
        over = self._steps >= self.spec.max_steps
        if not over:
            self._success = scene.step(np.clip(actions[0].astype(np.float64), -1.0, 1.0))
            self._steps += 1
        return Stepped(
            seen=self._seen() if draw else None,
            rewards=np.array([self._success and not over], np.float32),
            success=np.array([self._success]),
            terminated=np.array([False]),
            truncated=np.array([self._steps >= self.spec.max_steps]),
        )

    def look(self, places: Sequence[int]) -> Seen:
        """Return the observation that the last `step` made."""
        self._begun(places)
        return self._seen()

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert of the task."""
        scene = self._begun([place])
        plans = PLANS.get(self.suite, {})
        if self._task_id not in plans:
            able = ", ".join(map(str, plans)) or "none"
            raise ConfigError(
                f"there is no scripted expert for task {self._task_id} of {self.suite} "
                f"({self.spec.tasks[self._task_id]!r}). Tasks that have one: {able}. Set --tasks."
            )
        return Expert(scene, plans[self._task_id], Flaws(settings, rng)).act

    def close(self) -> None:
        """Free the scene. May be called again."""
        if self._scene is not None:
            self._scene.close()
        self._scene, self._task_id = None, -1

    def _seen(self, tasks: tuple[str, ...] = ()) -> Seen:
        scene = self._begun([0])
        return Seen(
            images=scene.draw()[None], states=scene.state()[None], tasks=tasks, poses=scene.pose()[None]
        )

    def _begun(self, places: Sequence[int]) -> Scene:
        if self._scene is None or list(places) != [0]:
            raise ConfigError(f"{self.suite} plays in place 0 after a reset, not in {list(places)}.")
        return self._scene

    def _check(self, start: SimStart) -> None:
        tasks, problem = self.spec.tasks, ""
        if not 0 <= start.task_id < len(tasks):
            problem = f"is of task {start.task_id}, but {self.suite} has tasks 0 to {len(tasks) - 1}"
        elif start.task not in ("", own := tasks[start.task_id]):
            problem = f"has the task {start.task!r}, but that of {self.suite} is {own!r}: another simulator's"
        elif not -1 <= start.trial < TRIALS:
            problem = f"is trial {start.trial}, but {self.suite} has trials 0 to {TRIALS - 1} (-1: random)"
        elif start.seed < 0:
            problem = f"has the seed {start.seed}. Seeds begin at 0"
        if problem:
            raise ConfigError(f"Start {start.name} {problem}.")

    def _scene_of(self, task_id: int) -> Scene:
        """Return the task's scene; that of another task is freed first, for the memory."""
        if self._scene is None or self._task_id != task_id:
            self.close()
            self._scene = Scene(
                bddl_file(self.suite, task_id),
                self.spec.cameras,
                self._files,
                size=self.spec.image_size,
                multisampling=self._settings.multisampling,
                reflections=self._settings.reflections,
            )
            self._task_id = task_id
        return self._scene


class LiberoSpatial(LiberoSuite):
    """Ten tasks: the same bowl in ten places, to be put on the plate."""

    suite = "libero_spatial"
    official_horizon = 220


class LiberoObject(LiberoSuite):
    """Ten tasks: ten groceries, to be put into the basket."""

    suite = "libero_object"
    official_horizon = 280


class LiberoGoal(LiberoSuite):
    """Ten tasks: ten goals in one scene."""

    suite = "libero_goal"
    official_horizon = 300


class Libero10(LiberoSuite):
    """Ten long tasks, most of them of two parts."""

    suite = "libero_10"
    official_horizon = 520


class Libero90(LiberoSuite):
    """Ninety short tasks."""

    suite = "libero_90"
    official_horizon = 400
