"""Wake a waiting process: of this host with a datagram through a socket in a private folder.

Processes of other hosts cannot be woken: they look again after a while.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from asyncrl.errors import ConfigError
from asyncrl.messaging.sockets import MAX_IPC_PATH

_NAME: Final = re.compile(r"w-[0-9a-f]{8}")
_EXAMPLE: Final = "w-01234567"


class WakeUp(Protocol):
    """What a thread waits on while it expects something. Any thread may wake others, or itself."""

    name: str
    """What others call it by."""

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most `seconds`. Returns whether that happened since the last wait."""
        ...

    def wake(self, *names: str) -> None:
        """Wake those that have these names, as far as they can be reached; '' is nobody's."""
        ...

    def wake_all(self, names: Iterable[str]) -> None:
        """Wake each of these once."""
        ...

    def close(self) -> None:
        """Free the name."""
        ...


class WakeUpEvent:
    """Woken by threads of its own process alone. See `WakeUp`."""

    def __init__(self) -> None:
        self.name: str = _new_name()
        self._woken = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait until woken. See `WakeUp.wait`."""
        woken = self._woken.wait(seconds)
        self._woken.clear()
        return woken

    def wake(self, *names: str) -> None:
        """Wake this process, when its name is among these."""
        if self.name in names:
            self._woken.set()

    def wake_all(self, names: Iterable[str]) -> None:
        """See `wake`."""
        self.wake(*names)

    def close(self) -> None:
        """Do nothing: the name is free."""


class WakeUpSocket:
    """A datagram socket on which a process waits. One thread waits; any thread may wake others or itself."""

    def __init__(self, folder: Path) -> None:
        """Bind to a new name in `folder`.

        Raises:
            ConfigError: the folder's path is too long for a socket, or none can be made there.
        """
        if len(os.fsencode(folder / _EXAMPLE)) > MAX_IPC_PATH:
            raise ConfigError(
                f"The weights' folder is {folder}, but the path of a socket in it may have at most "
                f"{MAX_IPC_PATH} bytes. Set TMPDIR to a shorter folder, for example /tmp."
            )
        self._folder = folder
        self.name: str = _new_name()
        """What others call it by."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(str(folder / self.name))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"No socket can be made in the weights' folder {folder} ({error.strerror}). "
                "Free space there, or set TMPDIR to another folder."
            ) from None
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most `seconds`. Returns whether that happened since the last wait."""
        if not self._poll.poll(1000 * seconds):
            return False
        with contextlib.suppress(BlockingIOError):  # All are read: one poll answers them all.
            while True:
                self._socket.recv(1)
        return True

    def wake(self, *names: str) -> None:
        """Wake the processes whose sockets have these names; '' is nobody's."""
        for name in names:
            if is_name(name):
                # Full (it is about to wake), closed or gone: whoever is there polls later.
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"!", str(self._folder / name))

    def wake_all(self, names: Iterable[str]) -> None:
        """Wake each of these processes once."""
        self.wake(*set(names))

    def close(self) -> None:
        """Free the name."""
        self._socket.close()
        with contextlib.suppress(OSError):  # The run's end removed the folder.
            (self._folder / self.name).unlink()


def is_name(name: object) -> bool:
    """Tell whether `name` is one that a socket may have: of this folder, and nothing else in it."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _new_name() -> str:
    return f"w-{secrets.token_hex(4)}"
