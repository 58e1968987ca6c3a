"""Say what rank 0, which loads models and checkpoint, tells the replay, which imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from asyncrl.replay.episode_format import ANY_FORMAT, EpisodeFormat
from asyncrl.storage.checksums import Checksum


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What the replay has to know of a run besides its settings."""

    episodes: EpisodeFormat = ANY_FORMAT
    """What all of them have in common."""
    ledger: Checksum | None = None
    """What the ledger was when the checkpoint was written that the run goes on from; None: a new run, or not
    known."""

    def to_json(self) -> str:
        """Write it as the text that `from_json` reads."""
        ledger = None if self.ledger is None else asdict(self.ledger)
        return json.dumps({"episodes": self.episodes.to_json(), "ledger": ledger})

    @classmethod
    def from_json(cls, text: str) -> RunStart:
        """Read what `to_json` wrote; an empty text: nothing is known."""
        plain = json.loads(text or "{}")
        return cls(
            episodes=EpisodeFormat.from_json(plain.get("episodes", "")),
            ledger=Checksum.from_json(plain.get("ledger")),
        )


NEW_RUN: Final = RunStart()
"""Nothing is known but the settings."""
