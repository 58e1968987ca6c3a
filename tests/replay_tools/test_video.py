"""`asyncrl replay video|sheet`: the movies and pictures show what was stored."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from asyncrl.commands.replay import main as run_inspection
from asyncrl.records import Episode
from asyncrl.replay.group_file import read_group
from asyncrl.replay_tools import episodes, pictures
from asyncrl.replay_tools.episodes import read_rows
from asyncrl.replay_tools.pictures import last_picture, spread
from asyncrl.storage import media
from asyncrl.storage.media import GREEN, INK, RED, SPACE, captioned, fitted, font
from support.episodes import make_episode
from support.recorded_run import IMAGE, episode_of, open_store, remove_after_listing

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
