"""Properties of a run's episodes, which rank 0 reads from its models and sends to the replay. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from asyncrl.records import ActionSpec
from asyncrl.storage.checksums import Checksum


@dataclass(frozen=True, kw_only=True)
class SimulatorFormat:
    """Common properties of episodes that are played in a simulator."""

    name: str
    """Prefix of the names of its starts."""
    tasks: tuple[str, ...] = ()
    """Its instructions; empty: any."""
    more_cameras: int = 0
    """``V``: cameras beside the first that the policy sees."""
    state_dim: int = 0
    """``Q``: numbers of state that the policy sees."""
    reward: Literal["success", "dense"] = "success"
    """success: 1 in the step that fulfils the task, else 0. dense: any numbers."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFormat:
    """Common properties of a run's episodes, from its models and start states."""

    image_size: int = 0
    """Height and width of all pictures in pixels; 0: unknown, any."""
    action_spec: ActionSpec | None = None
    """Steps per decision and numbers per step; None: unknown, any."""
    sample: Mapping[str, tuple[str, tuple[int | str, ...]]] = field(default_factory=dict)
    """Array of the sample -> its dtype, and its shape in one decision, where a letter stands for any size;
    empty: unknown, any."""
    max_decisions: int = 0
    """Most decisions of an episode; 0: unknown, any."""
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a start state -> its instruction, or several of as many start states; empty: unknown, any."""
    world_version: int | None = None
    """Version of the world model; -1: a simulator; None: unknown, any."""
    simulator: SimulatorFormat | None = None
    """The run's simulator; None: a world model, or unknown."""

    @property
    def imagined(self) -> bool:
        """True if a world model is known to make the episodes."""
        return bool(self.image_size) and self.simulator is None

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EpisodeFormat:
        """Read the text of `to_json`; an empty text: everything is unknown."""
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
"""Everything is unknown."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Facts about a run that the replay needs besides its settings."""

    episodes: EpisodeFormat = ANY_FORMAT
    ledger: Checksum | None = None
    """Checksum of the ledger in the checkpoint of the resume; None: a new run, or unknown."""

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        ledger = None if self.ledger is None else asdict(self.ledger)
        return json.dumps({"episodes": self.episodes.to_json(), "ledger": ledger})

    @classmethod
    def from_json(cls, text: str) -> RunStart:
        """Read the text of `to_json`; an empty text: everything is unknown."""
        plain = json.loads(text or "{}")
        return cls(
            episodes=EpisodeFormat.from_json(plain.get("episodes", "")),
            ledger=Checksum.from_json(plain.get("ledger")),
        )


NEW_RUN: Final = RunStart()
"""Everything is unknown but the settings."""
