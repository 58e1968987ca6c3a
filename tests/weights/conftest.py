"""Channels of weights in private folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.weights.publisher import BroadcastPublisher
from support.weights import channel_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with channel_folder() as folder:
        yield folder


@pytest.fixture
def publisher(folder: Path) -> Iterator[BroadcastPublisher]:
    """A channel of shared memory."""
    channel = BroadcastPublisher("shared_memory", folder, deadline=1.0)
    yield channel
    channel.close()
