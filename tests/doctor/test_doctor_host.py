"""`asyncrl doctor` about this host's disk, ports, temporary folder and keys: everything failing for real."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.doctor import host
from asyncrl.doctor.checks import Examination, Finding, Verdict
from asyncrl.messaging.keys import create_keys
from support.doctor_sizes import sizes

SIZES = sizes(policy=10**7, trained=10**6, frame=3 * 64 * 64)


def examination(run: Path, **replay) -> Examination:
    return Examination(config=TrainConfig(run_dir=str(run), replay=ReplaySettings(**replay)), sizes=SIZES)


def certain(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


# --- the disk ---


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
    assert host.check_run_folder(examination(tmp_path / "new" / "run")).verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    taken = host.check_run_folder(examination(tmp_path / "old"))
    assert taken.verdict is Verdict.BROKEN
    assert "add --resume" in taken.seen
    no_disk = host.check_run_folder(examination(Path("/proc/asyncrl-run")))
    assert no_disk.verdict is Verdict.BROKEN


def test_the_template_of_run_folders_lies_beside_them(tmp_path: Path) -> None:
    fine = host.check_run_folder(examination(tmp_path / "{time}" / "deeper"))
    assert fine.verdict is Verdict.OK
    assert host.existing_parent(tmp_path / "a" / "b") == tmp_path


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


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/data/runs", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/fast/me", "tmpfs"),
        ("/homework", "ext4"),
        ("/with blank/x", "fuse.s3fs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(place: str, kind: str) -> None:
    assert host.kind_of(Path(place), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_network_file_system_is_a_warning(tmp_path: Path, monkeypatch, kind: str) -> None:
    assert certain(host.check_file_system(examination(tmp_path))).verdict is Verdict.OK
    monkeypatch.setattr(host, "kind_of", lambda place, mounts: kind)
    finding = certain(host.check_file_system(examination(tmp_path)))
    assert finding.verdict is Verdict.WARNING
    assert finding.seen.startswith(f"{kind} in {tmp_path}")


def test_a_lock_that_keeps_nobody_out_is_broken(tmp_path: Path, monkeypatch) -> None:
    assert host.check_locks(examination(tmp_path)).verdict is Verdict.OK
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert host.check_locks(examination(tmp_path)).verdict is Verdict.BROKEN


# --- sockets and ports ---


def test_a_socket_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    host.exchange(f"ipc://{tmp_path}/works")
    with pytest.raises(zmq.ZMQError):
        host.exchange(f"ipc://{tmp_path}/no-such-folder/x")


def test_a_taken_port_is_broken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = examination(tmp_path, listen=f"tcp://127.0.0.1:{port}")
        finding = certain(host.check_listen(taken))
        assert finding.verdict is Verdict.BROKEN
        assert f"127.0.0.1:{port}: it cannot be opened (Address already in use)" in finding.seen
        assert f"ss -ltnp 'sport = :{port}'" in finding.advice
    assert certain(host.check_listen(taken)).verdict is Verdict.OK


def test_an_address_of_another_host_is_broken(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys", ["learner", "actor-0"])
    finding = certain(
        host.check_listen(examination(tmp_path, listen="tcp://192.0.2.7:5555", keys=str(tmp_path / "keys")))
    )
    assert finding.verdict is Verdict.BROKEN
    assert "192.0.2.7:5555: it cannot be opened (Cannot assign requested address)" in finding.seen


def test_an_address_without_keys_is_refused_as_training_would(tmp_path: Path) -> None:
    finding = certain(host.check_listen(examination(tmp_path, listen="tcp://192.0.2.7:5555")))
    assert finding.verdict is Verdict.BROKEN
    assert "--replay.keys" in finding.seen
    assert host.check_listen(examination(tmp_path)) is None


def test_a_temporary_folder_with_a_long_path_is_broken(tmp_path: Path, monkeypatch) -> None:
    assert host.check_temporary_folder(examination(tmp_path)).verdict is Verdict.OK
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    finding = host.check_temporary_folder(examination(tmp_path))
    assert finding.verdict is Verdict.BROKEN
    assert "Set TMPDIR to a shorter folder" in finding.seen
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert host.check_temporary_folder(examination(tmp_path)).verdict is Verdict.BROKEN


# --- keys ---


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys", ["learner", "actor-0", "someone"])
    return tmp_path / "keys"


def about_keys(keys: Path) -> Finding:
    return certain(host.check_keys(examination(keys.parent, listen="tcp://127.0.0.1:5555", keys=str(keys))))


def test_the_admitted_clients_are_named(keys: Path) -> None:
    finding = about_keys(keys)
    assert finding.verdict is Verdict.OK
    assert finding.seen == f"{keys}: 3 clients are admitted: actor-0, learner, someone"
    assert host.check_keys(examination(keys.parent)) is None


def test_a_secret_with_mode_0644_is_broken(keys: Path) -> None:
    (keys / "actor-0.secret").chmod(0o644)
    finding = about_keys(keys)
    assert finding.verdict is Verdict.BROKEN
    assert f"chmod 600 {keys / 'actor-0.secret'}" in finding.seen


def test_keys_that_are_missing_or_of_another_pair_are_broken(keys: Path) -> None:
    (keys / "clients" / "actor-0.public").unlink()
    assert "public key of actor-0 is not in its folder" in about_keys(keys).seen
    for path in (keys / "clients").iterdir():
        path.unlink()
    assert "nobody would be admitted" in about_keys(keys).seen
    (keys / "server.public").write_bytes(zmq.curve_keypair()[0])
    assert "does not belong to server.secret" in about_keys(keys).seen
    (keys / "server.secret").unlink()
    finding = about_keys(keys)
    assert finding.verdict is Verdict.BROKEN
    assert "server.secret cannot be read" in finding.seen
