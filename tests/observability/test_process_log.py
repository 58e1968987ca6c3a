"""What the learner says is in a file of the run, with times; and why it failed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asyncrl.observability.process_log import CONSOLE, logged_to


def test_console_lines_the_log_and_a_failure_are_kept_with_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "learner-0.log"

    def fail() -> None:
        with logged_to(path):
            logging.getLogger(CONSOLE).info("update 1")
            logging.getLogger("asyncrl.learner.learner").info("interrupted at version 3")
            logging.getLogger("asyncrl.learner.learner").warning("a bad step")
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        fail()
    lines = path.read_text().splitlines()
    assert all(line[:2] == "20" for line in lines[:4])
    assert [line.split(": ", 1)[1] for line in lines[1:4]] == [
        "update 1",
        "interrupted at version 3",
        "a bad step",
    ]
    assert "WARNING asyncrl.learner.learner" in lines[3]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in lines
    assert capsys.readouterr().err == "a bad step\n"
    logging.getLogger(CONSOLE).info("later")
    assert "later" not in path.read_text()
    assert not logging.getLogger("asyncrl").handlers
