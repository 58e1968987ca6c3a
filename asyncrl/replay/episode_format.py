"""What all episodes of a run have in common, as its models, start states and simulator say. Pure; no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from asyncrl.records import ActionSpec


@dataclass(frozen=True, kw_only=True)
class SimulatorFormat:
    """What the episodes of a run have in common, beside `EpisodeFormat`, that are played in a simulator."""

    name: str
    """With which the names of its starts begin."""
    tasks: tuple[str, ...] = ()
    """Its instructions; empty: any."""
    more_cameras: int = 0
    """``V``: those beside the first that the policy sees."""
    state_dim: int = 0
    """``Q``: numbers of state that the policy sees."""
    reward: Literal["success", "dense"] = "success"
    """success: 1 in the step that fulfils the task, else 0. dense: any numbers."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFormat:
    """What every episode of a run has in common, as its models and start states say. Rank 0 tells it."""

    image_size: int = 0
    """Height and width of all pictures in pixels; 0: not known, any."""
    action_spec: ActionSpec | None = None
    """Steps per decision and numbers per step; None: not known, any."""
    sample: Mapping[str, tuple[str, tuple[int | str, ...]]] = field(default_factory=dict)
    """Array of the sample -> its dtype, and its shape in one decision, where a letter stands for any size;
    empty: not known, any."""
    max_decisions: int = 0
    """Most decisions of an episode; 0: not known, any."""
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a start state -> its instruction, or several of as many start states; empty: not known, any."""
    world_version: int | None = None
    """Of the world that imagines; -1: a simulator; None: not known, any."""
    simulator: SimulatorFormat | None = None
    """In which they are played; None: they are imagined, or nothing is known."""

    @property
    def imagined(self) -> bool:
        """Whether it is known that a world model makes the episodes."""
        return bool(self.image_size) and self.simulator is None

    def to_json(self) -> str:
        """Write it as the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EpisodeFormat:
        """Read what `to_json` wrote; an empty text: nothing is known."""
        if not text:
            return cls()
        plain = json.loads(text)
        spec, sample, simulator = (plain.pop(name) for name in ("action_spec", "sample", "simulator"))
        if simulator is not None:
            simulator = SimulatorFormat(**{**simulator, "tasks": tuple(simulator["tasks"])})
        return cls(
            **plain,
            simulator=simulator,
            action_spec=None if spec is None else ActionSpec(**spec),
            sample={name: (dtype, tuple(shape)) for name, (dtype, shape) in sample.items()},
        )


ANY_FORMAT: Final = EpisodeFormat()
"""Nothing is known."""
