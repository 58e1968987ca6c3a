"""Inline runs in a published world: a round, the next world, and a resume that goes on in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.pace import fitter, rounds
from asyncrl.pace.verdicts import Verdicts
from asyncrl.worlds.kinds import is_published
from asyncrl.worlds.start_states import save_start_states
from support.pace_runs import flags, train, worlds_of
from support.published_worlds import SIZE, write_published_world
from support.tiny_models import start_state, write_models

pytestmark = [pytest.mark.render, pytest.mark.slow]
SMALL = {
    "pace.episodes": 8,
    "pace.fresh": 1.0,
    "pace.world-steps": 1,
    "pace.batch": 4,
    "pace.reward-steps": 0,
}


@pytest.mark.timeout(450)
@pytest.mark.parametrize("kind", ["wan", pytest.param("opensora", marks=pytest.mark.long)])
def test_a_run_goes_on_in_a_refit_of_its_published_world(kind: str, tmp_path: Path, monkeypatch) -> None:
    said = write_models(tmp_path)
    world = write_published_world(tmp_path / "published", kind)
    save_start_states(tmp_path / "starts.h5", [start_state(number, SIZE) for number in range(2)])
    wrong = iter((1, 0))

    def verdicts(world: Any, reward: Any, recordings: Any, **rule: Any) -> Verdicts:
        """Audits of random weights say anything: here the refitted world is the better one."""
        judged, solved = recordings.solved(), recordings.solved()
        judged[: next(wrong)] ^= True
        return Verdicts(judged=judged, solved=solved)

    monkeypatch.setattr(fitter, "verdicts", verdicts)
    settings = flags((tmp_path, said), **SMALL, **{"actor.max-decisions": 1, "world": world})
    run = tmp_path / "run"
    train(*settings, "--inline", "--updates", 3, "--run-dir", run)
    (made,) = rounds.read(run)
    assert (made.version, made.accepted, made.world) == (2, True, 1)
    assert is_published(rounds.world_folder(run, 1))
    train("--updates", 4, "--run-dir", run, "--resume")
    drawn = worlds_of(run)
    assert {version for found in drawn.values() for version in found} == {0, 1}
    assert set(drawn[max(drawn)]) == {1}
