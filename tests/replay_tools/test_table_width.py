"""Tables fit a terminal and are whole lines in a pipe."""

import os
import sys

import pytest

from asyncrl.replay_tools.episodes import table

ROWS = [
    ("episode", "task", "steps", "group was"),
    ("f7e3ac91b8a8", "put the green cube on the white plate", "18", "used"),
    ("77c9e29b1ba4", "put the red cube on the yellow plate", "-", "unused"),
]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):
    def of(width: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((width, 24)))

    return of


def test_a_pipe_gets_a_line_per_row_whatever_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert table(ROWS, ("group was",)).splitlines() == [
        "episode       task                                   steps  group was",
        "f7e3ac91b8a8  put the green cube on the white plate     18  used",
        "77c9e29b1ba4  put the red cube on the yellow plate       -  unused",
    ]


def test_a_terminal_that_is_wide_enough_gets_the_same(terminal) -> None:
    wide = table(ROWS)
    terminal(69)
    assert table(ROWS, ("group was",)) == wide


def test_a_narrow_terminal_does_without_columns_in_the_order_that_is_said(terminal) -> None:
    terminal(60)
    assert table(ROWS, ("group was", "steps")).splitlines() == [
        "episode       task                                   steps",
        "f7e3ac91b8a8  put the green cube on the white plate     18",
        "77c9e29b1ba4  put the red cube on the yellow plate       -",
    ]
