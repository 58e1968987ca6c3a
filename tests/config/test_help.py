"""The short help: one screen of what is often used, and a way to the rest."""

import re
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands import audit, collect, convert, doctor, evaluate
from asyncrl.config.help import TRAIN, WIDTH
from asyncrl.config.run import TrainConfig, parse

SETTINGS = {
    "train": (TRAIN, TrainConfig()),
    "doctor": (doctor.HELP, TrainConfig()),
    "evaluate": (evaluate.HELP, evaluate.EvaluateConfig()),
    "audit": (audit.HELP, audit.AuditConfig()),
    "collect": (collect.HELP, collect.CollectConfig(out=Path())),
    "convert": (convert.HELP, convert.ConvertConfig(source="", out=Path())),
}
LONGEST = 60
"""Lines of a help above which a command has a short one."""


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", SETTINGS)
def test_it_fits_one_screen_and_names_the_way_to_the_rest(command: str) -> None:
    help_text, settings = SETTINGS[command]
    lines = help_text.text(settings).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == f"usage: asyncrl {command} {help_text.usage}"
    assert lines[-1].endswith(f"asyncrl {command} --help-all")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_no_command_has_a_long_help(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        cli.run(command, ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: asyncrl " + command)
    assert len(text.splitlines()) <= LONGEST
    assert ("--help-all" in text) == (command in SETTINGS)


@pytest.mark.parametrize("command", ["evaluate", "collect"])
def test_help_all_of_another_command_shows_what_the_short_one_leaves_out(command: str, capsys) -> None:
    help_text, settings = SETTINGS[command]
    with pytest.raises(SystemExit):
        cli.run(command, ["--help-all"])
    everything = capsys.readouterr().out
    assert "--horizon" in everything
    assert "--horizon" not in help_text.text(settings)
    for name in " ".join(help_text.groups.values()).split():
        assert f"--{name.replace('_', '-')}" in everything


def test_defaults_stand_behind_what_a_flag_does() -> None:
    rows = dict(
        re.fullmatch(r"  (--\S+).*?(?: \(([^()]*)\))?", line).groups()
        for line in TRAIN.text(TrainConfig()).splitlines()
        if line.startswith("  --")
    )
    assert rows["--updates"] == "10"
    assert rows["--seed"] == "0"
    assert rows["--run-dir"] == "runs/{time}"
    assert rows["--optimizer.learning-rate"] == "0.0001"
    assert rows["--resume"] is rows["--reward"] is rows["--dry-run"] is None


def test_help_shows_what_a_file_on_the_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("updates = 77\n")
    for line in (["--help", f"{tmp_path}/mine.toml"], [f"{tmp_path}/mine.toml", "-h"]):
        assert re.search(r"--updates N .*\(77\)", printed(line, capsys))


def test_help_all_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(["--help-all"], capsys)
    assert everything.startswith("usage: asyncrl train [CONFIG.toml ...]")
    for flag in ("--dry-run", "--hang-timeout", "--imagination.fixed-shape", "--critic.lam"):
        assert flag in everything
        assert (flag in TRAIN.text(TrainConfig())) == (flag == "--dry-run")
