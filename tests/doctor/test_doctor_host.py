"""`asyncrl doctor` about this host's disk, network and links between devices: everything failing for real."""

import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.doctor import host
from asyncrl.doctor.checks import Examination, Finding, Verdict
from asyncrl.doctor.links import Result, judge, measure
from asyncrl.messaging.keys import create_keys
from support.doctor_sizes import sizes
from support.link_members import PIDS, die, fail, hang

SIZES = sizes(policy=10**7, trained=10**6, frame=3 * 64 * 64)


def examination(run: Path, **replay) -> Examination:
    return Examination(config=TrainConfig(run_dir=str(run), replay=ReplaySettings(**replay)), sizes=SIZES)


def certain(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def test_a_replay_larger_than_the_disk_is_a_warning_with_numbers(tmp_path: Path) -> None:
    fits = host.check_free_disk(examination(tmp_path / "run", max_gigabytes=0.01))
    assert fits.verdict is Verdict.OK
    finding = host.check_free_disk(examination(tmp_path / "run", max_gigabytes=1e9))
    assert finding.verdict is Verdict.WARNING
    assert "the replay may take 931322574.6, 4 checkpoints 0.08: actors would wait" in finding.seen
    assert "--replay.max-gigabytes" in finding.advice


def test_checkpoints_larger_than_the_disk_are_broken(tmp_path: Path) -> None:
    looked_at = examination(tmp_path / "run")
    looked_at.sizes = sizes(policy=10**18)
    finding = host.check_free_disk(looked_at)
    assert finding.verdict is Verdict.BROKEN
    assert "--keep-checkpoints" in finding.advice


def test_a_run_folder_that_cannot_be_made_is_broken(tmp_path: Path) -> None:
    for new in (tmp_path / "new" / "run", tmp_path / "{time}" / "deeper"):
        assert host.check_run_folder(examination(new)).verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    taken = host.check_run_folder(examination(tmp_path / "old"))
    assert taken.verdict is Verdict.BROKEN
    assert "add --resume" in taken.seen
    no_disk = host.check_run_folder(examination(Path("/proc/asyncrl-run")))
    assert no_disk.verdict is Verdict.BROKEN


def test_the_speed_of_the_disk_is_measured_and_judged(tmp_path: Path, monkeypatch) -> None:
    assert host.check_disk_speed(examination(tmp_path / "run")).verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(host, "SLOW", 1e-6)  # No disk is as fast.
    slow = host.check_disk_speed(examination(tmp_path / "run"))
    assert slow.verdict is Verdict.WARNING
    assert "the replay could not keep up" in slow.seen


def test_the_time_of_an_update_counts_bytes_and_syncs() -> None:
    config = TrainConfig(replay=ReplaySettings(keep_video_every=0), actor=ActorSettings(max_decisions=6))
    frame = 3 * 64 * 64
    groups, members, decisions = 16, 8, 6
    numbers = decisions * 8 * (7 * (4 + 4 + 4) + 4 + 4)
    group = members * ((decisions + 1) * frame + numbers)
    expected = groups * (group / 1e6 + 4 * 0.01)
    assert host.seconds_per_update(config, SIZES, 1e6, 0.01) == pytest.approx(expected)
    with_video = TrainConfig(replay=ReplaySettings(keep_video_every=16), actor=ActorSettings(max_decisions=6))
    more = groups * members * decisions * 8 / 16 * frame / 1e6
    assert host.seconds_per_update(with_video, SIZES, 1e6, 0.01) == pytest.approx(expected + more)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/fast tmpfs rw 0 0
bucket /with\\040blank fuse.s3fs rw 0 0
"""


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    places = ("/home/me", "/home/fast/me", "/homework", "/with blank/x")
    kinds = [host.kind_of(Path(place), MOUNTS) for place in places]
    assert kinds == ["nfs4", "tmpfs", "ext4", "fuse.s3fs"]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_network_file_system_is_a_warning(tmp_path: Path, monkeypatch, kind: str) -> None:
    assert certain(host.check_file_system(examination(tmp_path))).verdict is Verdict.OK
    monkeypatch.setattr(host, "kind_of", lambda place, mounts: kind)
    finding = certain(host.check_file_system(examination(tmp_path)))
    assert finding.verdict is Verdict.WARNING
    assert finding.seen.startswith(f"{kind} in {tmp_path}")


def test_a_taken_port_an_address_without_keys_and_a_client_that_is_not_admitted_are_broken(tmp_path) -> None:
    assert host.check_network(examination(tmp_path)) is None
    create_keys(tmp_path / "keys", ["learner", "actor-0", "someone"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        admitting = examination(tmp_path, listen=listen, keys=str(tmp_path / "keys"))
        taken = certain(host.check_network(admitting))
    fine = certain(host.check_network(admitting))
    assert (fine.verdict, fine.seen.endswith("free; 3 clients are admitted")) == (Verdict.OK, True)
    without = certain(host.check_network(examination(tmp_path, listen="tcp://192.0.2.7:5555")))
    (tmp_path / "keys" / "clients" / "actor-0.public").unlink()
    shut_out = certain(host.check_network(admitting))
    for finding, words in (
        (taken, "it cannot be opened (Address already in use)"),
        (without, "--replay.keys"),
        (shut_out, "public key of actor-0 is not in its folder"),
    ):
        assert finding.verdict is Verdict.BROKEN
        assert words in finding.seen


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PIDS, str(tmp_path))
    return tmp_path


def living(pids: Path) -> list[str]:
    """Process ids of children that have not ended."""
    found = []
    for path in pids.iterdir():
        status = Path("/proc") / path.name / "status"
        if status.exists() and "\nState:\tZ" not in status.read_text():
            found.append(path.name)
    return found


def test_pairs_that_hang_are_named_and_their_processes_killed(pids: Path) -> None:
    results = measure(["a", "b", "c"], 1, 1, pair_deadline=0.3, serve=hang)
    assert [result.pair for result in results] == ["a - b", "b - c", "a - c"]
    assert results[0].problem == "hangs (a gave no answer in time)"
    assert all(result.problem.startswith("hangs") for result in results)
    assert len(list(pids.iterdir())) == 6  # Two new children for every pair after the first.
    assert living(pids) == []
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.BROKEN
    assert "3 of 3 failed: a - b hangs" in finding.seen
    assert "NCCL_DEBUG=INFO" in finding.advice


@pytest.mark.parametrize(
    ("serve", "words"), [(die, "ended with code 7"), (fail, "no such device")], ids=["die", "fail"]
)
def test_a_process_that_cannot_is_named(pids: Path, serve: Any, words: str) -> None:
    (result,) = measure(["a", "b"], 1, 1, serve=serve)
    assert words in result.problem
    assert living(pids) == []


def test_pairs_without_time_are_named_and_not_begun(pids: Path) -> None:
    results = measure(["a", "b"], 1, 1, deadline=0.1, pair_deadline=1.0, serve=hang)
    assert results == [Result(pair="a - b", tested=False)]
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.WARNING
    assert "no time for a - b" in finding.seen


def test_the_slowest_pair_is_named() -> None:
    results = [Result(pair="a - b", rates=(300.0, 200.0)), Result(pair="a - c", rates=(20.0, 250.0))]
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.OK
    assert finding.seen == ("nccl, 64 MiB each way: lowest 20 GB/s (a - c); all: a - b 300/200, a - c 20/250")
