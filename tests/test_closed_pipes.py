"""`| head`: whoever stops reading ends a command quietly, with the code of a program that a pipe ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import NOBODY_READS
from support.recorded_run import make_run

PRINTING = ["--help", "metrics", "train --help", "train --help-all", "replay list {run}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("piped")
    make_run(folder)
    return folder


@pytest.mark.parametrize(
    ("call", "streams"), [*((call, "stdout") for call in PRINTING), ("replay verify {run}", "both")]
)
def test_a_command_whose_reader_has_left_ends_quietly(call: str, streams: str, run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # Nobody will ever read: the first write fails.
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", *call.format(run=run).split()],
            stdout=writer,
            stderr=writer if streams == "both" else subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.returncode == NOBODY_READS == 141
    assert not done.stderr
