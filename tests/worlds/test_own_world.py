"""The world of docs/own_world.md is short, keeps the protocol, and a policy is trained in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl import cli
from asyncrl.config.sections import ImaginationSettings
from asyncrl.launch.named_models import named_world
from asyncrl.records import ACTION_DIM, CHUNK
from support.pages import PAINTER, commands_of_own_world, files_of, importable, write_painter
from support.tiny_models import start_state
from support.whole_runs import rows


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_painter(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def lab(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder from which the page's class can be imported."""
    yield from importable(package, monkeypatch)


def test_the_class_of_the_page_has_at_most_60_lines() -> None:
    files = files_of("own_world.md")
    assert files.keys() == {"my_lab/painter.py", "my_lab/make.py"}
    text = files["my_lab/painter.py"]
    assert len([line for line in text.splitlines() if line.strip()]) <= 60


def test_the_commands_of_the_page_check_the_world_and_train_in_it(lab: Path, tmp_path, capsys) -> None:
    (_, *_), (_, check, *named), (_, train, *flags) = commands_of_own_world()
    assert (check, train) == ("check", "train")
    assert PAINTER in named
    assert PAINTER in flags
    assert cli.run("check", named) == 0
    said = capsys.readouterr().out
    assert "ok  neighbours\n" in said
    assert said.endswith("keeps the protocol of its kind, world\n")
    sizes = ["--actor.slots", "4", "--algorithm.group-size", "2", "--algorithm.groups-per-update", "2"]
    short = ["--actor.max-decisions", "2", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    assert cli.run("train", [*flags, *sizes, *short]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_action_i_makes_frame_i_and_nan_stays_in_its_row(lab: Path) -> None:
    named = named_world(PAINTER)
    world = named.kind.load(named.folder, torch.device("cpu"), ImaginationSettings())
    state = world.start([start_state(number, 64) for number in range(2)], decisions=2)
    actions = torch.randn(2, CHUNK, ACTION_DIM, generator=torch.Generator().manual_seed(0))
    frames, _ = world.imagine(state, actions, [1, 2])
    other = actions.clone()
    other[:, 5] += 1
    changed, _ = world.imagine(state, other, [1, 2])
    assert torch.equal(changed[:, :5], frames[:, :5])
    assert (changed[:, 5] != frames[:, 5]).any()
    broken = actions.clone()
    broken[0, 3] = float("nan")
    found, after = world.imagine(state, broken, [1, 2])
    assert after.finite.tolist() == [False, True]
    assert torch.equal(found[1], frames[1])
    with pytest.raises(ValueError, match=r"2 slots need actions \[2, 8, 7\]"):
        world.imagine(state, actions[:, :4], [1, 2])
