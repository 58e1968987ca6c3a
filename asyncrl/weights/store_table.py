"""Keep the table of the weight group in torch's store, for one process of each of several hosts.

    learner      `serve_table`: opens the store on an address that the other hosts reach
    other hosts  `StoreTable`: each entry is one question to it

It has no secret and is not encrypted, nor is what a group of gloo or NCCL carries: whoever reaches the
address can replace the policy. Its keys begin with the mark and the number of the run's start, so that nobody
takes another run's entries for its own by mistake.

A question that fails is a `TableError` and asked again over a new connection, until the store did not answer
for the deadline. One on a connection that was cut waits in the operating system, which sends again what was
lost; `silent` says for how long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from asyncrl.errors import ConfigError, first_line
from asyncrl.weights.table import MAX_VALUE, Lines, Table, TableError, TableGone
from asyncrl.weights.wake_up import WakeUp, WakeUpEvent

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

CONNECT_SECONDS: Final = 5.0
"""Longest attempt to reach the store."""
_ABSENT: Final = b"~absent"
"""What no entry is: all are JSON objects, digits or texts of failures."""
T = TypeVar("T")


class StoreTable(Table):
    """A table in the store of another process, or of this one."""

    one_host = False

    def __init__(self, endpoint: str, prefix: str, deadline: float, server: TCPStore | None = None) -> None:
        """Use a store, which is reached when it is used first.

        Args:
            endpoint: tcp://ADDRESS:PORT of the store.
            prefix: Of all keys; names the start of the run.
            deadline: Seconds without an answer after which it counts as gone.
            server: The store itself, in the process that has it.
        """
        super().__init__()
        self.endpoint, self._prefix, self._deadline = endpoint, f"{prefix}/", deadline
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._address = (host, int(port))
        self._store: TCPStore | None = server
        self._lock = threading.Lock()
        self._answered = time.monotonic()

    @property
    def silent(self) -> float:
        """Seconds since the store answered last."""
        return time.monotonic() - self._answered

    def set(self, key: str, value: bytes) -> None:
        """Give `key` a value. See `Table.set`."""
        # Torch's declaration asks for text, and would write bytes of it as UTF-8 anyway.
        self._ask(lambda store: store.set(self._prefix + key, value.decode()))

    def get(self, key: str, limit: int = MAX_VALUE) -> bytes | None:
        """Return the value of `key`, without waiting for one. See `Table.get`."""
        # `get` of the store would wait for the key, also for one that was deleted since it was checked.
        text, absent = self._prefix + key, _ABSENT.decode()
        found = self._ask(lambda store: store.compare_set(text, absent, absent))
        if found == _ABSENT:
            return None
        if len(found) > limit:
            self.note_wrong(key, found[:100], f"is longer than {limit} bytes")
            return None
        return bytes(found)

    def check(self, key: str) -> bool:
        """Tell whether `key` has a value."""
        return self._ask(lambda store: store.check([self._prefix + key]))

    def delete(self, key: str) -> None:
        """Take the value of `key` away."""
        self._ask(lambda store: store.delete_key(self._prefix + key))

    def list_keys(self) -> list[str]:
        """List the keys of this start of the run that have a value, links' own ones too."""
        found = self._ask(lambda store: store.list_keys())
        return [key.removeprefix(self._prefix) for key in found if key.startswith(self._prefix)]

    def append(self, key: str, line: bytes) -> int:
        """Add a line. See `Table.append`."""
        assert b"\n" not in line, line
        text = f"\n{line.decode()}\n"
        self._ask(lambda store: store.append(self._prefix + key, text))  # pyright: ignore[reportAttributeAccessIssue]
        return len(self.get(key) or b"")

    def read_lines(self, key: str, start: int) -> Lines:
        """Return the complete lines from byte `start` on; each was added whole."""
        found = (self.get(key) or b"")[start:]
        return Lines(lines=tuple(line for line in found.split(b"\n") if line), end=start + len(found))

    def open_wake_up(self) -> WakeUp:
        """Make what wakes this process's own thread; those of other hosts look again after a while."""
        return WakeUpEvent()

    def epoch_store(self, epoch: int, seconds: float) -> Store:
        """Open the part of the store where the members of an epoch set up their link.

        Raises:
            DistError: It cannot be reached over a new connection.
        """
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        store = _reach(self._address, seconds)
        return PrefixStore(f"{self._prefix}e{epoch}.link", store)

    def forget_link(self, epoch: int) -> None:
        """Do nothing: the link's keys go with those of its epoch."""

    def close(self) -> None:
        """Close the connection; in the learner's process the store ends with it."""
        with self._lock:
            self._store = None

    def _ask(self, question: Callable[[TCPStore], T]) -> T:
        """Ask the store, over a new connection where the last one failed."""
        import torch.distributed as dist

        store = None
        try:
            with self._lock:
                if self._store is None:
                    self._store = _reach(self._address, CONNECT_SECONDS)
                store = self._store
            found = question(store)
        except dist.DistError as error:
            with self._lock:
                if self._store is store:
                    self._store = None
            why = f"the store of the weights at {self.endpoint} does not answer ({first_line(error)})"
            if self.silent > self._deadline:
                raise TableGone(why, self._answered) from None
            raise TableError(
                f"{why}. The learner ended, or the network is down; it is tried again."
            ) from None
        self._answered = time.monotonic()
        return found


def serve_table(address: str, prefix: str, deadline: float, port: int = 0) -> StoreTable:
    """Open a store in this process and return the table in it.

    Args:
        address: IPv4 address of this host on which it listens, and on no other.
        prefix: See `StoreTable`.
        deadline: See `StoreTable`.
        port: Port; 0: one that is free.

    Raises:
        ConfigError: It cannot listen there.
    """
    import socket

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        listener = socket.create_server((address, port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"--weights.between-hosts: the learner cannot listen at {address}:{port} ({error.strerror}), "
            "where the hosts agree on broadcasts. End what has the port, or use --weights.between-hosts tcp."
        ) from None
    port = int(listener.getsockname()[1])
    server = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return StoreTable(f"tcp://{address}:{port}", prefix, deadline, server)


def _reach(address: tuple[str, int], seconds: float) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = timedelta(seconds=seconds)
    return TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
