"""What tests of the replay share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Of tests that open and close a replay often; what only a loss of power would show is not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.storage.atomic.flush", lambda path: None)
        patch.setattr(os, "fdatasync", lambda handle: None)
        yield
