"""Recordings are read by row from disk, and only together where they look alike."""

import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from asyncrl.commands.fit import main as fit
from asyncrl.errors import AssetError, ConfigError
from asyncrl.fitting.fit_models import fit_policy, shown_to
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recording_files import FrameFile, Recordings, cache_folder
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.wan import encode_recordings, redraw, windows
from asyncrl.fitting.world import average_pictures, reconstruction_loss
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from support.recorded import grown_peak, recorded_spec, recordings_of, write_recorded
from support.tiny_models import small_policy

# ---- pictures in a file --------------------------------------------------------------------------


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 4, 6, 3), dtype=np.uint8)


def filed(frames: np.ndarray) -> FrameFile:
    file = FrameFile(frames.shape)
    file.write(0, frames)
    return file


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        np.int64(2),
        slice(None),
        slice(2, 9, 3),
        slice(9, 2),
        np.array([5, 5, 6, 7, 0]),
        np.array([[0, 1], [8, 3]]),
        np.array([], np.int64),
        np.arange(10) % 2 == 0,
    ],
)
def test_a_file_of_pictures_is_indexed_like_an_array(index: object) -> None:
    frames = noise(10)
    found = filed(frames)[index]
    np.testing.assert_array_equal(found, frames[index])
    assert found.shape == frames[index].shape
    assert found.dtype == np.uint8


def test_a_file_of_pictures_leaves_no_name_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cache_folder() == tmp_path
    file = filed(noise(3))
    assert list(tmp_path.iterdir()) == []
    assert len(file[:]) == 3


def test_pictures_without_room_are_refused_with_what_they_need(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(AssetError, match=r"take 50000\.0 GB unpacked, and .* GB free .*TMPDIR"):
        FrameFile((50_000_000, 1000, 1000, 1))


# ---- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "written", "raw"),
    [
        ({"chunks": (7, 16, 32, 3), "compression": "lzf"}, 20, False),
        ({"compression": "gzip"}, 20, False),
        ({"chunks": (16, 32, 32, 3), "compression": "gzip"}, 20, False),
        ({"chunks": (1, 32, 32, 3), "compression": "gzip", "fillvalue": 255}, 11, False),
        ({"chunks": (1, 32, 32, 3), "compression": "gzip"}, 11, False),
        ({"chunks": (3, 32, 32, 3), "compression": "gzip", "maxshape": (None, 32, 32, 3)}, 19, True),
        ({"chunks": (1, 32, 32, 3), "compression": "gzip"}, 20, True),
        ({"chunks": (1, 32, 32, 3), "compression": "gzip", "shuffle": True}, 20, False),
        ({"chunks": (1, 32, 32, 3), "compression": "gzip", "fletcher32": True}, 20, False),
        ({"chunks": (1, 32, 32, 3), "scaleoffset": 0, "compression": "gzip"}, 20, False),
        ({"chunks": (1, 32, 32, 3)}, 20, True),
        ({}, 20, False),
    ],
)
def test_pictures_that_another_program_packed_are_read_as_hdf5_reads_them(
    tmp_path: Path, packed: dict[str, Any], written: int, raw: bool
) -> None:
    """`raw`: one chunk was stored without its filters."""
    (episode,) = write_recorded(tmp_path, recorded_spec(32), (20,))
    with h5py.File(tmp_path / "part-00000.h5", "a") as file:
        del file["frames"]
        frames = file.create_dataset("frames", (20, 32, 32, 3), np.uint8, **packed)
        frames[:written] = episode.frames[:written]
    with h5py.File(tmp_path / "part-00000.h5", "a") as file:
        if raw:
            one = np.full(packed["chunks"], 77, np.uint8)
            file["frames"].id.write_direct_chunk((len(one), 0, 0, 0), one.tobytes(), filter_mask=1)
    with h5py.File(tmp_path / "part-00000.h5") as file:
        expected = file["frames"][:]
    np.testing.assert_array_equal(load_recordings([tmp_path]).frames[:], expected)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("offsets", lambda rows: [0, 30, 20], "do not cut the frames"),
        ("offsets", lambda rows: np.array([0, 30, 20], np.uint64), "do not cut the frames"),
        ("offsets", lambda rows: rows + np.array([0, 0.5, 0]), "offsets are float64"),
        ("seeds", lambda rows: rows * np.nan, "seeds are float64"),
        ("task_ids", lambda rows: rows[:, None], r"task_ids are int64\[2, 1\]"),
        *(("cameras", value, "cameras are") for value in ('"main"', "[1]", '{"main": 1}')),
        *(
            ("about", f'{{"steps_per_second": {rate}}}', "is not a recording")
            for rate in ("-1", "true", '"20"', "NaN", "1e999")
        ),
        ("actions", lambda rows: rows[:-1], "20 frames, but 19 actions"),
        ("actions", lambda rows: rows[:, :0], r"actions are float32\[20, 0\]"),
        ("tasks", lambda rows: rows[:-1], "1 tasks, but 3 offsets"),
        ("actions", lambda rows: rows * np.nan, "its actions are not all finite"),
        ("poses", lambda rows: rows[:-1], r"20 frames, but poses are float32\[19, 8\]"),
        ("poses", lambda rows: rows.astype(float), r"20 frames, but poses are float64\[20, 8\]"),
        ("poses", lambda rows: rows[:, 1:], r"20 frames, but poses are float32\[20, 7\]"),
        ("poses", lambda rows: rows * np.float32(np.nan), "its poses are not all finite"),
        ("frames", b"no zlib stream", "is not a recording"),
        ("frames", zlib.compress(bytes(16 * 32 * 32 * 3))[:-2], "cut short"),
    ],
)
def test_a_damaged_recording_is_named(tmp_path, name, change, said) -> None:
    write_recorded(tmp_path, recorded_spec(32, poses=True), (9, 11))
    path = tmp_path / "part-00000.h5"
    with h5py.File(path, "a") as file:
        if isinstance(change, str):
            file.attrs[name] = change
        elif isinstance(change, bytes):
            file[name].id.write_direct_chunk((0, 0, 0, 0), change)
        else:
            rows = change(file[name][:])
            del file[name]
            file[name] = rows
    with pytest.raises(ConfigError, match=said) as refused:
        load_recordings([tmp_path])
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"simulator": "garage"}, "in garage"),
        ({"cameras": '["main", "wrist"]'}, "by main, wrist"),
        ({}, "actions of 4 numbers"),
        (None, "pictures of 48 x 48"),
    ],
)
def test_recordings_that_differ_are_refused_by_name(tmp_path: Path, what: dict | None, said: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_recorded(one, recorded_spec(32), (9,))
    write_recorded(other, recorded_spec(48 if what is None else 32), (9,))
    with h5py.File(other / "part-00000.h5", "a") as file:
        file.attrs.update(what or {})
        if what == {}:
            del file["actions"]
            file["actions"] = np.zeros((9, 4), np.float32)
    with pytest.raises(ConfigError, match=said) as refused:
        load_recordings([one, other])
    for folder in (one, other):
        assert str(folder / "part-00000.h5") in str(refused.value)


def test_poses_come_back_unless_a_file_has_none_which_is_named(tmp_path, caplog) -> None:
    spec = recorded_spec(32, poses=True)
    one = write_recorded(tmp_path / "one", spec, (9, 12))
    two = write_recorded(tmp_path / "two", spec, (10,))
    write_recorded(tmp_path / "old", recorded_spec(32), (9,))
    read = load_recordings([tmp_path / "one", tmp_path / "two"])
    assert read.poses.dtype == np.float32
    np.testing.assert_array_equal(read.poses, np.concatenate([episode.poses for episode in (*one, *two)]))
    for folders in (["old"], ["one", "old"]):
        assert load_recordings([tmp_path / name for name in folders]).poses.shape == (0, 8)
    (record,) = caplog.records
    assert str(tmp_path / "old" / "part-00000.h5") in record.getMessage()


@pytest.mark.parametrize("poses", [True, False])
def test_start_states_are_first_frames_of_all_tasks_and_told_apart(tmp_path: Path, poses: bool) -> None:
    for number in range(2):
        write_recorded(tmp_path / f"data{number}", recorded_spec(16, poses=poses), (3,) * 6)
    recordings = load_recordings([tmp_path / "data0", tmp_path / "data1"])
    for chosen in ([0, 4, 7, 11], list(range(12))):
        file = tmp_path / f"starts{len(chosen)}.h5"
        data = [str(tmp_path / "data0"), str(tmp_path / "data1")]
        assert fit(["starts", "--data", *data, "--out", str(file), "--count", str(len(chosen))]) == 0
        states = load_start_states(file, keyframes=False, image_size=16)
        assert len({state.name for state in states}) == len(chosen)
        for state, episode in zip(states, chosen, strict=True):
            row = recordings.offsets[episode]
            np.testing.assert_array_equal(state.frame, recordings.frames[row])
            assert (state.ee_pose is not None) == poses
            if state.ee_pose is not None:
                np.testing.assert_array_equal(state.ee_pose, recordings.poses[row])


# ---- what is fitted ------------------------------------------------------------------------------


def test_a_policy_is_the_same_whether_pictures_are_in_memory_or_in_a_file(tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(32), (20, 33))
    read = load_recordings([tmp_path])

    def weights(recordings: Recordings) -> torch.Tensor:
        policy = small_policy(llm_layers=1, image_pipeline="oft")
        fit_policy(
            policy, recordings, Schedule(steps=2, batch=4, learning_rate=1e-2), drawn=recordings.frames
        )
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    assert torch.equal(weights(read), weights(replace(read, frames=read.frames[:])))


def test_pictures_of_the_oft_pipeline_are_what_the_policy_is_shown(tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(32), (70,))
    frames, policy = load_recordings([tmp_path]).frames, small_policy(llm_layers=1, image_pipeline="oft")
    shown = shown_to(policy, frames)
    assert shown.shape == (70, 64, 64, 3)
    for row in (0, 65):
        alone = policy.preprocess(frames[row : row + 1], ["push the plate"]).pixels
        np.testing.assert_array_equal(shown[row], alone[0].numpy())


def tiny_vae() -> WanVae:
    torch.manual_seed(0)
    return WanVae(VaeConfig.tiny())


def test_an_episode_that_ends_within_a_decision_is_encoded_with_its_last_frame_repeated(tmp_path) -> None:
    (short, _) = write_recorded(tmp_path, recorded_spec(32), (12, 17))
    read, vae = load_recordings([tmp_path]), tiny_vae()
    latents = encode_recordings(vae, read)
    assert [len(episode) for episode in latents] == [2 + 3, 2 + 4]
    frames = np.concatenate([short.frames, short.frames[-1:]])
    alone = recordings_of([13], frames=frames, actions=read.actions[:13])
    torch.testing.assert_close(latents[0], encode_recordings(vae, alone)[0], atol=1e-5, rtol=0)
    drawn = redraw(vae, latents, read)
    assert drawn.shape == read.frames.shape
    assert len(windows(read, latents).rows) == 1 + 2


def episode_alone(recordings: Recordings, episode: int) -> Recordings:
    span = recordings.span(episode)
    arrays = {name: getattr(recordings, name)[span] for name in ("frames", "actions", "success")}
    return recordings_of([span.stop - span.start], **arrays)


def test_redrawn_frames_lie_where_the_recorded_ones_do(tmp_path: Path) -> None:
    """Each episode alone gives what all of them gave: no frame is in another's place."""
    write_recorded(tmp_path, recorded_spec(32), (17, 9, 17))
    read, vae = load_recordings([tmp_path]), tiny_vae()
    drawn = redraw(vae, encode_recordings(vae, read), read)
    for episode in range(3):
        span, alone = read.span(episode), episode_alone(read, episode)
        again = redraw(vae, encode_recordings(vae, alone), alone)
        assert np.abs(drawn[span].astype(int) - again[:]).max() <= 1


def test_every_numbered_task_has_its_own_background(tmp_path: Path) -> None:
    write_recorded(tmp_path / "numbered", recorded_spec(32), (30,) * 6)
    read = load_recordings([tmp_path / "numbered"])
    means = average_pictures(read)
    assert means.shape == (3, 3, 32, 32)
    for task in range(3):
        own = np.concatenate([read.frames[read.span(e)] for e in range(6) if read.task_ids[e] == task])
        expected = torch.from_numpy(own.astype(np.float64).mean(0) / 127.5 - 1).permute(2, 0, 1).float()
        torch.testing.assert_close(means[task], expected, atol=1e-5, rtol=0)


def test_tasks_without_numbers_share_one_background(tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(32, trials=0), (30,) * 4)
    read = load_recordings([tmp_path])
    (mean,) = average_pictures(read)
    whole = torch.from_numpy(read.frames[:]).float() / 127.5 - 1
    assert torch.equal(mean, whole.mean(0).permute(2, 0, 1)), "bit for bit: results repeat"


def test_a_row_is_weighed_against_the_background_of_its_own_scene() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, wanted = (torch.rand(2, 3, 4, 8, 8, generator=generator) for _ in range(2))
    scenes = torch.rand(2, 3, 8, 8, generator=generator)
    apart = [reconstruction_loss(drawn[i : i + 1], wanted[i : i + 1], scenes[i]) for i in range(2)]
    torch.testing.assert_close(reconstruction_loss(drawn, wanted, scenes), torch.stack(apart).mean())


FIT = """
from asyncrl.fitting.settings import FitStarts
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.fit_models import fit_policy
from asyncrl.fitting.loop import Schedule
from support.tiny_models import small_policy

policy = small_policy(llm_layers=1)
def read(folder):
    read = load_recordings([Path(folder)])
    fit_policy(policy, read, Schedule(steps=4, batch=64, learning_rate=1e-3), drawn=read.frames)
    return read.frames.nbytes
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_fitting_takes_a_fraction_of_the_pictures_memory(tmp_path: Path) -> None:
    """164 MB of pictures after 2 MB: the larger recording raises the peak by less than a fifth of itself."""
    write_recorded(tmp_path / "small", recorded_spec(128), (41,))
    for part in range(2):
        write_recorded(tmp_path / "large", recorded_spec(128), (209,) * 8, part=part)
    pictures, grown = grown_peak(FIT, tmp_path / "small", tmp_path / "large")
    assert pictures > 160e6
    assert grown < 0.2 * pictures, f"{grown / pictures:.2f}"
