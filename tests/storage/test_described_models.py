"""Ranges, statistics and sizes in models' files: one check at every door, for values that JSON allows."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import AsyncRLError
from asyncrl.fitting.fit_models import action_statistics, tokens_of
from asyncrl.policies.action_tokens import NormStats, decode, unnormalise
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import PublishedOptions, open_folder
from asyncrl.rewards.resnet import open_reward
from asyncrl.worlds.evac import files as evac
from asyncrl.worlds.opensora import files as opensora
from asyncrl.worlds.wan import files as wan
from support.recorded import recordings_of
from support.tiny_models import small_policy, write_models

LOW, HIGH = [-0.5] * 7, [0.5] * 7
GOOD = {"q01": LOW, "q99": HIGH}
STATISTICS: dict[str, dict[str, Any]] = {
    "q99 of six": {"q01": LOW, "q99": HIGH[:6]},
    "q99 of one": {"q01": LOW, "q99": HIGH[:1]},
    "six numbers": {"q01": LOW[:6], "q99": HIGH[:6]},
    "no q99": {"q01": LOW},
    "q99 null": {"q01": LOW, "q99": None},
    "mirrored": {"q01": HIGH, "q99": LOW},
    "one mirrored": {"q01": [*LOW[:6], 0.6], "q99": HIGH},
    "one that stands still": {"q01": [0.5, *LOW[1:]], "q99": HIGH},
    "one that nearly stands still": {"q01": [0.5 - 1e-12, *LOW[1:]], "q99": HIGH},
    "texts": {"q01": list(map(str, LOW)), "q99": HIGH},
    "one text": {"q01": LOW, "q99": "0000000"},
    "bools": {"q01": [False] * 7, "q99": [True] * 7},
    "beyond 32 bits": {"q01": LOW, "q99": [1e200] * 7},
    "mask of six": GOOD | {"mask": [True] * 6},
    "mask of one": GOOD | {"mask": [False]},
    "mask of texts": GOOD | {"mask": ["False"] * 7},
    "mask of 0 and 1": GOOD | {"mask": [1] * 6 + [0]},
    "mask of nothing": GOOD | {"mask": [None] * 7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("described")
    for kind in ("wan", "opensora", "evac"):
        write_models(made / kind, kind)
    small_policy(norm_key="x", norm_stats={"x": NormStats.from_json(GOOD)}).save(made / "scaled")
    return made


def changed(file: Path, change: Callable[[dict[str, Any]], object], door: Callable[[Path], object]) -> None:
    """Go through a door with a changed file, which is put back."""
    before = file.read_text()
    content = json.loads(before)
    change(content)
    file.write_text(json.dumps(content))
    try:
        door(file.parent)
    finally:
        file.write_text(before)


def of_config(folder: Path, stats: dict[str, Any]) -> None:
    (folder / "scaled" / "dataset_statistics.json").unlink(missing_ok=True)
    entry = {"x": {"action": stats}}
    changed(folder / "scaled" / "config.json", lambda config: config.update(norm_stats=entry), open_folder)


def of_statistics(folder: Path, stats: dict[str, Any]) -> None:
    (folder / "scaled" / "dataset_statistics.json").write_text(json.dumps({"x": {"action": stats}}))
    open_folder(folder / "scaled")


def of_proprio(_: Path, stats: dict[str, Any]) -> None:
    try:
        found = NormStats.from_published({"action": GOOD, "proprio": stats})
    except ValueError as error:  # As `open_folder` refuses it.
        raise AsyncRLError(str(error)) from error
    OpenVLAOFTConfig.tiny(proprio_dim=7, norm_key="x", norm_stats={"x": found})


def of_opensora(folder: Path, stats: dict[str, Any]) -> None:
    (folder / "dataset_statistics.json").write_text(json.dumps({"x": {"action": stats}}))
    opensora.read_action_range(folder)


def accepted(door: Callable[[Any], object], values: Iterable[Any]) -> list[object]:
    """The values that a door does not refuse in a sentence."""
    found = []
    for value in values:
        try:
            door(value)
            found.append(value)
        except AsyncRLError:
            pass
    return found


DOORS = (of_config, of_statistics, of_proprio, of_opensora)


@pytest.mark.parametrize("door", DOORS)
def test_statistics_that_cannot_scale_are_refused_at_every_door(door, folder) -> None:
    door(folder, GOOD)
    assert accepted(lambda name: door(folder, STATISTICS[name]), STATISTICS) == []


def test_a_number_that_stands_still_is_read_where_it_is_not_scaled(folder: Path) -> None:
    still = {"q01": [*LOW[:6], 1.0], "q99": [*HIGH[:6], 1.0], "mask": [True] * 6 + [False]}
    for door in (of_config, of_statistics, of_proprio):
        door(folder, still)
    of_statistics(folder, GOOD)


def test_statistics_that_are_no_object_and_settings_of_another_type_are_refused(folder: Path) -> None:
    def read(statistics: object) -> None:
        changed(folder / "scaled" / "config.json", lambda c: c.update(norm_stats=statistics), open_folder)

    (folder / "scaled" / "dataset_statistics.json").unlink(missing_ok=True)
    no_data_sets = (
        {"x": GOOD},
        {"x": None},
        {"x": {"proprio": GOOD}},
        {"action": GOOD},
        {"x": {"action": GOOD}, "y": {}},
        {"x": {"action": GOOD, "proprio": [1]}},
        {},
    )
    assert accepted(read, ["x", [1], 3, *no_data_sets]) == []
    wrong = [
        {"chunk": 8.0},
        {"chunk": "8"},
        {"proprio": "no"},
        {"critic": 0},
        {"decoding": "x"},
        {"images": True},
    ]
    assert accepted(PublishedOptions.of, wrong) == []


def above(door: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: door(folder.parent)


WHOLE = (7.0, "7", True, None, [7], -1, 2**40)
BOOL = ("False", 0, 1, None)
DESCRIBED: dict[str, tuple[str, Callable[[Path], object], tuple[object, ...]]] = {
    "asyncrl chunk": ("scaled/config.json", open_folder, WHOLE),
    "asyncrl dino depth": ("scaled/config.json", open_folder, WHOLE),
    "asyncrl decoding": ("scaled/config.json", open_folder, ("diffusion", 3, None, ["parallel"])),
    "asyncrl stop_token": ("scaled/config.json", open_folder, BOOL),
    "config embed_dim": ("wan/world/reward.json", open_reward, WHOLE),
    "rounded": ("wan/world/reward.json", open_reward, BOOL),
    "schedule_steps": ("wan/world/world.json", wan.open_world, WHOLE),
    "head_dim": ("wan/world/world.json", wan.open_world, (48.0, *WHOLE[1:])),
    "round_timestep": ("wan/world/world.json", wan.open_world, BOOL),
    "latents_std": ("wan/world/world.json", wan.open_world, ([0.0] * 32, ["1"] * 32, [1.0] * 31)),
    "latent_channels": ("opensora/world/vae/config.json", above(opensora.open_world), WHOLE),
    "scaling_factor": ("opensora/world/vae/config.json", above(opensora.open_world), ("1", True, None, -1)),
    "unet head_dim": ("evac/world/world.json", evac.open_evac, WHOLE),
    "fps": ("evac/world/world.json", evac.open_evac, WHOLE),
    "camera flipped": ("evac/world/world.json", evac.open_evac, BOOL),
    "motions std": ("evac/world/world.json", evac.open_evac, ([0.0] * 12, ["1"] * 12, [1.0] * 6)),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_of_another_type_is_refused_at_every_door(name: str, folder: Path) -> None:
    file, door, values = DESCRIBED[name]

    def read(value: object) -> None:
        def change(content: dict[str, Any]) -> None:
            *path, last = name.split()
            for part in path:
                content = content[part]
            content[last] = value

        changed(folder / file, change, door)

    changed(folder / file, lambda content: None, door)
    assert accepted(read, values) == []


def moving_once(steps: int = 400) -> np.ndarray:
    """Actions ``[F, 7]`` of which number 3 moves in one step, number 4 never and number 5 by noise alone."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.4, 0.4, (steps, 7)).astype(np.float32)
    actions[:, 3], actions[200, 3], actions[:, 4] = 0.0, 0.3, 0.25
    actions[:, 5] = rng.normal(0, 1e-5, steps)
    actions[300, 5] = -0.2
    return actions


def test_a_number_that_hardly_ever_moves_is_spanned_by_policies_and_worlds_alike() -> None:
    actions = moving_once()
    made = recordings_of([400], actions=actions)
    stats = action_statistics(made)
    low, high = np.array(stats.q01), np.array(stats.q99)
    assert (low[3], high[3]) == pytest.approx((0.0, 0.3))
    assert (low[4], high[4]) == pytest.approx((0.2495, 0.2505))
    assert low[5] == pytest.approx(-0.2)
    ends = np.quantile(actions[1:, 0].astype(np.float64), [0.01, 0.99])
    assert (low[0], high[0]) == tuple(ends)
    config = OpenVLAOFTConfig.tiny(norm_key="x", norm_stats={"x": stats})
    again = unnormalise(decode(torch.from_numpy(tokens_of(actions, config))), stats).numpy()
    np.testing.assert_allclose(again[:, 3:6], actions[:, 3:6], atol=2e-3)


def test_actions_beyond_the_range_of_a_policy_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    actions = moving_once()
    with caplog.at_level(logging.WARNING):
        tokens_of(actions, OpenVLAOFTConfig.tiny())
        assert not caplog.records
        tokens_of(actions * np.array([1, 1, 4, 1, 1, 1, 1], np.float32), OpenVLAOFTConfig.tiny())
    assert "in number 2, outside the range that the policy's tokens span" in caplog.text
