"""The doctor tries the world of a run, and counts what each kind of world needs through its interface."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ImaginationSettings
from asyncrl.doctor import gpus, models
from asyncrl.doctor.checks import Examination, Verdict
from asyncrl.launch.placement import parse_placement
from asyncrl.records import SlotBytes
from asyncrl.storage.assets import world_folder
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.evac.world import save_world as save_evac
from asyncrl.worlds.opensora.world import save_world as save_opensora
from support.broken_worlds import SIZE
from support.doctor_sizes import sizes
from support.evac import start_state, tiny_config, tiny_networks
from support.opensora import nano_world

GIB = 2**30
SIZES = sizes(0, environment=1000, frame=3 * SIZE**2)


def examination(world: str, *, environment: int = 1000, placement: str = "auto") -> Examination:
    return Examination(
        config=TrainConfig(world=world, device="cpu", placement=placement),
        sizes=replace(SIZES, environment=environment),
        starts=[start_state(n, size=SIZE) for n in range(3)],
    )


@pytest.mark.parametrize(
    ("world", "environment", "words"),
    [
        ("SoundWorld", 1000, r"keeps what runs rest on: 7 checks in .* on cpu"),
        (
            "Crowded",
            1000,
            r"--world names .*:Crowded, whose imagine is .* grey levels off when a row is alone",
        ),
        (
            "Crowded",
            13 * GIB,
            r"not tried: 13\.0 GiB of models would take minutes without a GPU\. "
            r"Try it by `asyncrl check world support\.broken_worlds:Crowded`",
        ),
    ],
)
def test_a_world_is_tried_unless_that_would_take_minutes(world: str, environment: int, words: str) -> None:
    finding = models.check_world_model(examination(f"support.broken_worlds:{world}", environment=environment))
    assert finding is not None
    assert finding.verdict is (Verdict.BROKEN if words.startswith("--world") else Verdict.OK)
    assert re.match(words, finding.seen)


def test_a_gpu_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, 80 * GIB))
    cuda = torch.device("cuda:1")
    assert models._reason_to_skip(cuda, 12 * GIB) == (
        "of cuda:1 only 15.0 GiB are free, too little for 12.0 GiB of models"
    )
    assert models._reason_to_skip(cuda, 11 * GIB) == ""


def test_nothing_is_tried_where_nothing_is_imagined() -> None:
    unknown = Examination(config=TrainConfig(world="support.broken_worlds:SoundWorld", device="cpu"))
    assert models.check_world_model(unknown) is None
    simulated = replace(examination("tabletop"), starts=())
    assert models.check_world_model(simulated) is None


def saved(kind: str, folder: Path) -> str:
    if kind == "wan":
        return str(world_folder("tabletop"))
    if kind == "opensora":
        save_opensora(folder, nano_world())
    else:
        config = tiny_config()
        save_evac(folder, EvacWorld(tiny_networks(config), config))
    return str(folder)


def slot(world: str, decisions: int) -> SlotBytes:
    return models.slot_of(TrainConfig(world=world, actor=ActorSettings(max_decisions=decisions)))


@pytest.mark.parametrize("kind", ["wan", "opensora", "evac"])
def test_every_kind_says_what_its_slots_take(kind: str, tmp_path: Path) -> None:
    world = saved(kind, tmp_path / kind)
    short, long = slot(world, 3), slot(world, 6)
    assert min(short.kept, short.scratch) > 0
    assert (short.shared > 0) == (kind != "wan"), "Wan's decoder draws all slots together"
    assert (long.kept > short.kept) == (kind == "evac"), "only EVAC remembers whole episodes"
    assert (long.scratch, long.shared) == (short.scratch, short.shared)
    if kind == "evac":
        config = tiny_config()
        frame = config.autoencoder.channels * config.latent_size**2 * 4 + 8 * 4
        assert long.kept - short.kept == 2 * 3 * 8 * frame


@pytest.mark.parametrize(("shared", "eager"), [(100_000, 100_000), (300, 800)])
def test_what_graphs_work_in_comes_on_top_of_what_slots_share(shared: int, eager: int) -> None:
    config = TrainConfig(actor=ActorSettings(slots=8))
    compiled = replace(config, imagination=ImaginationSettings(compile=True))
    placement: Any = parse_placement("learner=0,actor=1", 2)
    given = replace(SIZES, slot=SlotBytes(kept=10, scratch=100, shared=shared))
    assert gpus.rank_needs(config, given, placement, 1) == 1000 + 8 * 10 + eager
    assert gpus.rank_needs(compiled, given, placement, 1) == 1000 + 8 * 10 + 8 * 100 + shared
    assert gpus.rank_needs(config, given, placement, 0) == 0
