"""Write checkpoints beside the training: one thread per rank, and ranks that succeed together.

The rename that publishes a checkpoint happens after all ranks have said, through a process group of their
writers' own, that their files are written. When one fails, all of them do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import CheckpointError
from asyncrl.observability import waits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """The writers of all ranks, step by step together."""

    def __init__(self, link: ProcessGroup | None) -> None:
        """Join the writers; None: this rank is alone."""
        self.rank, self.size = (0, 1) if link is None else (link.rank(), link.size())
        self._link = link

    def all(self, action: Callable[[], None]) -> None:
        """Do it on every rank; returns when all have."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        failures = self._count(int(failure is not None))
        if failure is not None:
            raise failure
        if failures:
            raise OSError(f"{failures} of {self.size} learner ranks failed: see their output")

    def first(self, action: Callable[[], None]) -> None:
        """Do it on rank 0; the others wait for it. Raises as `all` does."""
        self.all(action if self.rank == 0 else lambda: None)

    def _count(self, failed: int) -> int:
        if self._link is None:
            return failed
        import torch
        import torch.distributed as dist

        failures = torch.tensor([failed])
        dist.all_reduce(failures, group=self._link)
        return int(failures)


class WriterThread:
    """At most one action at a time, beside its owner. Used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._name = Path()
        self._waited = 0.0

    def start(self, name: Path, action: Callable[[], None]) -> None:
        """Begin an action; the one before it must have been waited for with `finish`."""
        assert self._thread is None, "finish comes first"

        def run() -> None:
            try:
                action()
            except BaseException as error:  # Raised where the owner asks next.
                self._failure = error

        self._name = name
        self._thread = threading.Thread(target=run, name=f"write {name.name}", daemon=True)
        self._thread.start()

    def finish(self, deadline: float) -> None:
        """Wait for the action, if there is one, and raise its error."""
        if self._thread is None:
            return
        began = time.monotonic()
        with waits.waiting(waits.CHECKPOINT, deadline):
            self._thread.join(deadline)
        self._waited += time.monotonic() - began
        if self._thread.is_alive():
            raise CheckpointError(
                f"Checkpoint {self._name} is not written after {deadline:g} more seconds. Look at the disk "
                "and the output of the other learner ranks; --resume goes on from the checkpoint before it."
            )
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def take_waited(self) -> float:
        """Seconds spent in `finish` since the last call of this."""
        waited, self._waited = self._waited, 0.0
        return waited
