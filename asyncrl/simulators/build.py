"""Build the simulator that a name on the command line stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from asyncrl import registry
from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Simulator, SimulatorSpec

_NEEDS = ("spec", "reset", "step", "look", "close")


@dataclass(frozen=True, kw_only=True)
class SimulatorSource:
    """Name and settings of a simulator; plain values, which worker processes receive."""

    name: str
    """Short name, or 'package.module:Class' (or function) of the user."""
    settings: tuple[str, ...] = ()  # Keywords, as 'key=value' texts.
    places: int = 1
    image_size: int = 0  # Side of the pictures in pixels; 0: the simulator's own.
    horizon: int = 0  # Steps until an episode is truncated; 0: the simulator's own.

    def with_(self, **changes: Any) -> SimulatorSource:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def build(self) -> Simulator:
        """Build the simulator."""
        built = self._call(registry.resolve("simulator", self.name))
        if all(hasattr(built, name) for name in _NEEDS):
            return built
        if _is_vector_env(built):
            from asyncrl.simulators.vector_env import VectorEnvSimulator

            return VectorEnvSimulator(built)
        lacking = ", ".join(name for name in _NEEDS if not hasattr(built, name))
        raise ConfigError(
            f"--simulator {self.name} made a {type(built).__name__}, which is no simulator (it lacks "
            f"{lacking}) and no gymnasium.vector.VectorEnv. See docs/extending.md."
        )

    def spec(self) -> SimulatorSpec:
        """Return the spec, without building a scene if the class has `describe`. Raises as `build`."""
        kind = registry.resolve("simulator", self.name)
        if hasattr(kind, "describe"):
            return self._call(kind.describe)
        simulator = self.with_(places=min(self.places, 2)).build()  # Whether they step together, two show.
        try:
            return replace(simulator.spec, places=self.places)
        finally:
            simulator.close()

    def usual_places(self) -> int:
        """Return the default number of places of one object: that of its class, else 16."""
        kind = registry.resolve("simulator", self.name)
        return min(getattr(kind, "usual_places", 16), getattr(kind, "most_places", 16))

    def may_have_expert(self) -> bool:
        """True if the class has an `expert`, or if only a worker can tell: a function makes the simulator."""
        kind = registry.resolve("simulator", self.name)
        return not isinstance(kind, type) or hasattr(kind, "expert")

    def _call(self, function: Any) -> Any:
        keywords = registry.keywords("--simulator-settings", self.settings)
        if self.horizon:
            keywords["horizon"] = self.horizon
        try:
            return function(places=self.places, image_size=self.image_size, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"--simulator {self.name} cannot be built: {error}. It is called with places, image_size, "
                "horizon where --horizon is set, and the keywords of --simulator-settings."
            ) from error


def _is_vector_env(built: object) -> bool:
    """True for a `gymnasium.vector.VectorEnv`, without an import: its maker has imported gymnasium."""
    return any(
        kind.__name__ == "VectorEnv" and kind.__module__.startswith("gymnasium.vector")
        for kind in type(built).__mro__
    )
