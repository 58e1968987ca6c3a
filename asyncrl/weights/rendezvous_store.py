"""Open the store through which the members of one epoch set up their link.

It is torch's FileStore: one file per epoch in the run's private folder, so that nothing listens, and that
whoever is halted while it holds the lock of an old epoch's file holds nobody else up.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]


def epoch_store(folder: Path, epoch: int, seconds: float) -> Store:
    """Open the store of one epoch.

    Args:
        folder: Private, of the run; the epoch's file is made there by whoever is first.
        epoch: Its number.
        seconds: Longest wait for a key.
    """
    # Of no fixed number of processes (-1): the last one to leave would delete it, but some never come.
    store = FileStore(str(folder / link_key(epoch)), -1)
    store.set_timeout(timedelta(seconds=seconds))
    return store


def link_key(epoch: int) -> str:
    """Name the file of an epoch's store, which is a key of the weights' table too."""
    return f"e{epoch}.link"
