"""Whole runs with --guard.kind second: what is stored is what imagining the successes again says."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import cli
from asyncrl.actors.imagination import Imagination
from asyncrl.commands.replay_imagine import _start_of
from asyncrl.config.loading import load_file, parse
from asyncrl.errors import ConfigError
from asyncrl.evaluation.stored_groups import imagine_again
from asyncrl.launch.build_actor import build_imagination
from asyncrl.launch.environment import build_world_model, check_environment
from asyncrl.launch.idle_offload import actor_offload
from asyncrl.launch.policies import build_policy
from asyncrl.launch.second_world import check_second_world, load_second_world
from asyncrl.observability import metrics_guard as m
from asyncrl.records import Episode
from asyncrl.replay.files.reader import read_group
from asyncrl.replay_tools.episodes import replay_folder
from asyncrl.rewards.success_rule import deciding_step
from asyncrl.seeds import noise_seed, repetition_seed
from asyncrl.storage.asset_paths import world_folder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, save_world
from support.accepted_worlds import accept
from support.join_site import Site
from support.published_worlds import EXPORTS, small_world
from support.tiny_models import SIZE, WORLDS, write_models
from support.whole_runs import exit_code, rows

SLOTS = 4
CPU = torch.device("cpu")
SHIPPED = {
    "actor.slots": SLOTS,
    "actor.max-decisions": 4,
    "algorithm.group-size": 4,
    "algorithm.groups-per-update": 2,
    "algorithm.micro-batch": 8,
    "replay.max-lag": 0,
}


def flags(settings: dict[str, Any]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def guarded(run: Path, *more: str) -> None:
    """Two updates in one process."""
    arguments = ["--inline", "--updates", "2", "--imagination.fixed-shape", "--device", "cpu"]
    arguments += ["--guard.kind", "second", "--run-dir", str(run), *more]
    assert cli.run("train", arguments) == 0


def stored_groups(run: Path) -> list[list[Episode]]:
    return [read_group(path) for path in sorted(replay_folder(run).glob("group-*.h5"))]


def again(episode: Episode) -> Episode:
    """The same actions with the noise of the repetition."""
    seeds = [noise_seed(repetition_seed(episode.seed), n) for n in range(len(episode.actions))]
    return replace(episode, noise_seeds=np.array(seeds))


def check_weights(run: Path) -> set[tuple[bool, float]]:
    """Imagine every stored episode again, and compare its weight; returns outcomes and weights."""
    config = load_file(run / "config.json")
    environment = build_world_model(config, CPU)
    world = environment.world
    if config.guard.world:
        world = load_second_world(config, world, environment.starts[0])
    seen = set()
    for group in stored_groups(run):
        start = _start_of(group, environment.starts)
        found = imagine_again(
            lambda version: (world, environment.reward), start, [again(e) for e in group], rows=SLOTS
        )
        for episode, repeated in zip(group, found, strict=True):
            solved = deciding_step(np.stack(repeated.scores), config.actor.success_threshold, 1)
            expected = float(solved is not None) if episode.success else 1.0
            assert episode.weight == expected, (episode.group_id, episode.member)
            assert episode.world_versions is not None
            seen.add((episode.success, episode.weight))
    return seen


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the shipped world. At this threshold not every success is one again."""
    run = tmp_path_factory.mktemp("shipped") / "run"
    guarded(run, *flags(SHIPPED | {"actor.success-threshold": 0.9}))
    return run


@pytest.mark.timeout(300)
def test_in_the_shipped_world_every_weight_is_what_the_second_draw_says(shipped: Path) -> None:
    assert check_weights(shipped) == {(False, 1.0), (True, 1.0), (True, 0.0)}, "else this shows too little"
    groups = stored_groups(shipped)
    for version, row in enumerate(rows(shipped)):
        used = [one for group in groups for one in group if one.policy_versions[0] == version]
        assert len(used) == 8
        assert row[m.WEIGHT_MEAN.name] == pytest.approx(np.mean([one.weight for one in used]))
        successes = [one.weight for one in used if one.success]
        assert row[m.DISAGREE.name] == pytest.approx(1 - np.mean(successes))


def imagined(run: Path, number: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[list[str]], str]:
    """What `replay imagine` returns, the cells of its table, and what it says."""
    capsys.readouterr()
    code = cli.run("replay", ["imagine", str(run), str(number), "--device", "cpu"])
    said = capsys.readouterr().out
    lines = said.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("member"))
    size = len(stored_groups(run)[number])
    cells = [re.split(r"  +", line.strip()) for line in lines[head : head + 1 + size]]
    return code, cells, said


@pytest.mark.timeout(300)
def test_a_group_imagined_again_shows_that_every_weight_is_right(shipped: Path, capsys) -> None:
    seen = set()
    for number, group in enumerate(stored_groups(shipped)):
        code, (titles, *cells), said = imagined(shipped, number, capsys)
        assert code == 0, said
        assert {row[-1] for row in cells} == {"equal"}
        if not any(one.success for one in group):
            assert "weight" not in said
            continue
        assert titles[-2:] == ["weight", "verdict"]
        expected = [f"{one.weight:g}" if one.success else "-" for one in group]
        assert [row[-2] for row in cells] == expected
        successes = sum(one.success for one in group)
        assert f"weights: {successes} successes repeated by the same world with other noise\n" in said
        seen |= set(expected)
    assert seen == {"0", "1", "-"}, "else this shows too little"


@pytest.mark.timeout(300)
def test_a_weight_that_is_wrong_is_found_unless_a_later_world_may_have_given_it(
    shipped: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, group = next(
        (n, group) for n, group in enumerate(stored_groups(shipped)) if any(one.success for one in group)
    )
    wrong = [replace(one, weight=1 - one.weight) if one.success else one for one in group]
    monkeypatch.setattr("asyncrl.commands.replay_imagine.find_group", lambda *_: wrong)
    code, (_, *cells), said = imagined(shipped, number, capsys)
    assert code == 1, said
    for one, row in zip(wrong, cells, strict=True):
        told = [f"{one.weight:g}, again {1 - one.weight:g}", "differs"]
        assert row[-2:] == (told if one.success else ["-", "equal"])
    run = tmp_path / "run"
    shutil.copytree(shipped, run)
    accept(run, world_folder("tabletop"), 1)
    code, (titles, *_), said = imagined(run, number, capsys)
    successes = sum(one.success for one in group)
    assert code == 0, said
    assert titles[-2] == "log-probs", "there is no column of weights"
    assert f"; of {successes} it is not known, as a later world" in said


def test_replay_tools_know_the_weights(shipped: Path, capsys) -> None:
    stored = [one for group in stored_groups(shipped) for one in group]
    assert cli.run("replay", ["list", str(shipped), "--json"]) == 0
    listed = {row["episode_id"]: row["weight"] for row in json.loads(capsys.readouterr().out)}
    assert listed == {one.episode_id: one.weight for one in stored}
    assert cli.run("replay", ["list", str(shipped)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("group was  weight")
    one = next(one for one in stored if not one.weight)
    assert cli.run("replay", ["show", str(shipped), one.episode_id]) == 0
    assert re.search(r"^weight +0\.0$", capsys.readouterr().out, re.MULTILINE)
    assert cli.run("replay", ["stats", str(shipped)]) == 0
    mean = np.mean([one.weight for one in stored])
    assert f"of a weight of {mean:.2f}," in capsys.readouterr().out


# ---- a second world ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world of other weights throughout, the autoencoder's too, whose frames have harder contrasts."""
    folder = tmp_path_factory.mktemp("other") / "world"
    torch.manual_seed(1)
    vae = WanVae(VaeConfig.tiny())
    with torch.no_grad():
        for name, weights in vae.named_parameters():
            weights.mul_(5 if "decoder" in name else 1)
    save_world(folder, WanWorld(ActionWanTransformer(TransformerConfig.tiny()), vae, image_size=SIZE))
    return folder


def test_a_second_world_draws_what_is_imagined_again(models, other: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*models[1], "--actor.success-threshold", "0.5", "--actor.max-decisions", "2"]
    guarded(run, *settings, "--guard.world", str(other), "--replay.max-lag", "2")
    plain = tmp_path / "plain"
    guarded(plain, *settings, "--replay.max-lag", "2")
    assert (True, 0.0) in check_weights(run)
    assert (True, 0.0) not in check_weights(plain), "the first world agrees with itself there"
    for ours, theirs in zip(stored_groups(run)[0], stored_groups(plain)[0], strict=True):
        np.testing.assert_array_equal(
            ours.success_scores, theirs.success_scores, "the originals are the same"
        )


def built(models: tuple[Path, list[str]], *more: str) -> Imagination[Any]:
    config = parse([*models[1], "--guard.kind", "second", *more])
    policy, environment = build_policy(config, CPU), build_world_model(config, CPU)
    return build_imagination(config, policy, environment)


def test_parking_an_actor_parks_both_worlds(models, other: Path) -> None:
    acting = built(models, "--guard.world", str(other), "--actor.offload")
    assert acting.second is not None
    weights = [
        tensor
        for world in (acting.world, acting.second)
        for module in world.modules().values()
        for tensor in module.parameters()
    ]
    before = [tensor.detach().clone() for tensor in weights]
    config = parse([*models[1], "--guard.kind", "second", "--guard.world", str(other), "--actor.offload"])
    parked = actor_offload(config, acting)._tensors
    assert parked is not None
    parked.offload()
    assert {tensor.untyped_storage().nbytes() for tensor in weights} == {0}
    parked.restore()
    assert all(tensor.equal(then) for tensor, then in zip(weights, before, strict=True))


def test_a_second_world_counts_among_the_bytes_of_the_models(models, other: Path) -> None:
    one = check_environment(parse(models[1]))
    two = check_environment(parse([*models[1], "--guard.kind", "second", "--guard.world", str(other)]))
    weights = sum(x.numel() for x in built(models).world.modules()["transformer"].parameters())
    assert two.nbytes - one.nbytes > 4 * weights


# ---- what is refused -----------------------------------------------------------------------------


def write_world(folder: Path, *, image_size: int = SIZE, action_dim: int = 7, **vae: Any) -> Path:
    transformer = ActionWanTransformer(replace(TransformerConfig.tiny(), action_dim=action_dim))
    world = WanWorld(transformer, WanVae(replace(VaeConfig.tiny(), **vae)), image_size=image_size)
    save_world(folder, world)
    return folder


def opensora(folder: Path) -> Path:
    WORLDS["opensora"](folder)
    return folder


UNLIKE = {
    "no folder": (lambda folder: folder, "is no folder"),
    "an empty folder": (lambda folder: folder.mkdir() or folder, "holds no world"),
    "another kind": (opensora, "is a OpenSoraWorld, but --world"),
    "other pictures": (lambda folder: write_world(folder, image_size=32), "side are 32 there, and 64 here"),
    "other actions": (lambda folder: write_world(folder, action_dim=6), "action are 6 there, and 7 here"),
    "another memory": (
        lambda folder: write_world(folder, decoder_base_dim=2 * VaeConfig.tiny().decoder_base_dim),
        r"bytes that it remembers of a slot are \d+ there",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_world_that_cannot_draw_beside_the_first_one_is_refused(models, tmp_path: Path, what: str) -> None:
    make, said = UNLIKE[what]
    folder = make(tmp_path / "other")
    config = parse([*models[1], "--guard.kind", "second", "--guard.world", str(folder)])
    with pytest.raises(ConfigError, match=rf"^--guard\.world .*{said}"):
        check_second_world(config)


def test_a_published_world_draws_beside_one_of_ours_in_one_precision(models, tmp_path: Path) -> None:
    """What a Wan world's autoencoder remembers of a slot has the type of its weights."""
    save_world(tmp_path / "ours", small_world())
    EXPORTS["wan"](tmp_path / "published")
    arguments = [*models[1], "--world", str(tmp_path / "published"), "--imagination.context", "latents"]
    arguments += ["--guard.kind", "second", "--guard.world", str(tmp_path / "ours")]
    with pytest.raises(ConfigError, match="bytes that it remembers of a slot are"):
        check_second_world(parse(arguments))
    assert check_second_world(parse([*arguments, "--imagination.precision", "bf16"])).image_size == 256


def test_a_run_is_refused_before_anything_is_made(models, tmp_path: Path, capsys) -> None:
    run, other = tmp_path / "run", write_world(tmp_path / "other", image_size=32)
    more = ["--inline", "--run-dir", str(run), "--guard.kind", "second", "--guard.world", str(other)]
    assert exit_code([*models[1], *more]) == 2
    assert "--guard.world" in capsys.readouterr().err
    assert not run.exists()


def test_states_that_do_not_go_together_are_found_when_the_worlds_are_loaded(models, tmp_path: Path) -> None:
    """Where a class does not say what it remembers, it is tried."""
    wide = write_world(tmp_path / "wide", decoder_base_dim=2 * VaeConfig.tiny().decoder_base_dim)
    first = built(models).world
    environment = build_world_model(parse(models[1]), CPU)
    config = parse([*models[1], "--guard.kind", "second", "--guard.world", str(wide)])
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(WanWorld, "slot_bytes")
        check_second_world(config)
        with pytest.raises(ConfigError, match="remembers something else of a slot than --world"):
            load_second_world(config, first, environment.starts[0])


# ---- from other hosts ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_an_actor_that_joins_imagines_again_in_its_own_copy_of_the_second_world(
    models, other: Path, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    shutil.copytree(other, there)
    settings = [*models[1], "--actor.success-threshold", "0.5", "--imagination.fixed-shape"]
    site = Site(tmp_path, [*settings, "--guard.kind", "second", "--guard.world", str(there)])
    try:
        site.train.until("for actors to join")
        shutil.move(there, here)
        site.actor("far", "--guard-world", str(here))
        site.progress(2)
    finally:
        for program in site.programs:
            program.process.terminate()
            program.process.wait(60)
    shutil.move(here, there)
    assert {success for success, _ in check_weights(site.run)} >= {True}
