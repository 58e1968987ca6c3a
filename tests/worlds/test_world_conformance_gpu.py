"""On a GPU every world keeps what a run rests on too, as it is and compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.config.sections import ImaginationSettings
from asyncrl.launch.conformance import CHECKS, check_world
from asyncrl.launch.named_models import named_world
from asyncrl.storage.assets import start_states_path
from asyncrl.worlds.start_states import load_start_states
from support.pages import PAINTER, importable, write_painter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS = 3
"""Slots of a compiled decision: as many as a check has at most, so that there is one shape to compile."""


@pytest.fixture
def painter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The class of docs/own_world.md, importable from a folder of its own."""
    for _ in importable(write_painter(tmp_path), monkeypatch):
        yield PAINTER


def check_on_gpu(name: str, *, compiled: bool) -> list[str]:
    """Load a world onto the GPU and make all checks; returns their names."""
    named = named_world(name, ())
    world = named.kind.load(named.folder, torch.device("cuda"), ImaginationSettings())
    if compiled:
        world.compile(ROWS)
    shipped = name if name.startswith("tabletop") else "tabletop"
    starts = load_start_states(start_states_path("tabletop", shipped))[:3]
    return [line.partition(":")[0] for line in check_world(world, starts)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["tabletop", "tabletop_opensora", "tabletop_evac"])
def test_shipped_worlds_keep_all_of_it(name: str, compiled: bool) -> None:
    assert check_on_gpu(name, compiled=compiled) == ["imagine", *CHECKS, "modules"]


def test_the_class_of_the_page_keeps_all_of_it(painter: str) -> None:
    assert check_on_gpu(painter, compiled=False) == ["imagine", *CHECKS, "modules"]
