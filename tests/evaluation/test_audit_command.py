"""`asyncrl audit` with tiny models: what it takes from a run, its tables and file, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.evaluation.imagined_and_true import AuditedEpisode, table
from support.tiny_models import write_models

SHORT = ["--episodes", "3", "--rows", "2", "--workers", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates with one checkpoint each, whose episodes have two decisions."""
    folder = tmp_path_factory.mktemp("models")
    sampling = ["--algorithm.temperature", "1.6", "--algorithm.top-k", "40"]
    ends = ["--actor.max-decisions", "2", "--actor.success-threshold", "0.4"]
    ends += ["--actor.success-frames", "last"]
    flags = [*write_models(folder), *sampling, *ends, "--inline", "--updates", "2", "--checkpoint-every", "1"]
    assert cli.run("train", [*flags, "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.render
def test_what_is_left_open_is_as_in_the_run(run: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "audit.json"
    assert cli.run("audit", [str(run), *SHORT, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.match(r"world \S+, simulator tabletop, temperature 1\.6\nimagined success +\d", said)
    assert re.search(r"\ndecision +1\nPSNR, dB +\d", said)
    content = json.loads(file.read_text())
    settings = content["settings"]
    assert (settings["success_threshold"], settings["success_frames"]) == (0.4, "last")
    assert (settings["max_decisions"], settings["top_k"]) == (2, 40)
    (only,) = content["audits"]
    assert len(only["episodes"]) == only["wrong"]["episodes"] == 3
    assert all(len(episode["psnr"]) == episode["decisions"] <= 2 for episode in only["episodes"])
    assert only["correlation"] is None, "no true success: there is nothing to correlate"


@pytest.mark.render
@pytest.mark.parametrize("simulator", ["tabletop", "support.simulated:untold_tabletop"])
def test_without_start_states_none_are_opened(run: Path, simulator: str, monkeypatch, capsys) -> None:
    def none(*_: object) -> Path:
        raise AssertionError("no start states were named")

    monkeypatch.setattr("asyncrl.storage.assets.start_states_path", none)
    models = run.parent
    named = [str(models / "policy"), "--world", str(models / "world"), "--max-decisions", "1"]
    assert cli.run("audit", [*named, *SHORT, "--simulator", simulator]) == 0
    assert "imagined success" in capsys.readouterr().out


@pytest.mark.render
def test_a_runs_audit_has_a_row_per_version_and_writes_nothing_else(run: Path, tmp_path, capsys) -> None:
    before, file = files(run), tmp_path / "audit.json"
    flags = ["--every-checkpoint", "--success-threshold", "0.1", "--json", str(file)]
    assert cli.run("audit", [str(run), *SHORT, *flags]) == 0
    table_rows = capsys.readouterr().out.splitlines()
    assert table_rows[1].split()[:4] == ["imagined", "true", "wrong", "false"]
    assert [row.split("  ")[0] for row in table_rows[2:]] == ["update 1", "update 2"]
    audits = json.loads(file.read_text())["audits"]
    assert [audit["name"] for audit in audits] == ["update 1", "update 2"]
    assert all(episode["imagined"] for episode in audits[0]["episodes"]), "flags win"
    assert audits[1]["true_success"]["rate"] == 0.0
    assert files(run) == before


def files(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabletop", "--world", "tabletop_true"], "--world tabletop_true is a simulator: nothing"),
        (["tabletop", "--true-decisions", "6"], "--true-decisions leaves nothing of 6 decisions to imagine"),
        (["tabletop", "--every-checkpoint"], "--every-checkpoint needs a run's folder, and tabletop is none"),
        (["tabletop", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
        (["tabletop", "--simulator", "libero_gaol"], "libero_gaol"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(arguments: list[str], message: str, capsys) -> None:
    assert cli.run("audit", arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_names_no_code(tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"world": "evil.module:World@/folder"}))
    assert cli.run("audit", [str(tmp_path)]) == 2
    assert f"{tmp_path} does not say with which world it is audited" in capsys.readouterr().err


def episode(decisions: int, *, imagined: bool, true: bool) -> AuditedEpisode:
    return AuditedEpisode(
        start="s", task="t", decisions=decisions, imagined=imagined, true=true, judged_true=true,
        psnr=(30.0,) * decisions,
    )  # fmt: skip


def test_tables_say_what_was_counted() -> None:
    episodes = [
        episode(1, imagined=True, true=True),
        episode(1, imagined=True, true=False),
        episode(2, imagined=True, true=True),
        episode(2, imagined=False, true=True),
    ]
    whole = table("head", {"mine": episodes})
    assert re.search(r"^false, of imagined successes +33\.3%  \[6\.1%, 79\.2%\]  1/3$", whole, re.MULTILINE)
    assert re.search(r"^missed, of true successes +33\.3% ", whole, re.MULTILINE)
    assert re.search(r"^reward model wrong on the true frames +0\.0% ", whole, re.MULTILINE)
    curve = table("head", {"update 1": episodes, "update 2": episodes[:2]}).splitlines()
    assert curve[2].split()[:6] == ["update", "1", "75.0%", "[", "30%,", "95%]"]
    assert curve[3].endswith(" -")
