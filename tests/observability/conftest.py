"""Fixtures of these tests."""

from pathlib import Path

import pytest

from asyncrl.observability import process_status


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has counts, which begin at 0."""
    monkeypatch.setattr(process_status, "_own_file", None)
    monkeypatch.setattr(process_status, "_early", {})
    process_status.publish_as(tmp_path, "counting")
