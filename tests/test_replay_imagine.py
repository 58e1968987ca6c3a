"""`asyncrl replay imagine`: a stored group goes through the models again. A real run of tiny models."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl import cli
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.replay_tools.episodes import find_group, replay_folder
from asyncrl.worlds.start_states import save_start_states
from asyncrl.worlds.wan.world import save_world
from support.tiny_models import GROUP_SIZE, SIZE, start_state, write_models
from support.whole_runs import exit_code
from support.worlds import load_world

Table = list[dict[str, str]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and a run of them: two updates, the second kept; videos of even groups."""
    folder = tmp_path_factory.mktemp("models")
    more = ["--inline", "--updates", "2", "--checkpoint-every", "1", "--keep-checkpoints", "1"]
    more += ["--actor.max-decisions", "2", "--actor.slots", "5", "--replay.keep-video-every", "2"]
    # Random reward models answer near one half, so that at this threshold some episodes succeed.
    more += ["--actor.success-threshold", "0.5", "--imagination.fixed-shape", "--replay.max-lag", "1"]
    assert cli.run("train", [*write_models(folder), *more, "--run-dir", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def own_copy(recorded: Path, tmp_path: Path) -> Path:
    """The run, where a test may change it."""
    return Path(shutil.copytree(recorded / "run", tmp_path / "run"))


def again(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int) -> tuple[str, Table]:
    """Run the command; return what it said, and the rows of its table by title."""
    capsys.readouterr()
    assert cli.run("replay", ["imagine", *arguments, "--device", "cpu"]) == code
    said = capsys.readouterr().out
    lines = said.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("member"))
    titles, *cells = (
        [cell.strip() for cell in line.split("  ") if cell] for line in lines[head : head + 1 + GROUP_SIZE]
    )
    return said, [dict(zip(titles, row, strict=True)) for row in cells]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", [0, 1], ids=["with video", "without video"])
def test_a_group_imagined_at_the_same_shape_is_equal_to_the_last_bit(recorded, capsys, group) -> None:
    said, found = again([str(recorded / "run"), str(group)], capsys, 0)
    for row in found:
        seen = [row[title] for title in ("verdict", "the same end", "frames", "scores")]
        assert seen == ["equal", "yes", "0", "0"]
        assert float(row["log-probs"]) < 1e-4
    assert "policy version 0: " in said
    assert "rows of a pass: 5, as in the run" in said
    assert said.endswith("2 members: 2 equal\n")
    said, found = again([str(recorded / "run"), str(group), "--rows", "1"], capsys, 0)
    assert {row["verdict"] for row in found} <= {"equal", "close"}, "every member alone"
    assert "rows of a pass: 1 (--rows)" in said


def test_log_probs_are_compared_where_exactly_their_version_is_left(recorded: Path, capsys) -> None:
    folder = replay_folder(recorded / "run")
    by_version = {
        int(find_group(folder, number)[0].policy_versions[0]): number
        for number in range(len(list(folder.glob("group-*.h5"))))
    }
    assert {0, 1} <= by_version.keys(), "the run imagines ahead of the learner"
    said, found = again([str(recorded / "run"), str(by_version[1])], capsys, 0)
    assert "policy version 1: not kept (the nearest is 0), its log-probs are left out" in said
    assert {row["log-probs"] for row in found} == {"-"}
    assert {row["verdict"] for row in found} == {"equal"}, "frames and scores need no policy"


def test_another_policy_of_that_version_shows_in_the_log_probs_alone(own_copy: Path, capsys) -> None:
    """A changed checkpoint in place of the policy that the run began with."""
    checkpoint = own_copy / "checkpoints" / "update_000002"
    policy = load_policy(checkpoint)
    with torch.no_grad():
        policy.lm_head.weight.mul_(3)
    policy.save(own_copy / "other")
    _, found = again([str(own_copy), "0", "--policy", str(own_copy / "other")], capsys, 1)
    assert {(row["frames"], row["verdict"]) for row in found} == {("0", "differs")}
    assert all(float(row["log-probs"]) > 0.05 for row in found)


def test_another_world_differs_and_that_is_exit_code_1(own_copy: Path, recorded: Path, capsys) -> None:
    world = load_world(recorded / "world")
    with torch.no_grad():
        for parameter in world.vae.parameters():
            parameter.mul_(1.1)
    shutil.copytree(recorded / "world", own_copy / "world")
    world.version = 3
    save_world(own_copy / "world", world)
    said, found = again([str(own_copy), "0", "--world", str(own_copy / "world")], capsys, 1)
    assert "version 3, but the group's was 0: it cannot come out the same" in said
    assert {row["verdict"] for row in found} == {"differs"}
    assert all(int(row["frames"]) > 2 for row in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: ["99"], "has no file of group 99"),
        (lambda run: ["0", "--start-states", str(other_states(run, named="start"))], "does not look like"),
        (lambda run: ["0", "--start-states", str(other_states(run, named="else"))], "is not among the 8"),
        (lambda run: [(run / "config.json").unlink(), "0"][1:], "has no config.json"),
    ],
    ids=["group", "start states", "names", "settings"],
)
def test_what_cannot_work_is_one_sentence(own_copy: Path, change: object, said: str, capsys) -> None:
    arguments = change(own_copy)  # type: ignore[operator]
    assert exit_code(["imagine", str(own_copy), *arguments], "replay") == 2
    found = capsys.readouterr()
    assert said in " ".join((found.err + found.out).replace("│", " ").split())


def other_states(run: Path, *, named: str) -> Path:
    """Start states of other pictures."""
    states = [replace(start_state(number + 1, SIZE), name=f"{named}-{number}") for number in range(8)]
    save_start_states(run / "other.h5", states)
    return run / "other.h5"
