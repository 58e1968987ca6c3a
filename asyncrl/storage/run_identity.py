"""What tells the processes of one run, and of one start of it, from those of any other.

    RUN/identity.json   mode 0600: a random secret, how often the run was started, and which folder this is

The secret proves that a peer belongs to the run: only this user can read it, and it travels only through
sockets that nobody else can open or read. A folder that was copied is another run and gets a secret of its
own at its first start: the file names the folder that it was made for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.storage.atomic import check_private, read_small, write_private

NAME: Final = "identity.json"
_BYTES: Final = 32
_DELETE: Final = "Delete it: the run gets a new one at its next start, and actors elsewhere join again."


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """One start of one run."""

    secret: str = field(default="", repr=False)
    """64 hexadecimal digits; empty where no other process can come, as in tests of parts."""
    attempt: int = 0
    """Number of this start of the run, from 1."""

    def knows(self, secret: str) -> bool:
        """Whether `secret` is this run's; takes equally long for every wrong one."""
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    @property
    def mark(self) -> str:
        """Tells this start of this run from others to who knows the secret, and gives nothing of it away."""
        return hashlib.sha256(f"{self.secret}:{self.attempt}".encode()).hexdigest()[:32]


NO_RUN: Final = RunIdentity()
"""Of parts that are used without a run."""


def next_attempt(run_dir: Path) -> RunIdentity:
    """Count one more start of a run, whose folder this process owns.

    Raises:
        ConfigError: The file cannot be read or written, or others can read it.
    """
    before = _read(run_dir)
    if before is None:
        found = RunIdentity(secret=secrets.token_hex(_BYTES), attempt=1)
    else:
        found = RunIdentity(secret=before.secret, attempt=before.attempt + 1)
    content = {"secret": found.secret, "attempt": found.attempt, "folder": _folder(run_dir)}
    write_private(run_dir / NAME, json.dumps(content))
    return found


def read(run_dir: Path) -> RunIdentity:
    """Read the identity of a run that was started.

    Raises:
        ConfigError: There is none, or it is another folder's.
    """
    found = _read(run_dir)
    if found is None:
        raise ConfigError(
            f"{run_dir / NAME} is missing or was made for another folder, so the run's processes cannot know "
            "each other. Start the run again with --resume."
        )
    return found


def _read(run_dir: Path) -> RunIdentity | None:
    """Read the file; None when there is none, or it was made for another folder."""
    path = run_dir / NAME
    try:
        row: Any = json.loads(read_small(path))
        check_private(path, _DELETE)
        secret, attempt, folder = row["secret"], row["attempt"], row["folder"]
        if type(attempt) is not int or not 0 < attempt < 2**31 or len(bytes.fromhex(secret)) != _BYTES:
            raise ValueError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}). {_DELETE}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged. {_DELETE}") from None
    return RunIdentity(secret=secret, attempt=attempt) if _is(folder, _folder(run_dir)) else None


def _is(made_for: Any, here: list[int | str]) -> bool:
    """Whether an identity was made for this folder: every host numbers its devices for itself."""
    if not isinstance(made_for, list) or len(made_for) not in (2, 3):
        return False
    device, number, *host = made_for
    return number == here[1] and (device == here[0] or host not in ([], here[2:]))


def _folder(run_dir: Path) -> list[int | str]:
    """Device, number of the folder on it, and the host that numbered the device."""
    about = run_dir.stat()
    return [about.st_dev, about.st_ino, socket.gethostname()]
