"""LIBERO's suites as simulators: official starts, pictures, states, instructions and horizons.

One object plays one episode. A reset takes a fraction of a second, or seconds to build the scene of another
task.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, Flaws, SimStart, SimulatorSpec, check_settings
from asyncrl.simulators.libero.expert import Expert, Grasp, MovePlan
from asyncrl.simulators.libero.light import light_files
from asyncrl.simulators.libero.scene import CAMERAS, STATE_DIM, Scene, drawing_device
from asyncrl.simulators.libero.tasks import TRIALS, bddl_file, instruction, stored_states, task_names
from asyncrl.simulators.one_by_one import OneByOne, Outcome

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

    settle: int = 10  # Idle steps before an episode begins, while objects come to rest; not counted
    horizon: int = 0  # Steps until truncation; 0: the suite's own
    wrist: bool = True  # Draw the camera at the wrist too, which doubles the cost of pictures
    scene: Literal["stock", "light"] = "stock"
    """`stock`: the shapes and textures of LIBERO. `light`: those that `asyncrl simulators lite` made of them,
    which are drawn faster and look slightly different; the physics is the same."""
    multisampling: bool = True  # Smooth edges, as officially
    reflections: bool = True  # Mirrors, as officially

    @property
    def protocol(self) -> str:
        """The scene and the settling steps, in words."""
        without = [name for name in ("multisampling", "reflections") if not getattr(self, name)]
        drawn = "".join(f", without {name}" for name in without)
        return f"{self.scene} scene{drawn}, {self.settle} settling steps"


class LiberoPlace:
    """The scenes of a suite, of which one is built at a time."""

    scene: Scene

    def __init__(self, spec: SimulatorSpec, settings: LiberoSettings) -> None:
        drawing_device()  # Errors of drawing come before scenes are built.
        self.task_id = -1  # Of the scene; -1: none is built.
        self._spec, self._settings = spec, settings
        self._files = light_files(spec.name) if settings.scene == "light" else {}

    def reset(self, start: SimStart) -> str:
        """Begin the episode that belongs to a start; return its instruction."""
        suite, settings = self._spec.name, self._settings
        if self.task_id != start.task_id:
            self.close()  # First, for the memory.
            self.scene = Scene(
                bddl_file(suite, start.task_id),
                self._spec.cameras,
                self._files,
                size=self._spec.image_size,
                multisampling=settings.multisampling,
                reflections=settings.reflections,
            )
            self.task_id = start.task_id
        key = [zlib.crc32(suite.encode()), start.task_id]
        if start.trial >= 0:
            self.scene.begin([*key, 0, start.trial], stored_states(suite, start.task_id)[start.trial])
        else:
            self.scene.begin([*key, 1, start.seed], None)
        for _ in range(settings.settle):
            self.scene.step(np.array(IDLE))
        return self._spec.tasks[start.task_id]

    def step(self, action: NDArray[np.float32]) -> Outcome:
        """Carry out an action ``[7]``."""
        return Outcome(self.scene.step(action.astype(np.float64)))

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the pictures and the state that the last step made."""
        return self.scene.draw(), self.scene.state()

    def pose(self) -> NDArray[np.float32]:
        """Return the `hand_pose` ``[8]`` of the same observation."""
        return self.scene.pose()

    def close(self) -> None:
        """Free the scene. May be called again."""
        if self.task_id >= 0:
            self.scene.close()
            del self.scene
        self.task_id = -1


class LiberoSuite(OneByOne[LiberoPlace]):
    """A suite of LIBERO, one episode at a time; robosuite's OSC_POSE actions at 20 Hz.

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
        spec = self.describe(places=places, image_size=image_size, **settings)
        super().__init__(spec, [LiberoPlace(spec, LiberoSettings(**settings))])

    @classmethod
    def describe(cls, *, places: int = 1, image_size: int = 0, **settings: Any) -> SimulatorSpec:
        """Return the spec; builds no scene and imports no robosuite."""
        chosen = LiberoSettings(**settings)
        check_settings(chosen)
        if places != 1:
            raise ConfigError(
                f"--simulator {cls.suite} plays one episode per process, but {places} places were asked for "
                "in one. Use more workers."
            )
        if image_size != 0 and not 16 <= image_size <= 1024:
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

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the scripted expert of the task."""
        played, plans = self.places[place], PLANS.get(self.suite, {})
        if (task := played.task_id) not in plans:
            able = ", ".join(map(str, plans)) or "none"
            raise ConfigError(
                f"there is no scripted expert for task {task} of {self.suite} ({self.spec.tasks[task]!r}). "
                f"Tasks that have one: {able}. Set --tasks."
            )
        return Expert(played.scene, plans[task], Flaws(settings, rng)).act


def _suite(name: str, horizon: int) -> type[LiberoSuite]:
    return cast("type[LiberoSuite]", type(name, (LiberoSuite,), {"suite": name, "official_horizon": horizon}))


LiberoSpatial = _suite("libero_spatial", 220)  # The same bowl in ten places, to be put on the plate.
LiberoObject = _suite("libero_object", 280)  # Ten groceries, to be put into the basket.
LiberoGoal = _suite("libero_goal", 300)  # Ten goals in one scene.
Libero10 = _suite("libero_10", 520)  # Ten long tasks, most of them of two parts.
Libero90 = _suite("libero_90", 400)  # Ninety short tasks.
