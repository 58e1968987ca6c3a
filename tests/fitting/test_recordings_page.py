"""The writer of docs/recordings.md writes what the commands accept."""

import re
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.fitting.sources import load_recordings
from support import ROOT

PAGE = ROOT / "docs" / "recordings.md"


@pytest.fixture
def write_recording() -> Callable[..., None]:
    """The page's writer."""
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)[0], names)
    return names["write_recording"]


def own_episode(seed: int, steps: int = 11) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (steps, 32, 32, 3), np.uint8)
    solved = (np.arange(steps) > 8) & (seed % 2 == 1)
    return ("stir the soup" if seed else "peel the potato", frames, rng.normal(size=(steps, 3)), solved)


def test_the_pages_writer_is_read_back_and_fitted_on(tmp_path, write_recording, capsys) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    episodes = [own_episode(seed, 11 + seed) for seed in range(3)]
    write_recording(folder / "part-00000.h5", episodes)
    read = load_recordings([folder])
    assert (read.simulator, len(read), read.offsets.tolist()) == ("my_robot", 3, [0, 11, 23, 36])
    assert read.tasks == ["peel the potato", "stir the soup", "stir the soup"]
    for number, (_, frames, actions, success) in enumerate(episodes):
        span = read.span(number)
        np.testing.assert_array_equal(read.frames[span], frames)
        np.testing.assert_array_equal(read.actions[span], actions.astype(np.float32))
        np.testing.assert_array_equal(read.success[span], success)
    assert cli.run("recordings", ["stats", str(folder)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"stir the soup +2 +50% ", told)
    flags = ["--data", str(folder), "--steps", "1", "--batch", "2", "--device", "cpu"]
    assert cli.run("fit", ["policy", *flags, "--out", str(tmp_path / "policy")]) == 0
    assert cli.run("fit", ["starts", "--data", str(folder), "--out", str(tmp_path / "starts.h5")]) == 0


def test_one_file_of_any_name_is_a_recording_too_which_is_read_as_it_is(tmp_path, write_recording) -> None:
    write_recording(tmp_path / "monday.h5", [own_episode(0)])
    assert load_recordings([tmp_path / "monday.h5"]).tasks == ["peel the potato"]
    with pytest.raises(ConfigError, match=r"monday.h5 is a recording of our own"):
        load_recordings([tmp_path / "monday.h5"], DataSetSettings(image_size=64))


def test_the_page_names_every_array_that_a_recording_must_have(tmp_path, write_recording) -> None:
    path, needed = tmp_path / "monday.h5", PAGE.read_text().split("These are optional")[0]
    write_recording(path, [own_episode(0)])
    with h5py.File(path) as file:
        names = set(file)
    assert names == set(re.findall(r"^\| `(\w+)` \|", needed, re.M))
    for name in names:
        write_recording(path, [own_episode(0)])
        with h5py.File(path, "a") as file:
            del file[name]
        with pytest.raises(ConfigError, match=f"there is no {name}"):
            load_recordings([path])
