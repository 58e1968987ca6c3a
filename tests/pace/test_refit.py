"""Refits: which episodes are fitted and which decide, what changes in a world and what never does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.imagination import ImaginationSettings
from asyncrl.config.pace import PaceSettings
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.fitting.fit_reward import shows_both
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import chosen
from asyncrl.fitting.worlds.wan import WanFit
from asyncrl.fitting.worlds.wan_memory import with_own_memories
from asyncrl.fitting.worlds.wan_windows import windows
from asyncrl.pace.refit import Refit, check_refittable, load_round, refit, to_redraw
from asyncrl.rewards.model import load_reward
from asyncrl.seeds import recorded_noise_seed
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.wan.state import WanState
from asyncrl.worlds.wan.world import WanWorld, load_world
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import write_models

CPU = torch.device("cpu")
SPEC = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0)


def settings(**changes: Any) -> PaceSettings:
    return PaceSettings(**{"every": 2, "world_steps": 2, "reward_steps": 2, "batch": 4} | changes)


# ---- which episodes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two rounds of 4 and 8 episodes, and 3 files of 5 old ones; lengths tell where one is from."""
    root = tmp_path_factory.mktemp("episodes")
    write_recorded(root / "first", SPEC, (10,) * 4)
    write_recorded(root / "second", SPEC, (11,) * 4, part=0)
    write_recorded(root / "second", SPEC, (11,) * 4, part=1)
    for part in range(3):
        write_recorded(root / "base", SPEC, (12,) * 5, part=part)
    return [root / "first", root / "second", root / "base"]


def lengths(recordings: Any) -> list[int]:
    return np.diff(recordings.offsets).tolist()


def test_what_is_held_out_is_of_the_newest_round_and_is_not_fitted(folders: list[Path]) -> None:
    data = load_round(folders[:2], settings(held_out=0.25, fresh=1.0), seed=3)
    assert lengths(data.audited) == [11] * 2
    assert lengths(data.fitted) == [10] * 4 + [11] * 6
    # By hand: the newest round's episodes, of which those held out are missing among the fitted ones.
    newest = load_recordings(folders[1:2])
    shown = [newest.frames[newest.span(number)].tobytes() for number in range(8)]

    def places(some: Any) -> list[int]:
        spans = (some.frames[some.span(number)].tobytes() for number in range(len(some)))
        return [shown.index(one) for one in spans if one in shown]

    assert sorted(places(data.audited) + places(data.fitted)) == sorted(map(shown.index, shown))
    again = load_round(folders[:2], settings(held_out=0.25, fresh=1.0), seed=3)
    np.testing.assert_array_equal(data.audited.frames[:], again.audited.frames[:])


@pytest.mark.parametrize(("fresh", "old"), [(1.0, 0), (0.5, 10), (0.8, 2), (0.1, 15)])
def test_old_episodes_make_up_the_rest_as_far_as_there_are_some(
    folders: list[Path], fresh: float, old: int
) -> None:
    chosen = settings(held_out=0.25, fresh=fresh, base=(str(folders[2]),))
    assert lengths(load_round(folders[:2], chosen, seed=0).fitted).count(12) == old


def test_one_episode_is_held_out_at_least_and_one_is_fitted(folders: list[Path]) -> None:
    for share, audited in ((0.01, 1), (0.99, 3)):
        data = load_round(folders[:1], settings(held_out=share, fresh=1.0), seed=0)
        assert (len(data.audited), len(data.fitted)) == (audited, 4 - audited)


# ---- what changes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder / "world"


def tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def made(present: Path, out: Path, *, version: int = 1) -> Refit:
    return Refit(present=present, reward=present, out=out, version=version, device=CPU, seed=1)


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor.float(), other[name].float())]


@pytest.mark.parametrize(("world_steps", "reward_steps"), [(2, 2), (2, 0), (0, 2)])
def test_a_refit_changes_what_it_is_told_to_and_never_the_autoencoder(
    present: Path, folders: list[Path], tmp_path: Path, world_steps: int, reward_steps: int
) -> None:
    told = settings(world_steps=world_steps, reward_steps=reward_steps)
    refit(made(present, tmp_path / "new", version=7), load_recordings([folders[1]]), told)
    new = load_world(tmp_path / "new")
    assert (new.version, new.image_size) == (7, 64)
    assert WanWorld.check(tmp_path / "new", ImaginationSettings()).version == 7
    load_reward(tmp_path / "new", tasks=list(TASKS))
    rounded = {k: v.bfloat16() for k, v in tensors(present, "transformer.safetensors").items()}
    after = tensors(tmp_path / "new", "transformer.safetensors")
    assert bool(changed({k: v.bfloat16() for k, v in after.items()}, rounded)) is bool(world_steps)
    assert (tmp_path / "new" / "vae.safetensors").read_bytes() == (present / "vae.safetensors").read_bytes()
    judges = (tensors(folder, "reward.safetensors") for folder in (present, tmp_path / "new"))
    assert bool(changed(*judges)) is bool(reward_steps)


def test_the_same_round_gives_the_same_world(present: Path, folders: list[Path], tmp_path: Path) -> None:
    """Whether both models are refitted at once or one after the other."""
    for name, at_once in (("one", False), ("two", False), ("three", True)):
        fitted = load_round([folders[1]], settings(fresh=1.0), seed=0).fitted
        made_now = replace(made(present, tmp_path / name), at_once=at_once)
        refit(made_now, fitted, settings(own_memory=0.5, world_steps=6, reward_steps=6))
        torch.rand(3)  # The state that others leave does not matter.
    for file in ("transformer.safetensors", "reward.safetensors"):
        one = tensors(tmp_path / "one", file)
        assert changed(one, tensors(tmp_path / "two", file)) == []
        assert changed(one, tensors(tmp_path / "three", file)) == []


def test_a_reward_model_stays_where_no_episode_shows_success(present: Path, tmp_path: Path, caplog) -> None:
    write_recorded(tmp_path / "data", SPEC, (11, 11, 11))
    never = chosen(load_recordings([tmp_path / "data"]), [0, 2])
    assert not never.success.any()
    refit(made(present, tmp_path / "new"), never, settings())
    refit(replace(made(present, tmp_path / "as it was"), at_once=True), never, settings(world_steps=0))
    assert "all of the round's episodes end alike" in caplog.text
    for folder in (tmp_path / "new", tmp_path / "as it was"):
        assert changed(tensors(present, "reward.safetensors"), tensors(folder, "reward.safetensors")) == []
    networks = (tensors(folder, "transformer.safetensors") for folder in (present, tmp_path / "as it was"))
    assert changed(*networks) == []


def test_a_folder_without_a_world_is_not_refitted(present: Path, tmp_path: Path) -> None:
    check_refittable(present, present, settings())
    with pytest.raises(CheckpointError, match="no world model that is known here"):
        check_refittable(tmp_path, present, settings())


@pytest.mark.parametrize("kind", ["opensora", "evac"])
def test_worlds_of_other_kinds_are_refitted_with_what_they_can_be_told(kind: str, tmp_path: Path) -> None:
    """Noise on the memory, which has a value that is not the fits' own, means nothing to them."""
    write_models(tmp_path, kind)
    world = tmp_path / "world"
    spec = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0, poses=True)
    write_recorded(tmp_path / "data", spec, (9, 9))
    check_refittable(world, world, settings())
    refit(made(world, tmp_path / "new", version=3), load_recordings([tmp_path / "data"]), settings())
    beside = replace(made(world, tmp_path / "beside", version=3), at_once=True)
    refit(beside, load_recordings([tmp_path / "data"]), settings())
    for file in sorted(path.name for path in (tmp_path / "new").glob("*.safetensors")):
        assert changed(tensors(tmp_path / "new", file), tensors(tmp_path / "beside", file)) == []
    for name in ("vae", "autoencoder", "image_encoder"):
        if (file := world / f"{name}.safetensors").is_file():
            assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes()
    network = "unet.safetensors" if kind == "evac" else "transformer.safetensors"
    before, after = tensors(world, network), tensors(tmp_path / "new", network)
    assert any(not after[name].equal(before[name].to(after[name].dtype)) for name in after)
    with pytest.raises(ConfigError, match=rf"--pace\.own-memory 0\.5.* of kind {kind}"):
        check_refittable(world, world, settings(own_memory=0.5))


# ---- own memories --------------------------------------------------------------------------------


def test_own_memories_are_what_the_world_draws_from_its_own_memories(present: Path, tmp_path: Path) -> None:
    write_recorded(tmp_path, SPEC, (25, 9, 33))
    recordings = load_recordings([tmp_path])
    fit = WanFit(load_world(present))
    cut = windows(recordings, fit.encode(recordings))
    mixed = with_own_memories(fit.world, cut, 1.0, seed=5)
    firsts = [0, 3, 4]
    assert [n for n in range(len(cut)) if mixed.rows[n].equal(cut.rows[n])] == firsts
    assert mixed.rows[:, [0, 2, 3]].equal(cut.rows[:, [0, 2, 3]]), "the truth stays the target"
    # By hand: one episode, one decision after the other, with the noise of the same seeds.
    memory = cut.latents[cut.rows[4, 1]][None, :, None]
    for decision in range(3):
        window = cut.actions[4 + decision][None]
        state = WanState(
            anchor=cut.latents[cut.rows[4, 0]][None, :, None],
            memory=memory,
            last_actions=window[:, 1:5],
            finite=torch.ones(1, dtype=torch.bool),
            cache=[],
            encoder_cache=[],
        )
        memory = fit.world.denoise(state, window[:, 5:], [recorded_noise_seed(5, 4, decision)])[:, :, -1:]
        drawn = mixed.latents[mixed.rows[5 + decision, 1]]
        torch.testing.assert_close(drawn, memory[0, :, 0], rtol=1e-4, atol=1e-4)


def test_a_share_of_the_memories_is_replaced(present: Path, tmp_path: Path) -> None:
    write_recorded(tmp_path, SPEC, (81,) * 8)
    recordings = load_recordings([tmp_path])
    fit = WanFit(load_world(present))
    cut = windows(recordings, fit.encode(recordings))
    mixed = with_own_memories(fit.world, cut, 0.5, seed=0)
    replaced = (mixed.rows[:, 1] != cut.rows[:, 1]).view(8, 10).sum(1).tolist()
    assert sorted(replaced) == [0] * 4 + [9] * 4, "whole episodes, each but for its first decision"
    other = with_own_memories(fit.world, cut, 0.5, seed=1)
    assert not torch.equal(other.rows, mixed.rows)


@pytest.mark.parametrize(("share", "replaced"), [(0.0, 0), (0.1, 3), (0.5, 6), (0.99, 12), (1.0, 12)])
def test_the_share_is_met_as_nearly_as_whole_episodes_can(
    present: Path, tmp_path: Path, share: float, replaced: int
) -> None:
    """12 windows may be replaced: of three episodes of 4, 5 and 6 decisions, those behind the first ones."""
    write_recorded(tmp_path, SPEC, (33, 41, 49))
    recordings = load_recordings([tmp_path])
    fit = WanFit(load_world(present))
    cut = windows(recordings, fit.encode(recordings))
    for seed in range(4):
        mixed = with_own_memories(fit.world, cut, share, seed=seed)
        found = (mixed.rows[:, 1] != cut.rows[:, 1]).sum().item()
        assert abs(found - share * 12) <= 2.5, "half of the longest episode"
        if share in (0.0, 1.0):
            assert found == replaced


# ---- frames that are drawn -----------------------------------------------------------------------


@pytest.mark.parametrize("looks", [1, 10, 11, 30, 10_000])
def test_no_more_episodes_are_redrawn_than_have_the_solved_frames_that_are_looked_at(
    tmp_path: Path, looks: int
) -> None:
    """Every second of 8 episodes is solved in 5 of its 20 frames; half of the looks are at such."""
    write_recorded(tmp_path, SPEC, (20,) * 8)
    recordings = load_recordings([tmp_path])
    solved = recordings.solved()
    assert solved.sum() == 4
    for seed in range(8):
        expected: set[int] = set()
        for number in np.random.default_rng(seed).permutation(8).tolist():
            expected.add(number)
            wins = sum(bool(solved[number]) for number in expected)
            if wins and 5 * wins >= looks // 2:  # Before the end a solved episode shows it unsolved.
                break
        part = to_redraw(recordings, looks, seed)
        assert part.seeds.tolist() == [recordings.seeds[number] for number in sorted(expected)]
        assert shows_both(part)


def test_all_episodes_are_redrawn_in_their_order_where_a_fit_looks_at_all(tmp_path: Path) -> None:
    write_recorded(tmp_path, SPEC, (9, 17, 12))
    recordings = load_recordings([tmp_path])
    part = to_redraw(recordings, 10_000, seed=0)
    np.testing.assert_array_equal(part.frames[:], recordings.frames[:])
    np.testing.assert_array_equal(part.offsets, recordings.offsets)
    some = to_redraw(chosen(recordings, [1, 2]), 10_000, seed=0)  # As of a round, of which some are held out.
    np.testing.assert_array_equal(some.frames[:], recordings.frames[9:])
    np.testing.assert_array_equal(some.success, recordings.success[9:])
    assert some.frames[[0, 17]].tolist() == recordings.frames[[9, 26]].tolist()
