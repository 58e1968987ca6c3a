"""Model cards say what a run's files say, and no number besides."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from asyncrl.config.run import TrainConfig, to_json
from asyncrl.errors import CheckpointError
from asyncrl.evaluation import run_checkpoints
from asyncrl.evaluation.run_checkpoints import EvaluatedVersion
from asyncrl.evaluation.success_rate import SuccessRate
from asyncrl.policies.openvla.export import about_run, card
from asyncrl.storage import run_folder
from asyncrl.storage.checkpoint import _write_state
from support.published import CONFIG, run_cli, some_policy

SETTINGS = TrainConfig(updates=40, policy="/home/someone/secret/SFT")
TRUE = "True success, in a simulator"


def measured(version: int, successes: int, episodes: int = 64) -> EvaluatedVersion:
    rate = SuccessRate.of(successes, episodes)
    return EvaluatedVersion(
        version=version,
        time=1.0,
        seconds=2.0,
        simulator="tabletop",
        temperature=1.6,
        successes=successes,
        episodes=episodes,
        success=rate.rate,
        low=rate.low,
        high=rate.high,
        steps=30.5 if successes else 0.0,
        best=True,
    )


def make_run(folder: Path, *rows: EvaluatedVersion, name: str = "update_000040") -> Path:
    """A run's folder with one checkpoint, of version 40; returns the checkpoint."""
    checkpoint = folder / "checkpoints" / name
    some_policy().save(checkpoint)
    progress = {"version": 40, "groups_used": 9, "bad_updates": 0, "bad_in_a_row": 0, "config_hash": ""}
    _write_state(checkpoint, {"progress": progress | {"asyncrl_version": "0.1.0"}}, None)
    (folder / "config.json").write_text(to_json(SETTINGS))
    for row in rows:
        run_checkpoints.append_evaluation(folder, row)
    return checkpoint


def card_of(checkpoint: Path, hub: dict[str, str] | None = None) -> str:
    return card(CONFIG, about_run(checkpoint), title="x", source="run", loading="", hub=hub or {})


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_a_measured_version_has_its_rate_interval_simulator_and_temperature(tmp_path: Path) -> None:
    told = section(card_of(make_run(tmp_path, measured(0, 16), measured(40, 32))), TRUE)
    assert "| **40, this one** | 50.0% | 38.1% to 61.9% | 64 | `tabletop` | 1.6 |" in told
    assert "| 0 | 25.0% | 16.0% to 36.8% |" in told
    assert "**Selected**: the best of 2 measured versions, by these very episodes" in told
    worse = card_of(make_run(tmp_path / "worse", measured(20, 40), measured(40, 32)))
    assert "| 20 | 62.5% |" in worse
    alone = card_of(make_run(tmp_path / "alone", measured(40, 32), name="best"))
    assert "Selected" not in worse + alone, "only the best of several"


@pytest.mark.parametrize("versions", [(), (0, 20, 30, 60, 80)])
def test_of_a_version_that_was_not_measured_no_rate_is_there(tmp_path, versions: tuple[int, ...]) -> None:
    told = section(card_of(make_run(tmp_path, *(measured(version, 20) for version in versions))), TRUE)
    assert "This version was not measured." in told
    assert re.findall(r"^\| (\S+) \| \d", told, re.MULTILINE) == [str(version) for version in versions]
    assert bool(re.search(r"\d%", told)) == bool(versions)


def test_versions_are_the_runs_and_nothing_tells_of_its_owner(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    start = {
        "attempt": 1,
        "command": "asyncrl train --replay.keys /home/someone/keys",
        "host": "rack7",
        "began": "2026-03-01T10:00:00.000+00:00",
        "ended": "2026-03-01T11:00:00.000+00:00",
        "how": "failed: RunError: /home/someone/x",
        "to_update": 40,
        "commit": "0123456789abcdef",
        "dirty": True,
        "python": "3.11.7",
        "versions": {"asyncrl": "0.1.0", "torch": "2.13.0"},
        "devices": ("H100, 80 GB",),
        "ranks": 2,
    }
    (tmp_path / run_folder.PROVENANCE).write_text(json.dumps({"format": 1, "starts": [start]}))
    text = card_of(checkpoint)
    assert "Run with asyncrl 0.1.0, torch 2.13.0; commit 0123456789ab with changes." in text
    for private in ("someone", "secret", "rack7", "--replay.keys"):
        assert private not in text


@pytest.mark.parametrize(
    ("damaged", "content", "said"),
    [
        ("provenance.json", "{", "provenance.json"),
        ("checkpoints/update_000040/state.json", '{"progress": {"version": "many"}}', "which version it is"),
    ],
)
def test_a_damaged_file_of_the_run_is_named(tmp_path: Path, damaged: str, content: str, said: str) -> None:
    checkpoint = make_run(tmp_path, measured(40, 32))
    (tmp_path / damaged).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        card_of(checkpoint)


def test_the_header_is_what_a_hub_reads_and_names_only_what_the_user_named(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    plain = ModelCard(card_of(checkpoint)).data.to_dict()
    assert plain["library_name"] == "transformers"
    assert plain["pipeline_tag"] == "robotics"
    assert {"openvla-oft", "reinforcement-learning", "asyncrl"} <= set(plain["tags"])
    assert not {"license", "base_model", "datasets", "metrics"} & plain.keys()
    told = ModelCard(card_of(checkpoint, hub={"license": "mit", "base_model": "owner/base"})).data.to_dict()
    assert (told["license"], told["base_model"]) == ("mit", "owner/base")


def test_an_export_of_a_run_has_a_card_and_the_run_has_none(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", measured(40, 32))
    out = tmp_path / "out"
    assert run_cli(checkpoint, out, "--license", "mit", "--base-model", "owner/base") == 0
    text = (out / "README.md").read_text()
    assert "license: mit" in text
    assert "from `update_000040`" in text
    assert "| **40, this one** | 50.0% |" in text
    assert "builds the published 7B size only" in text
    assert not list((tmp_path / "run").rglob("README.md"))
    (tmp_path / "run" / run_folder.PROVENANCE).write_text("{")
    assert run_cli(checkpoint, tmp_path / "none") == 2
    assert not (tmp_path / "none").exists(), "a damaged file is found before a weight is written"


def test_a_card_of_something_else_than_a_run_says_that_nothing_is_known(tmp_path: Path) -> None:
    some_policy().save(tmp_path / "policy")
    assert run_cli(tmp_path / "policy", tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "nothing is known here of its training" in text
    assert "No licence is stated here" in text
    assert "## Training" not in text
    assert not re.search(r"\d%", text), "no rate"
    assert "`desk_no_noops`" in text
