"""Key frames that travel with a version of the world: as files, as tensors of one shape, in the stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import AssetError, ConfigError
from asyncrl.keyframe_names import version_named
from asyncrl.records import ActionSpec, StartState
from asyncrl.worlds import mined_keyframes
from asyncrl.worlds.mined_keyframes import MinedKeyframes
from asyncrl.worlds.start_states import StartStateStream, check_keyframes

TASKS = ("lift", "push", "stack")
SIZE, WIDTH = 4, 5


def state(number: int, *, task: str = "push", pose: bool = True, keyframe: bool = True) -> StartState:
    rng = np.random.default_rng(number)
    context = 4 if keyframe else 0
    return StartState(
        name=f"given-{number}",
        task=task,
        frame=rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8),
        context_frames=rng.integers(0, 256, (context, SIZE, SIZE, 3), dtype=np.uint8),
        context_actions=rng.normal(size=(context, WIDTH)).astype(np.float32),
        ee_pose=rng.normal(size=8).astype(np.float32) if pose else None,
        elapsed=1 + number if keyframe else 0,
    )


def room(count: int = 4) -> MinedKeyframes:
    return MinedKeyframes(count, SIZE, ActionSpec(dim=WIDTH), TASKS)


def assert_same(ours: StartState, theirs: StartState, *, name: str) -> None:
    assert (ours.name, ours.task, ours.elapsed) == (name, theirs.task, theirs.elapsed)
    for part in ("frame", "context_frames", "context_actions"):
        np.testing.assert_array_equal(getattr(ours, part), getattr(theirs, part))
    assert (ours.ee_pose is None) == (theirs.ee_pose is None)
    if theirs.ee_pose is not None:
        np.testing.assert_array_equal(ours.ee_pose, theirs.ee_pose)


def test_what_a_fitter_saves_an_actor_begins_at(tmp_path: Path) -> None:
    chosen = [state(0), state(1, task="stack", pose=False), state(2, task="lift")]
    mined_keyframes.save(tmp_path, 3, chosen)
    loaded = mined_keyframes.load(tmp_path)
    sender, receiver = room(), room()
    sender.fill(3, loaded)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in receiver.tensors.items()}
    for name, tensor in receiver.tensors.items():
        tensor.copy_(sender.tensors[name])
    assert shapes == {name: (tensor.shape, tensor.dtype) for name, tensor in receiver.tensors.items()}
    assert receiver.version == 3
    for row, (found, wanted) in enumerate(zip(receiver.states, chosen, strict=True)):
        assert_same(found, wanted, name=f"world-3-keyframe-{row}")
        assert_same(loaded[row], wanted, name=f"world-3-keyframe-{row}")
        assert version_named(found.name) == 3


def test_there_may_be_fewer_than_before_or_none_and_never_more_than_there_is_room_for(tmp_path: Path) -> None:
    mined = room(2)
    assert (mined.version, mined.states) == (-1, [])
    mined.fill(1, [state(0), state(1), state(2)])
    first = mined.states
    assert [one.elapsed for one in first] == [1, 2]
    mined.fill(2, [state(3, pose=False)])
    assert [one.elapsed for one in mined.states] == [4]
    assert mined.states[0].ee_pose is None, "not that of the row before"
    np.testing.assert_array_equal(first[0].frame, state(0).frame, "what was taken does not change")
    mined_keyframes.save(tmp_path, 1, [])
    assert mined_keyframes.load(tmp_path) == []
    mined.fill(3, [])
    assert (mined.version, mined.states) == (3, [])


def test_tasks_that_the_run_does_not_have_are_left_out() -> None:
    mined = room()
    mined.fill(1, [state(0, task="fold"), state(1, task="lift")])
    assert [(one.task, one.elapsed) for one in mined.states] == [("lift", 2)]


def test_a_torn_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / mined_keyframes.FILE).write_bytes(b"torn")
    with pytest.raises(AssetError, match="cannot be read as start states"):
        mined_keyframes.load(tmp_path)


@pytest.mark.parametrize("name", ["world-3-keyframe", "world--keyframe-1", "a-world-3-keyframe-1", "seed-3"])
def test_other_names_travel_with_no_world(name: str) -> None:
    assert version_named(name) is None


# ---- the stream ----------------------------------------------------------------------------------


def test_groups_begin_at_the_newest_key_frames_in_their_share() -> None:
    ordinary = [replace(state(n, keyframe=False), name=f"ordinary-{n}") for n in range(3)]
    mined = room()
    stream = StartStateStream(ordinary, seed=0, keyframe_share=0.5, mined=mined)
    assert stream.keyframes == []
    assert {stream[n].name for n in range(12)} == {f"ordinary-{n}" for n in range(3)}, "none came yet"
    assert stream.left([]) == 3
    for version in (1, 2):
        mined.fill(version, [state(5), state(6)])
        names = [stream[n].name for n in range(12)]
        assert [name.startswith("world") for name in names] == [False, True] * 6
        assert {name for name in names if name.startswith("world")} == {
            f"world-{version}-keyframe-{row}" for row in range(2)
        }
        assert stream.left(["ordinary-1", f"world-{version}-keyframe-0"]) == 3


def test_given_key_frames_serve_until_others_come() -> None:
    given = [replace(state(0), name="given"), replace(state(1, keyframe=False), name="ordinary")]
    mined = room()
    stream = StartStateStream(given, seed=0, keyframe_share=1.0, mined=mined)
    assert {stream[n].name for n in range(6)} == {"given"}
    mined.fill(1, [state(5)])
    assert {stream[n].name for n in range(6)} == {"world-1-keyframe-0"}
    mined.fill(2, [])
    assert {stream[n].name for n in range(6)} == {"given"}


def test_a_share_without_key_frames_is_refused_unless_some_will_come() -> None:
    ordinary = [state(0, keyframe=False)]
    with pytest.raises(ConfigError, match=r"let --pace\.every take them from true episodes"):
        check_keyframes(ordinary, share=0.5, max_decisions=6)
    check_keyframes(ordinary, share=0.5, max_decisions=6, others_come=True)
