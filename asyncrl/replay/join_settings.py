"""Tell a process that wants to join a run the run's settings.

    visitor ──► replay   hello as 'visitor', then `settings` for part 0, 1, ... of the run's config.json
    replay ──► visitor   `settings_part`: that part, the number of parts, where the weights can be fetched,
                         and the run's identity, which the actor then introduces itself with

A visitor is nobody yet: the replay notes nothing about it. It is answered when it has a key that the run
admits, or, where there are no keys, the run's secret, which lies beside the private socket.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ReplayError
from asyncrl.messaging.episode_codec import MAX_TEXT
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.sockets import IDENTITY
from asyncrl.replay.connection import PING_EVERY, Connection
from asyncrl.storage.private_files import read_small
from asyncrl.storage.run_identity import NO_RUN, RunIdentity

ROLE: Final = "visitor"
MAX_PARTS: Final = 64
"""Most parts of a run's settings; each has at most `MAX_TEXT` characters."""


@dataclass(frozen=True, kw_only=True)
class JoinSettings:
    """What an actor must know of a run to join it."""

    config: str
    """JSON of the run's `TrainConfig`."""
    weights: str
    """Endpoint where the weights can be fetched."""
    identity: RunIdentity = NO_RUN
    """Of the run, in its present start."""

    def part(self, number: int) -> dict[str, Any] | None:
        """Return the fields of one `settings_part`; None when there is no such part."""
        parts = -(-len(self.config) // MAX_TEXT)
        if not 0 <= number < parts <= MAX_PARTS:
            return None
        text = self.config[number * MAX_TEXT : (number + 1) * MAX_TEXT]
        return {
            "part": number,
            "parts": parts,
            "text": text,
            "weights": self.weights,
            "secret": self.identity.secret,
            "attempt": self.identity.attempt,
        }


def ask_settings(endpoint: str, name: str, security: ClientKeys | None, deadline: float) -> JoinSettings:
    """Ask a replay for the settings of its run.

    Args:
        endpoint: Of the replay.
        name: What this process will be called in the run.
        security: Its keys, when the replay has some.
        deadline: Longest wait in seconds.

    Raises:
        ReplayError: Nobody answers, or the replay refuses: wrong keys, another version, a name that is taken.
        WireError: It speaks another schema version, or garbage.
    """
    link = Connection(endpoint, ROLE, name, 0, security, RunIdentity(secret=_secret_beside(endpoint)))
    texts: list[str] = []
    until, asked_at = time.monotonic() + deadline, -float("inf")
    try:
        while (now := time.monotonic()) < until:
            if link.server_id and now - asked_at >= PING_EVERY:
                asked_at = now
                link.send_now("settings", name=name, part=len(texts))
            for message in link.exchange(0.1):
                if message.kind != "settings_part" or message["part"] != len(texts):
                    continue
                texts.append(message["text"])
                asked_at = -float("inf")
                if len(texts) >= message["parts"]:
                    identity = RunIdentity(secret=message["secret"], attempt=message["attempt"])
                    return JoinSettings(
                        config="".join(texts),
                        weights=message["weights"],
                        identity=identity,
                    )
            if link.stopped:
                raise ReplayError(f"the run at {endpoint} is over.")
    finally:
        link.close()
    raise ReplayError(
        f"no replay answered at {endpoint} within {deadline:g} s. Is the run under way, is this its "
        "--replay.listen, and do firewalls let it through?"
    )


def _secret_beside(endpoint: str) -> str:
    """Read the secret of a run of this user and host; empty where keys take its place."""
    if not endpoint.startswith("ipc://"):
        return ""
    try:
        return read_small(Path(endpoint.removeprefix("ipc://")).with_name(IDENTITY))
    except (OSError, ValueError):  # Then nobody answers there, or the replay says that this is not its run.
        return ""
