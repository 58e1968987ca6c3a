"""Build the simulator that a name on the command line stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from asyncrl import registry
from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Simulator, SimulatorSpec

_NEEDS = ("spec", "reset", "step", "look", "close")


@dataclass(frozen=True, kw_only=True)
class SimulatorSource:
    """Says what is built; plain values, so that worker processes can be told."""

    name: str
    """Short name, or 'package.module:Class' (or function) of the user."""
    settings: tuple[str, ...] = ()
    """Keywords, as 'key=value' texts."""
    places: int = 1
    image_size: int = 0
    """Side of the pictures in pixels; 0: the simulator's own."""
    horizon: int = 0
    """Steps until an episode is truncated; 0: the simulator's own."""

    def with_(self, **changes: Any) -> SimulatorSource:
        """Return a copy with other fields."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)

    def build(self) -> Simulator:
        """Build the simulator.

        Raises:
            ConfigError: Nothing is called so, it refuses a setting, or it makes something else.
            AssetError: A library that it needs is not there.
        """
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
        """Return the spec, without building a scene where the class can say it.

        Raises:
            ConfigError: As `build`.
            AssetError: As `build`.
        """
        kind = registry.resolve("simulator", self.name)
        if hasattr(kind, "describe"):
            return self._call(kind.describe)
        simulator = self.with_(places=min(self.places, 2)).build()  # Whether they step together, two show.
        try:
            return replace(simulator.spec, places=self.places)
        finally:
            simulator.close()

    def usual_places(self) -> int:
        """Return how many places one object has where nobody says: as its class says, else 16."""
        kind = registry.resolve("simulator", self.name)
        return min(getattr(kind, "usual_places", 16), getattr(kind, "most_places", 16))

    def may_have_expert(self) -> bool:
        """Whether the class has an `expert`. What a function makes may have one: a worker knows."""
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
    """Whether it is a `gymnasium.vector.VectorEnv`. Imports nothing: who made one has imported it."""
    return any(
        kind.__name__ == "VectorEnv" and kind.__module__.startswith("gymnasium.vector")
        for kind in type(built).__mro__
    )
