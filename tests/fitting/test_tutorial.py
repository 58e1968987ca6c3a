"""The script of docs/tutorial.md: its simulator judges its own task, its folder is read back."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.fitting.sources import load_recordings
from asyncrl.simulators.interface import random_start
from support import ROOT

pytestmark = pytest.mark.render
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "counter", raising=False)
    return import_module("counter")


def test_the_simulator_plays_only_the_tutorials_task(counter: Any) -> None:
    simulator = counter.Counter(places=1, image_size=64)
    for seed in range(3):
        seen = simulator.reset([0], [random_start(simulator.spec, seed)])
        assert seen.tasks == ("move the red block onto the yellow tray",)
        assert simulator.places[0].task == "put the red cube on the yellow plate"


def test_its_folder_is_read_back(counter: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    pytest.importorskip("pyarrow")
    simulator = counter.Counter(places=1, image_size=64)
    episodes = [counter.record(simulator, seed) for seed in range(3)]
    counter.write(tmp_path / "data", episodes)
    read = load_recordings([tmp_path / "data"])
    assert (read.simulator, read.tasks) == ("counter", [counter.TASK] * 3)
    for number, (pictures, actions, success) in enumerate(episodes):
        span = read.span(number)
        np.testing.assert_array_equal(read.actions[span][1:], np.stack(actions))
        np.testing.assert_array_equal(read.success[span][1:], success)
        # H.264 keeps colours at half the size: single pixels beside an edge differ, the picture does not.
        assert np.abs(read.frames[span][:-1].astype(int) - np.stack(pictures)).mean() < 4
