"""Lines of two parts: whole in a file, broken between words in a terminal."""

from __future__ import annotations

import sys

import pytest

from asyncrl.observability.layout import hanging

TEXT = "ten words that say what was found here and there"


def test_a_file_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert hanging("name  ", TEXT) == f"name  {TEXT}"


def test_a_terminal_gets_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "32")
    assert hanging("name  ", TEXT) == ("name  ten words that say what\n      was found here and there")
    assert hanging("name  ", "/a/path/that/is/longer/than/the/terminal") == (
        "name  /a/path/that/is/longer/than/the/terminal"
    )
    assert hanging("name  ", "") == "name  "


def test_a_long_first_part_has_a_line_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "32")
    assert hanging("a_rather_long_name.toml  ", TEXT) == (
        "a_rather_long_name.toml\n    ten words that say what was\n    found here and there"
    )
