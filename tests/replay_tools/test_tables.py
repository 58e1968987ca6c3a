"""`asyncrl replay list|show|stats|verify|prune`: tables, checks and what may be deleted."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.commands.replay import main as run_inspection
from asyncrl.records import EndReason
from asyncrl.replay_tools.episodes import find_group
from support.episodes import assert_same, simulated, with_chain
from support.recorded_run import IDS, episode_of, open_store, remove_after_listing


def shown_ids(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The first digits of the episodes in a printed table."""
    return [line[:4] for line in capsys.readouterr().out.splitlines()[1:-1]]


def test_list_shows_one_aligned_row_per_episode(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["list", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    bowl, drawer = ["put", "the", "red", "cube", "into", "the", "bowl"], ["open", "the", "drawer"]
    titles = "episode group member task success steps versions lag world group was"
    assert " ".join(lines[0].split()) == titles
    assert [line.split() for line in lines[1:]] == [
        ["012300000000", "0", "0", *bowl, "yes", "12", "0..1", "2", "3", "used"],
        ["012411111111", "0", "1", *bowl, "no", "16", "0..1", "2", "3", "used"],
        ["aaaaaaaaaaaa", "1", "0", *bowl, "no", "16", "1..2", "-", "3", "filtered"],
        ["bbbbbbbbbbbb", "1", "1", *bowl, "no", "16", "1..2", "-", "3", "filtered"],
        ["cccccccccccc", "2", "0", *drawer, "no", "16", "2", "-", "3", "unused"],
        ["dddddddddddd", "2", "1", *drawer, "yes", "12", "2", "-", "3", "unused"],
        ["eeeeeeeeeeee", "3", "0", *drawer, "no", "16", "0", "-", "3", "dropped"],
        ["ffffffffffff", "3", "1", *drawer, "no", "16", "0", "-", "3", "dropped"],
        ["8", "episodes"],
    ]
    assert len({line.index(word) for line, word in zip(lines[1:3], ["put", "put"], strict=True)}) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--success"], ["0123", "dddd"]),
        (["--no-success", "--task", "bowl"], ["0124", "aaaa", "bbbb"]),
        (["--success", "--no-success", "--task", "drawer"], ["cccc", "dddd", "eeee", "ffff"]),
        (["--task", "blue"], []),
        (["--used"], ["0123", "0124"]),
        (["--filtered"], ["aaaa", "bbbb"]),
        (["--unused"], ["cccc", "dddd", "eeee", "ffff"]),
        (["--used", "--filtered", "--success"], ["0123"]),
        (["--version", "1"], ["0123", "0124", "aaaa", "bbbb"]),
        (["--world-version", "3", "--version", "2", "--success"], ["dddd"]),
        (["--world-version", "-1"], []),
        (["--limit", "3"], ["0123", "0124", "aaaa"]),
    ],
)
def test_list_filters(run_dir: Path, capsys, flags: list[str], expected: list[str]) -> None:
    assert run_inspection(["list", str(run_dir / "replay"), *flags]) == 0
    assert shown_ids(capsys) == expected


def test_list_says_the_same_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["list", str(run_dir), "--json", "--limit", "3"]) == 0
    first, _, third = json.loads(capsys.readouterr().out)
    assert first["episode_id"] == IDS[0][0]
    assert (first["success"], first["steps"], first["lag"], first["used_at"]) == (True, 12, 2, 2)
    assert (first["oldest_version"], first["newest_version"], first["outcome"]) == (0, 1, "used")
    assert (third["lag"], third["used_at"], third["outcome"]) == (None, None, "filtered")


def test_a_resume_undoes_uses_and_filters(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(run_dir)
    store.ledger.append(ready=0)
    store.ledger.append(grant=1, actor="actor-0", turn=9, min_version=0)
    store.close()
    assert run_inspection(["list", str(run_dir), "--unused"]) == 0
    assert shown_ids(capsys) == ["0123", "0124", "aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff"]


def test_show_prints_decisions(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["show", str(run_dir), "0123"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    episode = episode_of(0, 0)
    last = lines[-1]
    assert last[:6] == ["1", "8", "1", "1", "1", "0.750"]
    assert last[6] == f"{episode.logprobs[1].mean():.4f}"
    assert last[8].startswith(f"[{episode.actions[1, 0, 0]:+.2f}")
    assert last[-1] == str(episode.noise_seeds[1])
    assert ["seed", str(episode.seed)] in lines
    assert ["start_state", "tabletop-7"] in lines
    assert ["sample", "tokens", "[2,", "8,", "7]", "int32"] in lines
    assert ["video", "16", "frames"] in lines
    assert any(" ".join(x).startswith("ended success after 12 steps (2 decisions)") for x in lines)


def test_the_tools_take_the_sample_of_any_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(open_store(tmp_path)) as store:
        store.ledger.append(grant=0, actor="actor-0", turn=0, min_version=0)
        store.enter(store.write(0, [with_chain(episode_of(0, member)) for member in range(2)]))
    assert run_inspection(["verify", str(tmp_path)]) == 0
    assert run_inspection(["stats", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run_inspection(["list", str(tmp_path), "--success"]) == 0
    assert shown_ids(capsys) == ["0123"]
    assert run_inspection(["show", str(tmp_path), "0123"]) == 0
    out = capsys.readouterr().out
    assert "denoising_chain [2, 3, 4, 6] float32, noise_steps [2] int64, kept [2, 2] uint8" in out
    assert out.splitlines()[-1].split()[:2] == ["1", "4"]


def test_show_says_why_a_failure_ended_and_that_it_was_not_used(run_dir: Path, capsys) -> None:
    assert run_inspection(["show", str(run_dir), "e"]) == 0
    out = capsys.readouterr().out
    assert "truncated after 16 steps (2 decisions) without success; the best score was 0.750" in out
    assert out.splitlines()[-1].split()[3] == "-"


def test_stats_count_success_lag_and_lengths(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["stats", str(run_dir), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["episodes"], said["successes"], said["success"], said["mean_steps"]) == (8, 2, 0.25, 15.0)
    assert said["groups"] == {"dropped": 1, "filtered": 1, "unused": 1, "used": 1}
    assert {task: each["success"] for task, each in said["by_task"].items()} == {
        "open the drawer": 0.25,
        "put the red cube into the bowl": 0.25,
    }
    assert {version: each["episodes"] for version, each in said["by_version"].items()} == {
        "0": 4,
        "1": 2,
        "2": 2,
    }
    assert said["decisions_by_lag"] == {"1": 2, "2": 2}
    assert said["episodes_by_decisions"] == {"2": 8}


def test_stats_print_bars(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspection(["stats", str(run_dir), "--task", "drawer"]) == 0
    said = capsys.readouterr().out
    assert "4 episodes, 25.0% successful" in said
    assert "open the drawer  25.0% of 4  ########\n" in said


def test_verify_passes_a_sound_replay_and_names_a_damaged_file(run_dir: Path, capsys) -> None:
    assert run_inspection(["verify", str(run_dir)]) == 0
    path = run_dir / "replay" / "group-00000001.h5"
    whole = bytearray(path.read_bytes())
    whole[whole.index(episode_of(1, 0).frames.tobytes())] ^= 1
    path.write_bytes(whole)
    assert run_inspection(["verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM group-00000001.h5: " in out
    assert "checksum of frames" in out
    assert "3 groups are readable, 1 problems" in out
    path.write_bytes(bytes(whole[:-1]))
    assert run_inspection(["list", str(run_dir)]) == 0
    captured = capsys.readouterr()
    assert "6 episodes" in captured.out
    assert "group-00000001.h5 is damaged" in captured.err


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (
            [{"used": [2], "request": "", "version": 1}],
            "used at version 1, but it holds a decision of version 2",
        ),
        ([{"used": [7], "request": "", "version": 9}], "group 7 was used or filtered, but never granted"),
        ([{"ready": 5}], "group-00000005.h5: by the ledger it waits to be used again"),
        (
            [{"dropped": 2, "status": "dropped_resume", "episodes": 2, "stored": True}],
            "group-00000002.h5: a resume deleted it, by the ledger",
        ),
    ],
)
def test_verify_compares_the_ledger_with_the_files(run_dir, capsys, entries, problem) -> None:
    store = open_store(run_dir)
    for entry in entries:
        store.ledger.append(**entry)
    store.close()
    assert run_inspection(["verify", str(run_dir)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert problem in said[0]
    assert len(said) == 2


def test_verify_finds_what_lies_in_the_wrong_place(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "replay"
    (folder / "group-00000008.h5").write_bytes((folder / "group-00000000.h5").read_bytes())
    ledger = folder / "ledger.log"
    ledger.write_text(
        "no json\n" + "".join(x for x in ledger.read_text().splitlines(True) if '"grant":2' not in x)
    )
    assert run_inspection(["verify", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert "group-00000008.h5: its header names group 0" in said
    assert "line 1 is damaged" in said
    assert "group-00000002.h5: the ledger never granted group 2" in said


def test_a_live_replay_can_be_inspected_while_files_come_and_go(run_dir: Path, capsys) -> None:
    store = open_store(run_dir)
    (run_dir / "replay" / "group-00000005.h5.tmp").write_bytes(b"being written")
    remove_after_listing(run_dir)
    for command in (["list"], ["stats"], ["verify"]):
        assert run_inspection([command[0], str(run_dir)]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
    assert run_inspection(["show", str(run_dir), "a"]) == 0
    store.close()


def test_a_folder_without_ledger_can_be_listed_but_not_verified(run_dir: Path, capsys) -> None:
    (run_dir / "replay" / "ledger.log").unlink()
    assert run_inspection(["list", str(run_dir), "--unused"]) == 0
    assert len(shown_ids(capsys)) == 8
    assert run_inspection(["verify", str(run_dir)]) == 1


def groups(run: Path) -> list[int]:
    return [int(path.stem[-8:]) for path in sorted((run / "replay").glob("group-*.h5"))]


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--keep-gigabytes", "0"], [2]),
        (["--keep-gigabytes", "1"], [0, 1, 2, 3]),
        (["--keep-gigabytes", "0", "--dry-run"], [0, 1, 2, 3]),
    ],
)
def test_prune_deletes_only_what_the_ledger_closed(run_dir, capsys, flags, left) -> None:
    assert run_inspection(["prune", str(run_dir), *flags]) == 0
    said = capsys.readouterr().out
    assert groups(run_dir) == left
    assert ("would free" in said) == ("--dry-run" in flags)
    assert run_inspection(["verify", str(run_dir)]) == 0
    with closing(open_store(run_dir)) as store:
        assert list(store.group_files) == left


def test_prune_stops_as_soon_as_the_replay_is_small_enough(run_dir: Path) -> None:
    sizes = [path.stat().st_size for path in sorted((run_dir / "replay").glob("group-*.h5"))]
    keep = (sum(sizes) - sizes[0]) / 1e9
    assert run_inspection(["prune", str(run_dir), "--keep-gigabytes", f"{keep:.9f}"]) == 0
    assert groups(run_dir) == [1, 2, 3]


def test_prune_keeps_what_a_resume_would_use_again(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "update_000002").mkdir(parents=True)
    assert run_inspection(["prune", str(run_dir), "--keep-gigabytes", "0"]) == 0
    assert groups(run_dir) == [0, 2]
    (run_dir / "checkpoints" / "update_000003").mkdir()
    assert run_inspection(["prune", str(run_dir), "--keep-gigabytes", "0"]) == 0
    assert groups(run_dir) == [2]


def test_prune_refuses_on_a_live_run_but_says_what_it_would_do(run_dir: Path, capsys) -> None:
    store = open_store(run_dir)
    assert run_inspection(["prune", str(run_dir), "--keep-gigabytes", "0"]) == 2
    assert "written by a live run" in capsys.readouterr().err
    assert run_inspection(["prune", str(run_dir), "--keep-gigabytes", "0", "--dry-run"]) == 0
    assert "3 of 4 groups" in capsys.readouterr().out
    assert groups(run_dir) == [0, 1, 2, 3]
    store.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{empty}"], "holds no replay"),
        (["show", "{run}", "ffff0"], "no stored episode"),
        (["show", "{run}", "012"], "2 episodes' ids begin with '012'"),
        (["stats", "{run}", "--task", "blue"], "no episode that fits"),
        (["sheet", "{run}", "--out", "{empty}/s.png", "--task", "blue"], "no episode that fits"),
        (["sheet", "{run}", "--out", "{empty}/s.png", "--success", "--successes", "0"], "no episode to draw"),
        (["video", "{run}", "a", "b", "--out", "{run}/x.gif"], "is one file, but 2 episodes"),
        (["video", "{run}", "a", "--out", "{run}/x.avi"], "neither an existing folder nor a name ending in"),
        (["video", "{run}", "a", "--out", "{run}/no/x.gif"], "not in an existing folder"),
    ],
)
def test_bad_input_is_answered_with_exit_code_2(run_dir, capsys, arguments, message) -> None:
    empty = run_dir / "empty"
    empty.mkdir()
    assert run_inspection([text.format(run=run_dir, empty=empty) for text in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["list", "--sucess"],
        ["prune"],
        ["sheet", "--out", "stats.jpg"],
        ["sheet", "--out", "no/s.png"],
        ["sheet", "--out", "s.png", "--successes", "-1"],
        ["sheet"],
        ["export", "--format", "robomimic", "--out", "x.txt"],
        ["export", "--format", "robomimic", "--out", "no/x.h5"],
        ["export", "--format", "lerobot", "--out", "/tmp"],
    ],
)
def test_flags_that_cannot_work_exit_with_2(run_dir: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_inspection([flags[0], str(run_dir), *flags[1:]])
    assert exit_info.value.code == 2


def test_the_tools_take_episodes_of_a_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends: tuple[EndReason, ...] = ("terminated", "success")
    with closing(open_store(tmp_path)) as store:
        store.ledger.append(grant=0, actor="actor-0", turn=0, min_version=0)
        group = [simulated(episode_of(0, i), steps=10 + i, end=end) for i, end in enumerate(ends)]
        store.enter(store.write(0, group))
    assert run_inspection(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run_inspection(["stats", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["successes"], said["mean_steps"], said["episodes_by_decisions"]) == (1, 10.5, {"2": 2})
    assert run_inspection(["list", str(tmp_path), "--json"]) == 0
    assert [(e["end_reason"], e["steps"]) for e in json.loads(capsys.readouterr().out)] == [
        ("terminated", 10),
        ("success", 11),
    ]
    assert run_inspection(["show", str(tmp_path), "0123"]) == 0
    out = capsys.readouterr().out
    assert "terminated after 10 steps (2 decisions) in a simulator" in out
    assert "[2, 3]" in next(line for line in out.splitlines() if line.startswith("states"))
    for command in ("verify", "list"):
        assert run_inspection([command, str(tmp_path)]) == 0
    for member, (one, other) in enumerate(zip(find_group(tmp_path / "replay", 0), group, strict=True)):
        assert (one.member, one.steps) == (member, 10 + member)
        assert_same(one, other)
