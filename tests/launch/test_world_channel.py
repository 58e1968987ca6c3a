"""Rank 0's end of the channel of refitted worlds: what a round accepted is sent, whole, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config.imagination import ImaginationSettings, Precision
from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch import refits
from asyncrl.launch.world_channel import WorldChannel
from asyncrl.observability import metrics_pace as m
from asyncrl.pace import rounds
from asyncrl.pace.fitter import WorldAt
from asyncrl.weights import packing
from support.accepted_worlds import accept, accepted_row, write_world
from support.tiny_models import WORLDS, write_models


class Sent:
    """Keeps what the channel publishes."""

    endpoint = pull_endpoint = ""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.newest: dict[str, Tensor] = {}
        self.closed = False

    def publish(self, weights: dict[str, Tensor], version: int) -> None:
        self.newest = {name: tensor.clone() for name, tensor in weights.items()}
        self.versions.append(version)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Small models; a test may name the kind of their world."""
    write_models(tmp_path / "models", getattr(request, "param", "wan"))
    return tmp_path / "models"


@pytest.fixture
def config(models: Path) -> TrainConfig:
    return TrainConfig(
        policy=str(models / "policy"),
        world=str(models / "world"),
        start_states=str(models / "starts.h5"),
        device="cpu",
        pace=PaceSettings(every=1),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the channel has looked once more from beginning to end."""
    seen, read = threading.Semaphore(0), rounds.newest_world

    def newest_world(folder: Path) -> int | None:
        seen.release()
        return read(folder)

    monkeypatch.setattr(rounds, "newest_world", newest_world)
    monkeypatch.setattr("asyncrl.launch.world_channel.LOOK_EVERY", 0.01)

    def look() -> None:
        while seen.acquire(blocking=False):
            pass
        for _ in range(2):  # The first may have begun before.
            assert seen.acquire(timeout=30), "the channel does not look any more"

    return look


def opened(config: TrainConfig, run: Path) -> tuple[WorldChannel, Sent]:
    sent: Any = Sent()
    return WorldChannel(config, run, sent), sent


def test_only_a_world_whose_round_has_its_line_is_sent(
    config: TrainConfig, models: Path, run: Path, looks: Callable[[], None]
) -> None:
    channel, sent = opened(config, run)
    write_world(run, models / "world", 1)
    (run / rounds.NAME).write_text('{"version": 1, "world": 1, "accep')
    looks()
    assert sent.versions == [], "its fitter was killed: the next one makes it anew"
    rounds.append(run, accepted_row(1))
    looks()
    looks()
    assert sent.versions == [1], "once"
    assert channel.status() == {m.WORLD_VERSION: 1.0}
    folder = rounds.world_folder(run, 1)
    at = WorldAt(folder=folder, reward=folder, version=1)
    world, reward = refits.load_world(config, at, torch.device("cpu"))
    expected = refits.refreshed_tensors(config, world, reward)
    assert sent.newest.keys() == expected.keys()
    assert all(sent.newest[name].equal(tensor) for name, tensor in expected.items())
    channel.close()
    assert sent.closed


@pytest.mark.parametrize("precision", ["stored", "bf16"])
@pytest.mark.parametrize("models", WORLDS, indirect=True)
def test_what_is_sent_has_the_types_of_what_actors_hold_and_is_copied_as_it_is(
    config: TrainConfig, models: Path, run: Path, looks: Callable[[], None], precision: Precision
) -> None:
    """A manifest of other types would be refused, see `packing.require_same`."""
    config = replace(config, imagination=ImaginationSettings(precision=precision))
    first = refits.first_world(config)
    world, reward = refits.load_world(config, first, torch.device("cpu"))
    held = refits.refreshed_tensors(config, world, reward)
    channel, sent = opened(config, run)
    version = first.version + 1
    folder = write_world(run, models / "world", version)
    for file in folder.glob("*.safetensors"):
        save_file({n: 1.01 * x if x.is_floating_point() else x for n, x in load_file(file).items()}, file)
    rounds.append(run, accepted_row(version))
    looks()
    looks()
    channel.close()
    assert sent.versions == [version]
    assert packing.build_manifest(sent.newest) == packing.build_manifest(held)
    of_world = {tensor.dtype for name, tensor in held.items() if name.startswith("world.")}
    assert of_world == ({torch.float32, torch.bfloat16} if precision == "bf16" else {torch.float32})
    changed = [name for name, tensor in held.items() if not tensor.equal(sent.newest[name])]
    assert len(changed) > len(held) / 2
    packing.fill(held, sent.newest)
    assert all(tensor.equal(sent.newest[name]) for name, tensor in held.items())


def test_of_several_new_worlds_the_newest_is_sent_also_by_a_rank_0_that_comes_back(
    config: TrainConfig, models: Path, run: Path, looks: Callable[[], None]
) -> None:
    for version in (1, 2, 3):
        accept(run, models / "world", version)
    channel, sent = opened(config, run)
    looks()
    looks()
    assert sent.versions == [3]
    channel.close()


def test_a_world_that_cannot_be_read_ends_the_run_with_its_name(
    config: TrainConfig, models: Path, run: Path
) -> None:
    folder = write_world(run, models / "world", 1)
    (folder / "transformer.safetensors").write_bytes(b"torn")
    rounds.append(run, accepted_row(1))
    channel, sent = opened(config, run)
    channel._thread.join(30)
    with pytest.raises(RunError, match="World version 1 could not be sent"):
        channel.status()
    assert sent.versions == []
    channel.close()
