"""`asyncrl train --dry-run`: what cannot work is refused, the settings are printed, nothing is written."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.config.run import load_file, parse
from asyncrl.doctor.checks import CHECKS
from support.run_folders import contents
from support.whole_runs import exit_code


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_it_prints_settings_that_give_themselves_back_and_writes_nothing(flags, tmp_path, capsys) -> None:
    (tmp_path / "mine.toml").write_text("seed = 7\n[replay]\nmax_lag = 1\n")
    assert cli.run("train", [*flags, "--dry-run", "--updates", "3", "mine.toml"]) == 0
    said = capsys.readouterr()
    assert "Nothing was started or written." in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]

    resolved = tmp_path / "resolved.toml"
    resolved.write_text(said.out)
    config = load_file(resolved)
    assert (config.updates, config.seed, config.replay.max_lag) == (3, 7, 1)
    asked = parse([*flags, "--updates", "3", "mine.toml"])
    assert config.policy == asked.policy
    contexts = (asked.imagination.context, config.imagination.context)
    assert contexts == ("auto", "latents")  # The world says so.
    assert config.actor.max_decisions > 0

    assert cli.run("train", ["resolved.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out == said.out


REFUSED = {
    "--log-with swanlab": "pip install",
    "--policy absent": "The policy 'absent' does not exist",
    "--start-states absent.h5": "absent.h5",
    "--placement learner=0,actor=5": "--placement",
    "--placement learner=0-2,actor=3 --algorithm.groups-per-update 2": "each needs a group of episodes",
    "--replay.listen tcp://0.0.0.0:5555": "can be reached from other hosts",
    "--resume": "there is no run to resume",
    "--run-dir full": "already exists and is not empty",
    "--correction.kind vtrace": "V-trace corrects",
    "--correction.kind pathlib:Path": "pathlib:Path, which lacks weights",
    "--device cuda": "sees no CUDA device",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_the_run_would_refuse_is_refused_in_its_words(wrong, flags, tmp_path, capsys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = contents(tmp_path)
    code = exit_code([*flags, "--dry-run", *wrong.split()])
    said = capsys.readouterr()
    assert code == 2
    read = wrong not in ("--resume", "--correction.kind vtrace")  # Those are no settings of a run.
    assert said.out.startswith("# asyncrl") == read
    assert REFUSED[wrong] in " ".join(said.err.replace("│", " ").split())
    assert contents(tmp_path) == before


def test_all_that_is_missing_is_named_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--policy absent --world none --log-with swanlab --run-dir /proc/1/run"
    assert exit_code(["--dry-run", *wrong.split(), "--placement", "learner=0,actor=5"]) == 2
    said = capsys.readouterr()
    assert tomllib.loads(said.out)["policy"] == "absent"
    for sentence in ("'absent' does not exist", "none", "swanlab", "--run-dir /proc/1/run", "--placement"):
        assert said.err.count(sentence) >= 1, said.err
    assert len([line for line in said.err.splitlines() if "warning" not in line]) == 5, "each is named once"


def test_settings_without_effect_are_named_beside_the_settings(flags: list[str], capsys) -> None:
    idle = {"--algorithm.clip-high": "0.7", "--evaluation.episodes": "8", "--lora.alpha": "4"}
    more = [word for flag in idle.items() for word in flag]
    assert cli.run("train", [*flags, "--dry-run", *more]) == 0
    said = capsys.readouterr()
    for flag in idle:
        assert f"{flag} has no effect" in said.err
    assert "has no effect" not in said.out


def test_a_run_that_goes_on_is_checked_and_left_as_it_is(flags: list[str], tmp_path, capsys) -> None:
    assert cli.run("train", [*flags, "--inline", "--updates", "1", "--run-dir", "run"]) == 0
    capsys.readouterr()

    def quiet() -> dict[str, Any]:
        return {name: kept for name, kept in contents(tmp_path).items() if "run/processes" not in name}

    before = quiet()
    again = ["--run-dir", "run", "--resume", "--updates", "2", "--inline", "--dry-run"]
    assert cli.run("train", again) == 0
    assert "resume = true" in capsys.readouterr().out
    assert quiet() == before

    for part in (tmp_path / "run" / "checkpoints").glob("update_*/*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    assert cli.run("train", again) == 2
    assert "were written" in capsys.readouterr().err


def test_of_several_ranks_the_first_one_checks(flags: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.run("train", [*flags, "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


def test_no_check_of_a_dry_run_writes_listens_or_starts_something() -> None:
    acting = {check.name for check in CHECKS if check.acts}
    assert {"run folder", "network", "disk speed", "links"} <= acting
    assert not acting & {"models", "placement", "device memory", "free disk"}
