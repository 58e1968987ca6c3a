"""`asyncrl replay`: tables, checks and pictures of stored episodes."""

from pathlib import Path

import pytest
from PIL import Image
from test_wire import make_episode

from asyncrl.replay.inspect import run_inspection
from asyncrl.replay.store import EpisodeStore

IDS = [["0123" + "0" * 28, "0124" + "1" * 28], ["a" * 32, "b" * 32]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two groups: episode 0 of group 0 succeeded and kept its video; group 0 was used at version 2."""
    store = EpisodeStore(tmp_path / "replay", group_size=2, max_bytes=10**9)
    for number in range(2):
        store.seal(
            number,
            [
                make_episode(
                    number,
                    member,
                    versions=(number, number + 1),
                    success=(number, member) == (0, 0),
                    video=(number, member) == (0, 0),
                    episode_id=IDS[number][member],
                )
                for member in range(2)
            ],
        )
    store.ledger.append(used=[0], request="", version=2)
    store.close()
    return tmp_path


def test_list_shows_one_aligned_row_per_episode(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["list", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    task = "put the red cube into the bowl"
    assert [line.split() for line in lines] == [
        ["episode", "group", "member", "task", "success", "steps", "versions", "lag", "world"],
        ["012300000000", "0", "0", *task.split(), "yes", "12", "0..1", "2", "3"],
        ["012411111111", "0", "1", *task.split(), "no", "16", "0..1", "2", "3"],
        ["aaaaaaaaaaaa", "1", "0", *task.split(), "no", "16", "1..2", "-", "3"],
        ["bbbbbbbbbbbb", "1", "1", *task.split(), "no", "16", "1..2", "-", "3"],
        ["4", "episodes"],
    ]
    assert len({line.index("put the") for line in lines[1:5]}) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--success"], ["0123"]),
        (["--failure"], ["0124", "aaaa", "bbbb"]),
        (["--success", "--failure"], ["0123", "0124", "aaaa", "bbbb"]),
        (["--task", "blue"], []),
        (["--sort", "steps"], ["0123", "0124", "aaaa", "bbbb"]),
        (["--task", "red", "--sort", "success"], ["0123", "0124", "aaaa", "bbbb"]),
    ],
)
def test_list_filters_and_sorts(
    run_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: list[str]
) -> None:
    assert run_inspection(["list", str(run_dir / "replay"), *flags]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()[1:-1]] == expected


def test_filtered_groups_are_shown_until_a_resume_undoes_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = EpisodeStore(run_dir / "replay", group_size=2, max_bytes=10**9)
    store.ledger.append(filtered=1, newest_version=2, successes=0)
    assert run_inspection(["list", str(run_dir)]) == 0
    lags = [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:5]]
    assert lags == ["2", "2", "filtered", "filtered"]
    assert run_inspection(["stats", str(run_dir)]) == 0
    assert "1 of 2 groups filtered" in capsys.readouterr().out
    assert run_inspection(["verify", str(run_dir)]) == 0
    store.ledger.append(ready=0)
    store.ledger.append(dropped=1, status="dropped_resume", episodes=2, stored=True)
    store.close()
    capsys.readouterr()
    assert run_inspection(["list", str(run_dir)]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:5]] == ["-"] * 4


def test_show_prints_decisions(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["show", str(run_dir), "0123"]) == 0
    out = capsys.readouterr().out
    episode = make_episode(0, 0, versions=(0, 1), success=True, video=True)
    last = out.splitlines()[-1].split()
    assert last[:4] == ["1", "1", str(episode.noise_seeds[1]), "1"]
    assert last[5] == f"{episode.logprobs[1].mean():.4f}"
    assert ["seed", str(episode.seed)] in [line.split() for line in out.splitlines()]


def test_stats_count_success_and_versions(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["stats", str(run_dir)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][-3:] == ["4", "25.0%", "15.0"]
    assert [row[:2] for row in rows[4:]] == [["0", "2"], ["1", "4"], ["2", "2"]]


@pytest.mark.parametrize(("beginning", "frames", "says"), [("0123", 16, "every"), ("a", 3, "per decision")])
def test_video_writes_a_gif_and_says_from_what(
    run_dir: Path, capsys: pytest.CaptureFixture[str], beginning: str, frames: int, says: str
) -> None:
    out = run_dir / "x.gif"
    assert run_inspection(["video", str(run_dir), beginning, str(out)]) == 0
    assert says in capsys.readouterr().out
    with Image.open(out) as image:
        assert getattr(image, "n_frames", 1) == frames
        assert image.size == (4, 4)


def test_verify_passes_a_sound_replay_and_names_a_damaged_file(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_inspection(["verify", str(run_dir)]) == 0
    path = run_dir / "replay" / "group-00000001.h5"
    whole = bytearray(path.read_bytes())
    frames = make_episode(1, 0, versions=(1, 2)).frames.tobytes()
    whole[whole.index(frames)] ^= 1
    path.write_bytes(whole)
    assert run_inspection(["verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED group-00000001.h5" in out
    assert "checksum of frames" in out
    assert "2 groups checked, 1 damaged" in out


def test_a_live_replay_can_be_inspected(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = EpisodeStore(run_dir / "replay", group_size=2, max_bytes=10**9)
    (run_dir / "replay" / "group-00000002.h5.tmp").write_bytes(b"being written")
    assert run_inspection(["list", str(run_dir)]) == 0
    assert "4 episodes" in capsys.readouterr().out
    assert run_inspection(["verify", str(run_dir)]) == 0
    store.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{empty}"], "holds no replay"),
        (["show", "{run}", "ffff"], "no stored episode"),
        (["show", "{run}", "012"], "2 episodes' ids begin with '012'"),
        (["video", "{run}", "a", "{empty}/x.mp4"], "ending in .gif"),
        (["video", "{run}", "a", "{empty}/no/x.gif"], "existing folder"),
    ],
)
def test_bad_input_is_answered_with_exit_code_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    empty = run_dir / "empty"
    empty.mkdir()
    assert run_inspection([text.format(run=run_dir, empty=empty) for text in arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_flag_exits_with_2(run_dir: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_inspection(["list", str(run_dir), "--sucess"])
    assert exit_info.value.code == 2
