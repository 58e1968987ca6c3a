"""`asyncrl replay video|sheet`: movies and pictures show what was stored, with one palette."""

import dataclasses
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image, ImageSequence

from asyncrl.commands.replay import main as run_inspection
from asyncrl.errors import CodecMissing
from asyncrl.records import Episode
from asyncrl.replay import sealed_file
from asyncrl.replay.group_file import read_group
from asyncrl.replay_tools import episodes, pictures
from asyncrl.replay_tools.episodes import read_rows
from asyncrl.replay_tools.pictures import last_picture, spread
from asyncrl.storage import media
from asyncrl.storage.media import GREEN, INK, RED, SPACE, captioned, fitted, font, write_gif
from support.episodes import assert_same, make_episode
from support.group_damage import craft_group
from support.pages import run_program
from support.recorded_run import IDS, IMAGE, episode_of, open_store, remove_after_listing
from support.replay import load

TIMES = pictures.MOVIE_WIDTH // IMAGE


def pictures_of(path: Path) -> list[np.ndarray]:
    """The frames of a movie, ``[H, W, 3]`` each."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def shrunk(picture: np.ndarray) -> np.ndarray:
    """The stored frame that was enlarged into the upper part of a movie's frame."""
    return picture[: IMAGE * TIMES : TIMES, : IMAGE * TIMES : TIMES]


def test_one_id_reads_one_group_and_none_the_newest_success_and_failure(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def counted(path: Path, *names: Any) -> list[Episode]:
        read.append(path.name)
        return read_group(path, *names)

    rows = [row.episode for row in read_rows(run_dir / "replay")]
    monkeypatch.setattr(episodes, "read_group", counted)
    assert episodes.find_row(run_dir / "replay", rows[2].episode_id).episode.episode_id == rows[2].episode_id
    assert read == ["group-00000001.h5"]
    by_group = sorted(read_rows(run_dir / "replay"), key=lambda row: -row.number)
    wanted = [
        next(row.episode.episode_id for row in by_group if row.episode.success == outcome)
        for outcome in (True, False)
    ]
    assert episodes.newest_of_each_outcome(run_dir / "replay") == wanted
    assert run_inspection(["video", str(run_dir), "--out", str(tmp_path)]) == 0
    made = {path.stem for path in tmp_path.iterdir() if path.is_file()}
    assert made == {one[:12] for one in wanted}


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_kept_video_is_shown_frame_by_frame(run_dir: Path, capsys, suffix: str) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av")
    out = run_dir / f"x{suffix}"
    assert run_inspection(["video", str(run_dir), "0123", "--out", str(out)]) == 0
    assert "every imagined frame" in capsys.readouterr().out
    frames, episode = pictures_of(out), episode_of(0, 0)
    assert len(frames) == 17
    for short_path, stored in zip(frames, [episode.frames[0], *episode.video], strict=True):
        centre = short_path[TIMES // 2 : IMAGE * TIMES : TIMES, TIMES // 2 : IMAGE * TIMES : TIMES]
        assert np.abs(centre.astype(int) - stored).mean() < 40  # Noise, after 256 colours or compression.
    assert all(frame.shape == frames[0].shape for frame in frames)
    assert frames[0].shape[0] > IMAGE * TIMES, "the text stands below the picture"


def test_the_drawn_frames_are_exact_and_the_edge_turns_green_at_the_success() -> None:
    frames = [np.asarray(frame) for frame in pictures.movie_of(episode_of(0, 0))]
    episode = episode_of(0, 0)
    assert np.array_equal(shrunk(frames[0]), episode.frames[0])
    assert all(np.array_equal(shrunk(a), b) for a, b in zip(frames[1:], episode.video, strict=True))
    edges = [tuple(frame[-1, 0].tolist()) for frame in frames]
    assert edges == [INK] * 12 + [GREEN] * 5  # 12 steps led to the success.
    assert not np.array_equal(frames[1][IMAGE * TIMES :], frames[2][IMAGE * TIMES :]), "the text changes"


def test_several_episodes_go_into_a_folder(run_dir: Path) -> None:
    out = run_dir / "movies"
    out.mkdir()
    assert run_inspection(["video", str(run_dir), "a", "0123", "--out", str(out)]) == 0
    assert {path.stem for path in out.iterdir()} == {"a" * 12, "0123" + "0" * 8}


def test_without_pyav_it_writes_gif_and_says_how_to_get_mp4(run_dir: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    assert run_inspection(["video", str(run_dir), "a", "--out", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "pip install 'asyncrl[video]'" in said
    assert "3 frames" in said
    assert "no video was kept" in said
    assert len(pictures_of(run_dir / f"{'a' * 12}.gif")) == 3


def test_mp4_without_pyav_is_refused(run_dir: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    assert run_inspection(["video", str(run_dir), "a", "--out", str(run_dir / "x.mp4")]) == 2
    assert "needs the package av" in capsys.readouterr().err


def test_the_sheet_shows_four_frames_of_each_episode(run_dir: Path, capsys) -> None:
    out = run_dir / "sheet.png"
    store = open_store(run_dir)  # As on a live run.
    remove_after_listing(run_dir)
    assert run_inspection(["sheet", str(run_dir), "--out", str(out)]) == 0
    store.close()
    assert "2 of 2 successes, 6 of 6 failures" in capsys.readouterr().out
    with Image.open(out) as image:
        sheet = np.asarray(image.convert("RGB"))
    wide = pictures.TILE_WIDTH
    rows, columns = np.nonzero((sheet == GREEN).all(axis=2))
    assert columns.min() == SPACE, "successes stand at the left"
    label = captioned(Image.new("RGB", (wide, 0)), ["step 8"], edge=INK).height
    top = int(rows.min()) - wide - label  # The edge begins below the pictures of the first episode.
    times, episode = wide // IMAGE, episode_of(0, 0)
    assert len(episode.video), "so that the picture that was judged is there"
    short_path = [episode.frames[0], episode.frames[0], episode.frames[1], episode.video[episode.steps - 1]]
    for place, frame in enumerate(short_path):
        left = SPACE + place * (wide + 2)
        assert np.array_equal(sheet[top : top + wide : times, left : left + wide : times], frame)
    assert np.nonzero((sheet == RED).all(axis=2))[1].min() > columns.max()


@pytest.mark.parametrize(
    ("video", "success", "reward_at", "said", "shown"),
    [
        (True, True, 3, "judged 0.12", "video 11"),
        (False, True, 3, "step 16: 0.16", "final"),
        (False, True, 7, "judged 0.16", "final"),
        (True, False, None, "step 16: 0.16", "final"),
    ],
)
def test_the_last_picture_of_a_tile_is_the_judged_one_or_says_its_own_score(
    video: bool, success: bool, reward_at: int | None, said: str, shown: str
) -> None:
    rewards = np.zeros((2, 8), np.float32)
    if reward_at is not None:
        rewards[1, reward_at] = 1
    scores = (np.arange(1, 17, dtype=np.float32) / 100).reshape(2, 8)
    episode = dataclasses.replace(
        make_episode(video=video, success=success), rewards=rewards, success_scores=scores
    )
    text, picture = last_picture(episode)
    assert text == said
    assert np.array_equal(picture, episode.video[11] if shown == "video 11" else episode.final_frame)


def test_episodes_are_chosen_over_all_versions(run_dir: Path) -> None:
    rows = list(read_rows(run_dir / "replay"))
    assert [row.episode.oldest_version for row in spread(rows, 3)] == [0, 1, 2]
    assert spread(rows, 0) == []
    assert len(spread(rows, 1)) == 1
    assert len(spread(rows, 99)) == len(rows)


def test_long_captions_are_shortened() -> None:
    text = "a very long instruction " * 9
    short = fitted(text, 200, 13)
    assert short.endswith("...")
    assert font(13).getlength(short) <= 200
    assert fitted("short", 200, 13) == "short"
    assert captioned(Image.new("RGB", (50, 20)), [text], edge=RED).width == 50


def compress(run: Path, codec: str = "gzip") -> Path:
    """Rewrite the frames of group 0."""
    path, options = run / "replay" / "group-00000000.h5", dict[str, Any](compression=4)
    if codec != "gzip":
        plugin = pytest.importorskip("hdf5plugin")
        options = dict({"zstd": plugin.Zstd, "lz4": plugin.LZ4, "blosc": plugin.Blosc}[codec]())

    def repack(file: Any) -> None:
        values, about = file["frames"][...], dict(file["frames"].attrs)
        del file["frames"]
        file.create_dataset("frames", data=values, chunks=(4, *values.shape[1:]), **options)
        file["frames"].attrs.update(about)

    craft_group(path, repack)
    return path


@pytest.mark.parametrize("codec", ["gzip", "zstd", "lz4", "blosc"])
def test_compressed_files_are_read(run_dir: Path, codec: str) -> None:
    for member, found in enumerate(read_group(compress(run_dir, codec))):
        assert_same(found, episode_of(0, member))
    for member, found in enumerate(load(open_store(run_dir), 0)):
        assert_same(found, episode_of(0, member))


def test_a_stranger_reads_a_compressed_file(run_dir: Path) -> None:
    done = run_program(str(compress(run_dir)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(IDS[0][0])


def test_without_its_codec_small_arrays_are_read_and_no_file_is_taken_for_damaged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compress(run_dir)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    monkeypatch.setattr(sealed_file, "find_spec", lambda name: None)
    found = read_group(path, ["rewards"])
    assert found[0].rewards.tobytes() == episode_of(0, 0).rewards.tobytes()
    with pytest.raises(CodecMissing, match=r"asyncrl\[compression\]"):
        load(open_store(run_dir), 0)
    assert path.exists(), "it is not moved to quarantine"


def table_with_a_moving_cube(frames: int) -> np.ndarray:
    """A grey table with soft shades, on which a red square of 6 pixels moves: ``[F, 64, 64, 3]``."""
    rows, columns = np.mgrid[:64, :64]
    table = np.full((64, 64, 3), (74, 70, 66), np.uint8)
    table[:20] = (40 + rows[:20] + columns[:20])[..., None].astype(np.uint8)  # An arm of many greys.
    movie = np.repeat(table[None], frames, 0)
    for number, frame in enumerate(movie):
        frame[40:46, number : number + 6] = (200, 30, 30)
        frame[50:54, 30:34] = (250, 240, 20) if number == 5 else (74, 70, 66)  # It flashes once.
        frame[22:26] = (number * 5, 255 - number * 5, 128)  # Something whose colour changes all the time.
    return movie


def test_a_movie_keeps_steady_and_small_colours_with_one_palette(tmp_path: Path) -> None:
    write_gif(tmp_path / "movie.gif", table_with_a_moving_cube(48), rate=10)
    with Image.open(tmp_path / "movie.gif") as gif:
        shown, shown_for = [], []
        for frame in ImageSequence.Iterator(gif):
            shown.append(np.asarray(frame.convert("RGB")))
            shown_for.append(frame.info["duration"])
    assert len(shown) == 48
    assert shown_for == [100] * 47 + [2000], "its end can be read before it begins again"
    assert np.abs(shown[5][52, 32].astype(int) - (250, 240, 20)).max() <= 12
    greys = {tuple(frame[60, 60].tolist()) for frame in shown}
    assert len(greys) == 1
    assert np.abs(np.subtract(greys.pop(), (74, 70, 66))).max() <= 4
    for number, frame in enumerate(shown):
        assert np.abs(frame[43, number + 3].astype(int) - (200, 30, 30)).max() <= 12
    content = (tmp_path / "movie.gif").read_bytes()
    heads = [i for i in range(len(content) - 10) if content[i] == 0x2C and content[i - 9 : i - 7] == b"!\xf9"]
    assert content[10] & 0x80, "a global palette"
    local = sum(content[i + 9] >> 7 for i in heads)  # The flag of a local colour table in a frame's header.
    assert not local, f"{local} frames have a palette of their own"
