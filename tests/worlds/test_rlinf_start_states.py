"""RLinf's traj*.npy: read as numpy wrote them, and never executed."""

import io
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.nn import functional

from asyncrl.errors import AssetError, AsyncRLError
from asyncrl.records import dummy_action
from asyncrl.worlds.rlinf_start_states import load_trajectory, read_object_array
from asyncrl.worlds.start_states import load_start_states, save_start_states
from asyncrl.worlds.wan.world import _opening_actions, _opening_frames
from support.pth import write_bomb

SIZE = 16


def frame(number: int, *, size: int = SIZE, **others: Any) -> dict[str, Any]:
    image = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    action = np.arange(7, dtype=np.float64) / 10 + number
    return {"image": image, "delta_action": action, "instruction": "Open the drawer.", **others}


def write(path: Path, frames: list[Any]) -> Path:
    array = np.empty(len(frames), dtype=object)
    array[:] = frames
    np.save(path, array, allow_pickle=True)
    return path


def write_raw(path: Path, content: bytes, length: int = 1) -> Path:
    """A .npy header that promises `length` objects, then `content` in place of their pickle."""
    buffer = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    path.write_bytes(buffer.getvalue() + content)
    return path


def test_a_single_frame_begins_an_episode_with_the_gripper_open(tmp_path: Path) -> None:
    state = load_trajectory(write(tmp_path / "traj3.npy", [frame(0)]))
    assert (state.name, state.task) == ("traj3", "open the drawer")
    np.testing.assert_array_equal(state.frame, frame(0)["image"])
    assert state.context_frames.shape == (0, SIZE, SIZE, 3)
    assert state.context_actions.shape == (0, 7)
    # What the world makes of it: the first frame five times, no motion, gripper at -1.
    np.testing.assert_array_equal(_opening_frames(state), np.stack([state.frame] * 5))
    np.testing.assert_array_equal(_opening_actions(state, 7), np.stack([dummy_action()] * 4))
    assert dummy_action().tolist() == [0, 0, 0, 0, 0, 0, -1]


def test_a_keyframe_file_brings_reference_context_and_actions(tmp_path: Path) -> None:
    frames = [frame(i) for i in range(5)]
    state = load_trajectory(write(tmp_path / "traj3_kir.npy", frames))
    np.testing.assert_array_equal(state.frame, frames[0]["image"])
    np.testing.assert_array_equal(state.context_frames, np.stack([f["image"] for f in frames[1:]]))
    expected = np.stack([f["delta_action"] for f in frames[1:]]).astype(np.float32)
    np.testing.assert_array_equal(state.context_actions, expected)
    assert state.context_actions.dtype == np.float32


@pytest.mark.parametrize(("count", "context"), [(1, []), (3, []), (4, [0, 1, 2, 3]), (7, [3, 4, 5, 6])])
def test_the_number_of_frames_makes_a_context_and_not_the_name(tmp_path, count, context) -> None:
    frames = [frame(i) for i in range(count)]
    for name in ("traj0.npy", "traj0_kir.npy"):
        state = load_trajectory(write(tmp_path / name, frames))
        assert [int(a[0]) for a in state.context_actions] == context
        assert len(state.context_frames) == len(context)


def test_keyframes_can_be_left_out_and_names_decide_the_order(tmp_path: Path) -> None:
    for name in ("traj2", "traj10", "traj1_kir", "traj1"):
        write(tmp_path / f"{name}.npy", [frame(i) for i in range(5 if "_kir" in name else 1)])
    (tmp_path / "notes.txt").write_text("not a trajectory")
    names = [state.name for state in load_start_states(tmp_path)]
    assert names == ["traj1", "traj10", "traj1_kir", "traj2"] == sorted(names, key=lambda n: f"{n}.npy")
    plain = load_start_states(tmp_path, keyframes=False)
    assert [state.name for state in plain] == ["traj1", "traj10", "traj2"]
    for name in ("traj2", "traj10", "traj1"):
        (tmp_path / f"{name}.npy").unlink()
    assert len(load_start_states(tmp_path)) == 1
    with pytest.raises(AssetError, match=r"without _kir, because of --no-keyframes"):
        load_start_states(tmp_path, keyframes=False)


def test_endings_in_capitals_are_read_and_two_kinds_in_a_folder_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "traj1.npy", [frame(0)]).rename(tmp_path / "traj1.NPY")
    write(tmp_path / "traj2.npy", [frame(1)])
    assert [state.name for state in load_start_states(tmp_path)] == ["traj1", "traj2"]
    assert load_start_states(path)[0].name == "traj1"
    save_start_states(tmp_path / "more" / "a.h5", load_start_states(path))
    (tmp_path / "more" / "a.h5").rename(tmp_path / "more" / "a.H5")
    assert [state.name for state in load_start_states(tmp_path / "more")] == ["traj1"]
    (tmp_path / "more" / "a.H5").rename(tmp_path / "a.HDF5")
    with pytest.raises(AssetError, match=r"two kinds, a\.HDF5 and traj1\.NPY"):
        load_start_states(tmp_path)
    (tmp_path / "traj3.npy").write_bytes(path.read_bytes()[:300])
    (tmp_path / "a.HDF5").unlink()
    with pytest.raises(AssetError, match=r"traj3\.npy"):
        load_start_states(tmp_path)


def test_images_of_another_size_are_resized_as_pytorch_does_it(tmp_path: Path) -> None:
    import torch

    frames = [frame(i, size=10) for i in range(5)]
    state = load_trajectory(write(tmp_path / "traj0_kir.npy", frames), image_size=SIZE)
    for seen, original in zip([state.frame, *state.context_frames], frames, strict=True):
        picture = torch.from_numpy(original["image"]).permute(2, 0, 1)[None] / 255
        wanted = functional.interpolate(picture, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
        np.testing.assert_allclose(seen, 255 * wanted[0].permute(1, 2, 0).numpy(), atol=0.51)
    same = load_trajectory(write(tmp_path / "traj1.npy", [frame(1)]), image_size=SIZE)
    np.testing.assert_array_equal(same.frame, frame(1)["image"])


def test_task_may_be_bytes_and_go_by_either_name(tmp_path: Path) -> None:
    named = frame(0)
    del named["instruction"]
    for value in ("put it down", b"put it down", np.str_("put it down"), np.bytes_(b"put it down")):
        path = write(tmp_path / "traj0.npy", [{**named, "task": value}])
        assert load_trajectory(path).task == "put it down"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": None}, r"pictures are NoneType\[\], expected uint8\[any, any, 3\]"),
        ({"image": np.zeros((8, 8, 3), np.uint8)}, r"frames differ in shape"),
        ({"delta_action": np.zeros(6)}, "'delta_action' of a frame is missing or is not 7 finite numbers"),
        ({"delta_action": np.full(7, np.nan)}, ".*not 7 finite numbers"),
        ({"delta_action": np.full(7, 1e300)}, ".*not 7 finite numbers"),
        ({"delta_action": [10**400] * 7}, ".*not 7 finite numbers"),
    ],
)
def test_frames_that_are_not_as_documented_are_named(tmp_path: Path, change: dict, words: str) -> None:
    frames = [frame(i) for i in range(5)]
    frames[3] |= change
    path = write(tmp_path / "traj7_kir.npy", frames)
    with pytest.raises(AsyncRLError, match=rf"traj7_kir\.npy: {words}"):
        load_trajectory(path)


def test_files_without_frames_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="has 0 frames"):
        load_trajectory(write(tmp_path / "traj0.npy", []))
    with pytest.raises(AssetError, match="something else than one dict per frame"):
        load_trajectory(write(tmp_path / "traj0.npy", [1, 2]))


def documented() -> NDArray[np.object_]:
    """One of everything that may be in a file."""
    numbers = {str(t): np.arange(6).reshape(2, 3).astype(t) for t in ("u1", "i8", "f4", "f2", "f8", "b1")}
    values = {
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(1.5),
        "flag": np.bool_(True),
        "text": "tür",
        "word": np.str_("tür"),
        "bytes": b"\x00\xff",
        "nothing": b"",
        "list": [1, -(10**12), 2.5, None, (True, False), ()],
        "long": "x" * 300,
    }
    item = {**numbers, **values}
    return np.array([item, item, {**item, "text": "other"}], dtype=object)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("package", [b"numpy._core", b"numpy.core"])
def test_what_numpy_writes_is_read_alike(tmp_path: Path, protocol: int, package: bytes) -> None:
    content = pickle.dumps(documented(), protocol=protocol)
    if package == b"numpy.core":  # numpy 1; in protocol 4 and 5 names carry their length
        content = content.replace(b"numpy._core", package) if protocol < 4 else _renamed(content)
    found = read_object_array(write_raw(tmp_path / "a.npy", content, length=3))
    for item, wanted in zip(found, documented(), strict=True):
        assert item.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(item[name], value)
                assert item[name].dtype == value.dtype
            else:
                assert item[name] == value
                assert isinstance(item[name], str | bytes | list | type(value))


def _renamed(content: bytes) -> bytes:
    for module in (b"multiarray", b"numeric"):
        new, old = b"numpy._core." + module, b"numpy.core." + module
        content = content.replace(bytes([0x8C, len(new)]) + new, bytes([0x8C, len(old)]) + old)
    start = content.index(b"\x95") + 9  # without the frame, whose length is another one now
    return content[:2] + content[start:]


class Runs:
    """Pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def reconstruct(*arguments: Any) -> Runs:
    return Runs(np.zeros(0).__reduce__()[0], *arguments)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_a_file_is_executed(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "executed"
    calls = [
        Runs(os.system, f"touch {mark}"),
        Runs(eval, f"open({str(mark)!r}, 'w')"),
        Runs(exec, f"open({str(mark)!r}, 'w')"),
        Runs(open, str(mark), "w"),
        Runs(getattr, Path, "touch"),
        Runs(np.fromfile, str(mark)),
        Runs(np.dtype, "O"),
    ]
    for call in calls:
        for values in ([call], [{"image": call}], [{"image": np.array([call, 1], dtype=object)}]):
            array = np.empty(1, dtype=object)
            array[:] = values
            path = write_raw(tmp_path / "traj0.npy", pickle.dumps(array, protocol=protocol))
            with pytest.raises(AssetError, match="nothing in a file is ever executed"):
                load_trajectory(path)
            assert not mark.exists()
    assert os.system(f"touch {mark}") == 0  # the test can see it
    assert mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        reconstruct(np.ndarray, (10**9, 10**9), b"b"),
        reconstruct(np.ndarray, (0,), b"O"),
        reconstruct(dict, (0,), b"b"),
        reconstruct(),
        Runs(np.dtype, "O8", True, True),
        Runs(np.dtype, "V1000000000", False, True),
        Runs(np.dtype, {"names": ["a"], "formats": ["O"]}, False, True),
        Runs(np.float64(1).__reduce__()[0], np.dtype("f8"), b"short"),
        Runs(np.float64(1).__reduce__()[0], np.dtype("O"), b"12345678"),
        Runs(np.float64(1).__reduce__()[0], "f8", b"12345678"),
        np.array([1 + 2j]),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
        np.array(["text", "more"]),
        np.datetime64("2020-01-01"),
        {1, 2},
        1j,
        Path("x"),
        np.ndarray,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_documented_are_refused(tmp_path: Path, value: Any) -> None:
    array = np.empty(1, dtype=object)
    array[0] = {"image": value}
    for protocol in (2, 4, 5):
        path = write_raw(tmp_path / "traj0.npy", pickle.dumps(array, protocol=protocol))
        with pytest.raises(AsyncRLError, match=r"was not read|pictures are"):
            load_trajectory(path)


ARRAY = pickle.dumps(np.zeros(1, dtype=object), protocol=2)[:-1]
NAMES = (b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02].",
        b"\x80\x02N.",
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
        b"\x80\x02(((((((.",
        b"\x80\x02t.",
        b"\x80\x02h\x05.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # memory for two thousand million places
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes that are not there
        b"\x80\x04\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02]K\x01b.",  # the state of a list
        *(b"\x80\x02" + name + b"}X\x01\x00\x00\x00aK\x01sb." for name in NAMES),  # ... and of a name
        *(b"\x80\x02" + name + b"N}X\x01\x00\x00\x00aK\x01s\x86b." for name in NAMES),
        *(b"\x80\x02" + name + b"K\x01R." for name in NAMES),
        b"\x80\x02K\x01)R.",
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x02c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04NN\x93.",
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x02P1\n.",  # persistent id
        b"\x80\x02c__builtin__\nobject\n)\x81.",
        b"(i__main__\nX\n.",
        ARRAY,
    ],
)
def test_broken_and_crafted_pickles_end_in_the_one_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(AssetError, match=r"was not read|something else than one dict per frame"):
        load_trajectory(write_raw(tmp_path / "a.npy", content))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x09\x00\x76\x00{}",
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31),
    ],
)
def test_what_is_no_npy_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(AssetError, match="was not read"):
        read_object_array(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(AssetError, match="header does not describe a one-dimensional array of objects"):
        read_object_array(tmp_path / "a.npy")
    with pytest.raises(AssetError, match="cannot be read"):
        read_object_array(tmp_path / "absent.npy")


def test_what_a_file_remembers_cannot_be_copied_again_and_again(tmp_path: Path) -> None:
    write_bomb(tmp_path / "a.npy", length=70_000, copies=10_000)
    assert (tmp_path / "a.npy").stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(AssetError, match="many times its own length"):
            read_object_array(tmp_path / "a.npy")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_pipe_in_the_place_of_a_trajectory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(AssetError, match="it is a named pipe"):
        read_object_array(tmp_path / "a.npy")
