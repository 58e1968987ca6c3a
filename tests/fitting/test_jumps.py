"""Windows whose context jumps are what a world sees where an episode begins at a key frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import cli
from asyncrl.commands.fit_world import check_fit_world
from asyncrl.config.algorithm import LoraSettings
from asyncrl.errors import ConfigError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitWorld
from asyncrl.fitting.worlds.interface import WorldOptions
from asyncrl.fitting.worlds.opensora import OpenSoraFit
from asyncrl.fitting.worlds.wan import WanFit
from asyncrl.fitting.worlds.wan_jumps import with_jumps
from asyncrl.fitting.worlds.wan_windows import windows
from asyncrl.records import StartState
from asyncrl.worlds.wan.world import load_world
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import write_models


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder / "world"


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    write_recorded(tmp_path / "data", recorded_spec(64), (33, 9, 25))
    return load_recordings([tmp_path / "data"])


def keyframe(recordings: Recordings, episode: int, decision: int) -> StartState:
    """What `fit keyframes` makes of a decision: the first frame, and the four before the decision."""
    span = recordings.span(episode)
    now = span.start + 8 * decision
    return StartState(
        name="key frame",
        task=recordings.tasks[episode],
        frame=recordings.frames[span.start],
        context_frames=recordings.frames[now - 3 : now + 1],
        context_actions=recordings.actions[now - 3 : now + 1],
    )


def test_a_jump_is_encoded_as_an_episode_that_begins_there_is_opened(
    world: Path, recordings: Recordings
) -> None:
    fit = WanFit(load_world(world))
    cut = windows(recordings, fit.encode(recordings))
    jumped = with_jumps(fit.world.vae, cut, recordings, 1.0, seed=0)
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert len(places) == len(cut) == len(jumped)
    for number, (episode, decision) in enumerate(places):
        latents, actions = (one[0] for one in jumped.take(torch.tensor([number])))
        assert actions.equal(cut.actions[number])
        if decision == 0:
            assert jumped.rows[number].equal(cut.rows[number]), "an episode's first decision follows on it"
            continue
        state = fit.world.open_slots([keyframe(recordings, episode, decision)])
        torch.testing.assert_close(latents[:, :1], state.anchor[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(latents[:, 1:2], state.memory[0], rtol=1e-4, atol=1e-4)
        apart = (latents[:, 1] - cut.take(torch.tensor([number]))[0][0][:, 1]).abs().max()
        assert apart > 1e-3, "the memory of a whole episode is another one"


def test_a_share_of_the_windows_jumps(world: Path, tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(64), (81,) * 6)
    recordings = load_recordings([tmp_path])
    fit = WanFit(load_world(world))
    cut = windows(recordings, fit.encode(recordings))
    jumped = with_jumps(fit.world.vae, cut, recordings, 0.5, seed=3)
    count = int((jumped.rows[:, 1] != cut.rows[:, 1]).sum())
    assert 0.3 * 54 < count < 0.7 * 54
    again = with_jumps(fit.world.vae, cut, recordings, 0.5, seed=3)
    np.testing.assert_array_equal(jumped.rows.numpy(), again.rows.numpy())
    assert with_jumps(fit.world.vae, cut, recordings, 0.0, seed=3) is cut


def test_a_world_is_refined_with_jumps_and_its_own_memories(
    world: Path, recordings: Recordings, tmp_path: Path, capsys
) -> None:
    command = [
        "world",
        "--data",
        str(tmp_path / "data"),
        "--refine",
        str(world),
        "--steps",
        "2",
        "--batch",
        "4",
    ]
    more = ["--jumps", "0.5", "--own-memory", "0.5", "--device", "cpu"]
    assert cli.run("fit", [*command, *more, "--out", str(tmp_path / "new")]) == 0
    assert "velocity error" in capsys.readouterr().out
    assert load_world(tmp_path / "new").image_size == 64


def test_what_cannot_be_done_is_refused(world: Path, recordings: Recordings, tmp_path: Path) -> None:
    where: Any = {"data": (tmp_path / "data",), "out": tmp_path / "new"}
    with pytest.raises(ConfigError, match=r"own-memory is 0\.5, but a fresh world draws noise"):
        FitWorld(**where, own_memory=0.5)
    fine = FitWorld(**where, refine=str(world), lora=LoraSettings(rank=2), jumps=0.5)
    with pytest.raises(ConfigError, match="is trained on whole episodes as recorded"):
        check_fit_world(fine)
    for option in ("jumps", "own_memory"):
        options = WorldOptions(**{option: 0.5})
        with pytest.raises(ConfigError, match="means nothing to a world of kind opensora"):
            OpenSoraFit.fresh("tiny", "tiny", recordings, options)
