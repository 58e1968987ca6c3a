"""What recordings look like: what those that are fitted together must have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Of one file of recordings, or of one data set of another program."""

    simulator: str
    cameras: tuple[str, ...]
    height: int
    """Of the pictures in pixels, like `width`."""
    width: int
    action_dim: int
    rate: float = 0.0
    """Steps per second; 0: not said."""

    def fits(self, other: Looks) -> bool:
        """Tell whether both can be fitted together: they are alike, and of one rate where both say it."""
        same_rate = not (self.rate and other.rate) or abs(self.rate - other.rate) < 1e-6
        return same_rate and self._told() == other._told()

    def _told(self) -> tuple[object, ...]:
        return self.simulator, self.cameras, self.height, self.width, self.action_dim

    def __str__(self) -> str:
        rate = f" at {self.rate:g} steps a second" if self.rate else ""
        return (
            f"pictures of {self.height} x {self.width} pixels by {', '.join(self.cameras)} and actions of "
            f"{self.action_dim} numbers{rate} in {self.simulator}"
        )
