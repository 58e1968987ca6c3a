"""`asyncrl train` as a user meets it: whole runs with random tiny models, and what it answers to mistakes."""

import itertools
import sys
from dataclasses import replace

import pytest

from asyncrl import cli
from asyncrl.config.run import TrainConfig, load_file, parse
from asyncrl.doctor.checks import Examination, Verdict
from asyncrl.doctor.models import check_models
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import REGISTRY
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.simulators.tabletop.simulator import Tabletop
from asyncrl.storage import checkpoint
from asyncrl.storage.run_folder import read_starts
from support.event_files import curves_in
from support.tiny_models import GROUP_SIZE
from support.whole_runs import ROOT, Program, rows


@pytest.mark.timeout(60)
def test_an_inline_run_leaves_a_checkpoint_a_log_and_a_readable_replay(flags, tmp_path, capsys, monkeypatch):
    """Its checkpoint is as large as the doctor says, and its log and its provenance have what was done."""

    def step(simulator: Tabletop, action: object) -> None:
        raise AssertionError("training steps no simulator")

    monkeypatch.setattr(Tabletop, "step", step)
    run = tmp_path / "run"
    # Random reward models answer near one half, so that at this threshold some episodes succeed.
    more = ["--inline", "--updates", "2", "--run-dir", str(run), "--actor.success-threshold", "0.5"]

    assert cli.run("train", [*flags, *more]) == 0

    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest == run / "checkpoints" / "update_000002"
    checkpoint.verify(newest)
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert set(rows(run)[0]) - {"step", "time"} <= set(REGISTRY)
    assert {m.SUCCESS_ONCE.name, r.LAG_MAX.name, m.GRAD_NORM.name} <= set(rows(run)[0])
    episodes = list(read_rows(replay_folder(run)))
    assert len(episodes) >= 2 * GROUP_SIZE
    examination = Examination(config=parse([*flags, *more]))
    assert check_models(examination).verdict is Verdict.OK
    assert examination.sizes is not None
    written = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    assert examination.sizes.checkpoint == pytest.approx(written, rel=0.05)
    (start,) = read_starts(run)
    assert (start["attempt"], start["from_update"]) == (1, 0)
    curves, first = curves_in(run / "tensorboard"), rows(run)[0]
    never = {name for name in first if not name.startswith("env/") and not any(r[name] for r in rows(run))}
    assert "replay/dropped_invalid" in never
    assert not never & curves.keys()
    succeeded = [row["env/success_once"] for row in rows(run)]
    assert [value for _, value in curves["Success/imagined"]] == succeeded
    said = capsys.readouterr().out
    assert "1 process (inline)" in said
    assert f"asyncrl evaluate {run}\n" in said


@pytest.mark.parametrize(
    ("kind", "said"),
    [("grpo", "no group had both outcomes"), ("ppo", "all episodes returned 0, so none was")],
)
def test_a_run_in_which_nothing_succeeds_says_that_it_learned_nothing(
    kind, said, flags, tmp_path, capsys
) -> None:
    more = ["--inline", "--updates", "2", "--run-dir", str(tmp_path / "run"), "--algorithm.kind", kind]
    assert cli.run("train", [*flags, *more, "--actor.success-threshold", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row, line = next((a, b) for a, b in itertools.pairwise(lines) if b.startswith("update 1: "))
    assert row.split()[:2] == ["1", "0.0%"], "the line follows its row"
    assert line.startswith(f"update 1: {said}")
    assert "--algorithm.temperature" in line
    assert not any(line.startswith("update 2:") for line in lines), "once is enough until the next header"
    assert any(f"from:  in 2 of 2 updates {said}" in line for line in lines), "the end says it again"


def test_help_answers_without_loading_torch(tmp_path):
    program = (
        "import sys; from asyncrl import cli\n"
        "try: cli.run('train', ['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    said = Program(tmp_path, "said", [sys.executable, "-c", program]).ends()
    assert "usage: asyncrl train" in said


def test_every_shipped_configuration_says_what_it_is_for_and_those_of_tabletop_show_the_defaults():
    folder, plain = ROOT / "configs", TrainConfig()
    assert all(file.read_text().startswith("# ") for file in folder.glob("*.toml"))
    assert load_file(folder / "tabletop.toml") == plain
    for kind, starts in (("opensora", "tabletop"), ("evac", "tabletop_evac")):
        other = replace(plain, world=f"tabletop_{kind}", start_states=starts)
        assert load_file(folder / f"tabletop_{kind}.toml") == other
