"""LeRobot v3 folders as --data: what a test wrote with pyarrow and PyAV comes out as recordings."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from asyncrl.commands.collect import recordings as recordings_command
from asyncrl.errors import ConfigError
from asyncrl.fitting.recording_files import read_part
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.fitting.sources import load_recordings
from support.datasets import TOP, TOWEL, WRIST, Sampled, sampled, smooth_pictures
from support.recorded import grown_peak

pa = pytest.importorskip("pyarrow", reason="needs pyarrow (extra 'lerobot')")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra 'lerobot')")
av = pytest.importorskip("av", reason="needs av (extra 'lerobot')")

EPISODES = "meta/episodes/chunk-000/file-000.parquet"
CODEC = 3.0
"""Mean difference of a picture that H.264 may make, in steps of 255."""


def write_lerobot_folder(
    folder: Path,
    episodes: Sequence[Sampled],
    *,
    rate: int = 30,
    per_file: int = 2,
    video: bool = True,
    judged: bool = True,
) -> Path:
    """Write a folder of version 3.0, with `per_file` episodes in each file of rows and each movie."""
    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    rows_of_episodes, begin = [], 0
    for first in range(0, len(episodes), per_file):
        part, number = episodes[first : first + per_file], first // per_file
        rows, at = [], 0
        for offset, episode in enumerate(part):
            steps = len(episode.actions)
            rows += _rows(episode, first + offset, begin, tasks.index(episode.task), rate, video, judged)
            place = {"chunk_index": 0, "file_index": number}
            about: dict[str, Any] = {
                "episode_index": first + offset,
                "tasks": [episode.task],
                "length": steps,
            }
            about |= {f"data/{name}": value for name, value in place.items()}
            about |= {"dataset_from_index": begin, "dataset_to_index": begin + steps}
            for key in episode.pictures if video else ():
                seconds = {"from_timestamp": at / rate, "to_timestamp": (at + steps) / rate}
                about |= {f"videos/{key}/{name}": value for name, value in (place | seconds).items()}
            rows_of_episodes.append(about)
            begin, at = begin + steps, at + steps
        _write(folder / "data" / f"chunk-000/file-{number:03d}.parquet", pa.Table.from_pylist(rows))
        for key in part[0].pictures if video else ():
            path = folder / "videos" / key / f"chunk-000/file-{number:03d}.mp4"
            write_movie(path, np.concatenate([episode.pictures[key] for episode in part]), rate)
    _write(folder / EPISODES, pa.Table.from_pylist(rows_of_episodes))
    table = pa.table({"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    _write(folder / "meta" / "tasks.parquet", table)
    info = {
        "codebase_version": "v3.0",
        "robot_type": "so100",
        "fps": rate,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": _features(episodes[0], video, judged),
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def _rows(
    episode: Sampled, number: int, begin: int, task: int, rate: int, video: bool, judged: bool
) -> list[dict[str, Any]]:
    rows = []
    for step in range(len(episode.actions)):
        row: dict[str, Any] = {
            "action": episode.actions[step].tolist(),
            "observation.state": episode.states[step].tolist(),
            "timestamp": step / rate,
            "frame_index": step,
            "episode_index": number,
            "index": begin + step,
            "task_index": task,
        }
        if judged:
            row |= {"next.reward": float(episode.rewards[step]), "next.success": bool(episode.success[step])}
        for key in () if video else episode.pictures:
            packed = BytesIO()
            Image.fromarray(episode.pictures[key][step]).save(packed, "PNG")
            row[key] = {"bytes": packed.getvalue(), "path": None}
        rows.append(row)
    return rows


def _features(episode: Sampled, video: bool, judged: bool) -> dict[str, Any]:
    one = {"shape": [1], "names": None}
    features: dict[str, Any] = {
        key: {
            "dtype": "video" if video else "image",
            "shape": list(pictures.shape[1:]),
            "names": ["height", "width", "channels"],
        }
        for key, pictures in episode.pictures.items()
    }
    features["action"] = {"dtype": "float32", "shape": [episode.actions.shape[1]], "names": None}
    features["observation.state"] = {"dtype": "float32", "shape": [episode.states.shape[1]], "names": None}
    features |= {"timestamp": {"dtype": "float32", **one}}
    features |= {
        name: {"dtype": "int64", **one} for name in ("frame_index", "episode_index", "index", "task_index")
    }
    if judged:
        features |= {"next.reward": {"dtype": "float32", **one}, "next.success": {"dtype": "bool", **one}}
    return features


def _write(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def write_movie(path: Path, pictures: np.ndarray, rate: int) -> None:
    """Write H.264 as LeRobot does: a key frame every 2 frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"g": "2", "crf": "18"})
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def episodes() -> list[Sampled]:
    tasks = (TOWEL, "Wipe the  window", TOWEL)
    return [sampled(seed, 12 + seed, task=task) for seed, task in enumerate(tasks)]


def frames_expected(episode: Sampled, key: str = TOP) -> np.ndarray:
    return np.concatenate([episode.pictures[key], episode.pictures[key][-1:]])


def test_a_folder_becomes_recordings_with_the_same_numbers(tmp_path: Path, episodes: list[Sampled]) -> None:
    read = load_recordings([write_lerobot_folder(tmp_path / "towel", episodes)])
    assert read.simulator == "so100"
    assert read.tasks == ["fold the towel", "wipe the window", "fold the towel"]
    assert read.offsets.tolist() == [0, 13, 27, 42]
    assert read.seeds.tolist() == [0, 1, 2]
    for number, episode in enumerate(episodes):
        span = read.span(number)
        assert not read.actions[span][0].any()
        np.testing.assert_array_equal(read.actions[span][1:], episode.actions)
        difference = np.abs(read.frames[span].astype(float) - frames_expected(episode))
        assert difference.mean() < CODEC
    assert read.solved().tolist() == [False, True, False]
    # The last picture stands for what came after the last action, so both have its verdict.
    assert np.flatnonzero(read.success).tolist() == [25, 26]


def test_the_second_episode_of_a_movie_is_not_the_first(tmp_path: Path, episodes: list[Sampled]) -> None:
    read = load_recordings([write_lerobot_folder(tmp_path / "towel", episodes, per_file=3)])
    first, second = (episode.pictures[TOP][:12] for episode in episodes[:2])
    found = read.frames[read.span(1)][:12].astype(float)
    assert np.abs(found - second).mean() < CODEC < np.abs(found - first).mean()


def test_pictures_in_the_rows_come_back_exactly(tmp_path: Path, episodes: list[Sampled]) -> None:
    read = load_recordings([write_lerobot_folder(tmp_path / "towel", episodes, video=False)])
    for number, episode in enumerate(episodes):
        np.testing.assert_array_equal(read.frames[read.span(number)], frames_expected(episode))


def test_an_import_keeps_states_rewards_and_all_cameras_that_were_named(tmp_path: Path) -> None:
    episodes = [sampled(seed, 10, cameras=(WRIST, TOP)) for seed in (0, 1)]
    folder = write_lerobot_folder(tmp_path / "towel", episodes, video=False)
    out = tmp_path / "data"
    call = ["import", str(folder), "--out", str(out), "--dataset.cameras", TOP, WRIST]
    assert recordings_command(call) == 0
    with h5py.File(out / "part-00000.h5") as file:
        assert json.loads(str(file.attrs["cameras"])) == ["top", "wrist"]
        assert json.loads(str(file.attrs["about"])) == {"imported": "towel", "steps_per_second": 30}
        np.testing.assert_array_equal(file["frames"][11:21], episodes[1].pictures[TOP])
        np.testing.assert_array_equal(file["more_frames"][11:21, 0], episodes[1].pictures[WRIST])
        np.testing.assert_array_equal(file["states"][11:21], episodes[1].states)
        np.testing.assert_array_equal(file["states"][21], episodes[1].states[-1])
        np.testing.assert_array_equal(file["rewards"][12:22], episodes[1].rewards)
        assert file["rewards"][11] == 0
    assert read_part(out / "part-00000.h5").looks.rate == 30
    assert recordings_command(["stats", str(out)]) == 0


def test_demonstrations_are_solved_at_their_end_only_if_that_is_said(tmp_path, episodes, caplog) -> None:
    folder = write_lerobot_folder(tmp_path / "towel", episodes, video=False, judged=False)
    assert not load_recordings([folder]).success.any()
    assert "no such episode counts as solved (--dataset.success KEY, or --dataset.solved end" in caplog.text
    read = load_recordings([folder], DataSetSettings(solved="end"))
    assert np.flatnonzero(read.success).tolist() == [11, 12, 25, 26, 40, 41]


def test_pictures_are_resized_while_they_are_read(tmp_path: Path) -> None:
    episode = sampled(1, 8)
    episode.pictures[TOP] = smooth_pictures(3, 8, height=40, width=80)
    folder = write_lerobot_folder(tmp_path / "towel", [episode], video=False)
    wide = load_recordings([folder])
    with pytest.raises(ConfigError, match=r"40 x 80 pixels.*--dataset.image-size 128"):
        _ = wide.image_size
    for aspect in ("stretch", "crop", "pad"):
        settings = DataSetSettings(image_size=32, aspect=aspect)
        read = load_recordings([folder], settings)
        assert read.frames.shape == (9, 32, 32, 3)
        lines_of_bars = int((read.frames[0].max(axis=(1, 2)) < 30).sum())
        assert lines_of_bars == {"stretch": 0, "crop": 0, "pad": 16}[aspect]


def test_a_stride_takes_every_third_step_and_the_last_action_before_it(tmp_path: Path) -> None:
    episode = sampled(1, 8)
    folder = write_lerobot_folder(tmp_path / "towel", [episode], video=False)
    read = load_recordings([folder], DataSetSettings(stride=3))
    np.testing.assert_array_equal(read.frames[:3], episode.pictures[TOP][[0, 3, 6]])
    np.testing.assert_array_equal(read.actions[1:], episode.actions[[2, 5, 7]])
    assert read.success.tolist() == [False, False, True, True]
    summed = load_recordings([folder], DataSetSettings(stride=3, between="sum"))
    sums = np.stack([episode.actions[a:b].sum(0) for a, b in ((0, 3), (3, 6), (6, 8))])
    np.testing.assert_allclose(summed.actions[1:, :-1], sums[:, :-1], rtol=1e-5)
    np.testing.assert_array_equal(summed.actions[1:, -1], episode.actions[[2, 5, 7], -1])


def test_two_folders_of_different_rates_are_not_mixed(tmp_path: Path, episodes: list[Sampled]) -> None:
    one = write_lerobot_folder(tmp_path / "one", episodes, video=False)
    two = write_lerobot_folder(tmp_path / "two", episodes, video=False, rate=15)
    with pytest.raises(ConfigError, match=r"two has .*at 15 steps a second.*one has .*at 30 steps"):
        load_recordings([one, two])
    assert len(load_recordings([one, one])) == 6
    assert len(load_recordings([one], DataSetSettings(episodes=2))) == 2


def _edit(folder: Path, **changes: object) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(info | changes))


def _cut(folder: Path) -> None:
    path = folder / "videos" / TOP / "chunk-000/file-000.mp4"
    path.write_bytes(path.read_bytes()[:700])


def _turn(**numbers: str) -> Callable[[Path], None]:
    """Write hex numbers into the matrix by which the pictures of a movie are to be shown: ``[3, 3]``."""

    def turn(folder: Path) -> None:
        path = folder / "videos" / TOP / "chunk-000/file-000.mp4"
        content, matrix = path.read_bytes(), ["00010000", *["00000000"] * 3, "00010000", *["00000000"] * 3]
        upright = bytes.fromhex("".join(matrix))
        place = content.index(upright, content.index(b"tkhd"))
        for name, number in numbers.items():
            matrix[int(name[1:])] = number
        path.write_bytes(content[:place] + bytes.fromhex("".join(matrix)) + content[place + len(upright) :])

    return turn


def _two_movies(folder: Path) -> None:
    path = folder / "videos" / TOP / "chunk-000/file-000.mp4"
    with av.open(str(path)) as one, av.open(str(folder / "two.mp4"), "w") as two:
        streams = [two.add_stream_from_template(one.streams.video[0]) for _ in range(2)]
        for packet in list(one.demux(video=0)):
            if packet.dts is not None:
                for stream in streams:
                    packet.stream = stream
                    two.mux(packet)
    (folder / "two.mp4").rename(path)


def _swap(folder: Path) -> None:
    parts = [folder / "data/chunk-000" / f"file-{number:03d}.parquet" for number in (0, 1)]
    first = parts[0].read_bytes()
    parts[0].write_bytes(parts[1].read_bytes())
    parts[1].write_bytes(first)


def _pipe(folder: Path) -> None:
    path = folder / "data/chunk-000/file-000.parquet"
    path.unlink()
    os.mkfifo(path)


def _rewrite(path: Path, column: str, values: list[object]) -> None:
    table = pq.read_table(path)
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values)), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda f: _rewrite(f / EPISODES, f"videos/{TOP}/from_timestamp", [0.0, float("nan"), 0.0]),
            "below zero, or one that is no number",
        ),
        *(
            (
                lambda f, off=off: _rewrite(
                    f / EPISODES, f"videos/{TOP}/from_timestamp", [0.0, off / 30, 0.0]
                ),
                said,
            )
            for off, said in (
                (12.6, "begins at"),
                (13, "begins at"),
                (11, "before ends at 0.4000"),
                (12.11, "begins"),
            )
        ),
        (
            lambda f: _rewrite(f / EPISODES, f"videos/{TOP}/from_timestamp", [0.0, 0.4, 1 / 30]),
            "episode 2 begins at 0.0333 s in the movie",
        ),
        *(
            (lambda f, c=column, v=values: _rewrite(f / "data/chunk-000/file-001.parquet", c, v), said)
            for column, values, said in (
                ("frame_index", [*range(13, -1, -1)], "row 0 of an episode has another frame_index"),
                ("frame_index", [*range(13), 14], "row 13 of an episode has another frame_index"),
                (
                    "timestamp",
                    [(i + 0.5) / 30 for i in range(14)],
                    "row 0 of an episode has another timestamp",
                ),
                ("index", [*range(13, -1, -1)], "row 1 of an episode has another index"),
                ("index", [*range(13), 20], "row 13 of an episode has another index"),
                ("timestamp", [float("nan")] * 14, "has another timestamp"),
                ("episode_index", [2] * 13 + [3], "it has episode 3, which meta/episodes lacks"),
            )
        ),
        (lambda folder: _edit(folder, total_episodes=4), "has 3 episodes, meta/info.json has 4"),
        *(
            (lambda f, rows=rows: _rewrite(f / "data/chunk-000/file-001.parquet", "action", rows), said)
            for rows, said in (
                ([[0.0] * 15] * 14, "episode 2 has 15 numbers of an action, where the data set has 14"),
                (["left"] * 14, "action holds string, expected numbers"),
                ([[0.0] * 13, [0.0] * 15] * 7, "action has rows of different lengths"),
            )
        ),
        (
            lambda f: _rewrite(f / "meta/tasks.parquet", "task_index", ["a", "b"]),
            "task_index holds string, expected numbers",
        ),
        (lambda f: _rewrite(f / "meta/tasks.parquet", "task_index", [0, 0]), "it has a task_index twice"),
        (
            lambda folder: _edit(folder, codebase_version="v2.1"),
            "version 'v2.1', and v3.0 is read.*--repo-id towel --push-to-hub=false",
        ),
        (lambda folder: _edit(folder, fps=0), "fps is 0"),
        (lambda folder: _edit(folder, data_path="../../{chunk_index}"), "data_path is"),
        (lambda folder: (folder / "meta/tasks.parquet").write_bytes(b"PAR1"), "tasks.parquet cannot be read"),
        (lambda folder: (folder / EPISODES).unlink(), "has no episodes"),
        (_cut, "mp4 cannot be read"),
        (_turn(n0="00000000", n1="00010000", n3="ffff0000", n4="00000000"), "to be turned or mirrored"),
        (_turn(n0="ffff0000"), "to be turned or mirrored"),
        (_turn(n4="ffff0000"), "to be turned or mirrored"),
        (_two_movies, "it has 2 movies, expected 1"),
        (_swap, "it has 0 rows of episode 0, where meta/episodes has 12"),
        (_pipe, "it is a named pipe"),
        (lambda folder: (folder / "videos" / TOP / "chunk-000/file-001.mp4").unlink(), "cannot be read"),
    ],
)
def test_a_damaged_folder_is_named_and_an_import_of_it_writes_nothing(
    tmp_path: Path, episodes: list[Sampled], damage: Callable[[Path], object], said: str
) -> None:
    folder = write_lerobot_folder(tmp_path / "towel", episodes)
    damage(folder)
    with pytest.raises(ConfigError, match=said):
        load_recordings([folder])
    with pytest.raises(ConfigError, match=said):
        recordings_command(["import", str(folder), "--out", str(tmp_path / "data")])
    assert not list((tmp_path / "data").glob("*"))


READ = """
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.settings import DataSetSettings

def read(folder):
    return load_recordings([Path(folder)], DataSetSettings(image_size=128)).frames.nbytes
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_movies_are_read_as_a_stream(tmp_path: Path) -> None:
    """97 MB of pictures after 3 MB: the larger folder raises the peak by less than a third of itself."""
    written = []
    for name, count in (("small", 1), ("large", 32)):
        episodes = [sampled(seed, 60) for seed in range(count)]
        for seed, episode in enumerate(episodes):
            episode.pictures[TOP] = smooth_pictures(seed, 60, 64, 64)
        written.append(write_lerobot_folder(tmp_path / name, episodes, per_file=8))
    pictures, grown = grown_peak(READ, *written)
    assert pictures > 95e6
    assert grown < 0.33 * pictures, f"{grown / pictures:.2f}"
