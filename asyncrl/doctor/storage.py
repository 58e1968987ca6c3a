"""Check the disk beneath --run-dir: space, speed, the kind of file system, locks. No torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.findings import Examination, Finding, Sizes, broken, ok, one_line, warning
from asyncrl.doctor.host import GIB
from asyncrl.errors import ConfigError
from asyncrl.storage import run_folder
from asyncrl.storage.folder_check import check_folder

BULK: Final = 64 * 10**6
"""Bytes written to measure the speed."""
SMALL: Final = 256
SMALL_FILES: Final = 10
SYNCS_PER_GROUP: Final = 4
"""The group's file, its folder, and the ledger's lines of its grant and its use."""
SLOW: Final = 10.0
"""Seconds. Where storing the groups of one update takes longer, the learner would wait for the disk."""
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs"}
)
"""File systems on which a rename and a sync may mean less than on a disk; all of fuse.* besides."""


def existing_parent(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _disk_folder(config: TrainConfig) -> Path:
    return existing_parent(Path(config.run_dir.partition(run_folder.TIME)[0] or ".").expanduser())


@contextmanager
def _scratch(config: TrainConfig) -> Iterator[Path]:
    """Make a folder for a moment, on the disk of the run."""
    with tempfile.TemporaryDirectory(prefix=".asyncrl-doctor-", dir=_disk_folder(config)) as folder:
        yield Path(folder)


def check_run_folder(examination: Examination) -> Finding:
    """Check whether the run's folder could be made, or found with --resume."""
    config = examination.config
    try:
        folder = run_folder.locate(config)
        if config.resume:
            check_folder(folder)
        with _scratch(config):
            pass
    except ConfigError as error:
        return broken("run folder", one_line(error))
    except OSError as error:
        return broken("run folder", f"{one_line(error)}.", "Choose another --run-dir.")
    return ok("run folder", f"{folder} can be {'used' if config.resume else 'made'}")


def check_free_disk(examination: Examination) -> Finding:
    """Compare what replay and checkpoints may come to with what is free."""
    config, folder = examination.config, _disk_folder(examination.config)
    free = shutil.disk_usage(folder).free + _held(config)
    # While a checkpoint is written, all that are kept still lie there.
    checkpoints = (config.keep_checkpoints + 1) * examination.sizes.checkpoint if examination.sizes else 0
    replay = int(config.replay.max_gigabytes * 1e9)
    size = f"{checkpoints / GIB:.2f}" if examination.sizes else "an unknown size"
    seen = (
        f"{free / GIB:.1f} GiB in {folder}{', with what the run has already' * config.resume}; "
        f"the replay may take {replay / GIB:.1f}, {config.keep_checkpoints + 1} checkpoints {size}"
    )
    if free < checkpoints:
        advice = "Free space, lower --keep-checkpoints, or choose another --run-dir."
        return broken("free disk", f"{seen}: the run would end at a checkpoint.", advice)
    if free < checkpoints + replay:
        advice = "Lower --replay.max-gigabytes, or choose another --run-dir."
        return warning("free disk", f"{seen}: actors would wait for space.", advice)
    return ok("free disk", seen)


def _held(config: TrainConfig) -> int:
    """Count the bytes that a run to be resumed has on the disk already."""
    if not config.resume:
        return 0
    try:
        folder = run_folder.locate(config)
    except ConfigError:  # The line about the run folder says so.
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_disk_speed(examination: Examination) -> Finding:
    """Measure writing and syncing, and judge them by the time that one update's groups take.

    Rule: groups per update x (bytes of a group / speed + 4 syncs) is at most `SLOW` seconds.
    """
    config = examination.config
    with _scratch(config) as folder:
        speed = BULK / _seconds_to_write(folder / "bulk", os.urandom(1 << 20) * (BULK >> 20))
        syncs = [_seconds_to_write(folder / f"small-{n}", bytes(SMALL)) for n in range(SMALL_FILES)]
    sync = statistics.median(syncs)
    seen = f"writes {speed / 1e6:.0f} MB/s, a sync of a small file takes {1000 * sync:.1f} ms"
    if examination.sizes is None:
        return ok("disk speed", seen)
    seconds = seconds_per_update(config, examination.sizes, speed, sync)
    seen += f"; one update's groups are stored in {seconds:.2g} s"
    if seconds > SLOW:
        return warning(
            "disk speed",
            f"{seen}, more than {SLOW:g}: the replay could not keep up.",
            "Choose a local disk with --run-dir.",
        )
    return ok("disk speed", seen)


def seconds_per_update(config: TrainConfig, sizes: Sizes, speed: float, sync: float) -> float:
    """Estimate how long the replay writes for the groups of one update.

    Args:
        config: Of the run.
        sizes: Of its models.
        speed: Bytes per second.
        sync: Seconds of one sync.
    """
    decisions, spec = config.actor.max_decisions, sizes.action_spec
    pictures = decisions + 1.0
    if config.replay.keep_video_every:
        pictures += decisions * spec.chunk / config.replay.keep_video_every
    numbers = decisions * spec.chunk * (3 * 4 * spec.dim + 8)  # Tokens, log-probs, actions; rewards, scores.
    group = config.algorithm.group_size * (pictures * sizes.frame + numbers)
    return config.algorithm.groups_per_update * (group / speed + SYNCS_PER_GROUP * sync)


def _seconds_to_write(path: Path, content: bytes) -> float:
    begin = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def check_file_system(examination: Examination) -> Finding | None:
    """Warn of a network file system; None where the mounts are not known."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return None
    folder = _disk_folder(examination.config)
    kind = kind_of(folder.resolve(), mounts.read_text())
    if kind in NETWORK or kind.startswith("fuse"):
        return warning(
            "file system",
            f"{kind} in {folder}: whether a synced and renamed file survives a crash is up to its server.",
            "Choose a local disk with --run-dir, and copy the run afterwards.",
        )
    return ok("file system", f"{kind} in {folder}")


def kind_of(path: Path, mounts: str) -> str:
    r"""Read the type of the file system that `path` lies on; 'unknown' where no line of /proc/mounts has it.

    >>> kind_of(Path("/home/me/runs"), "disk / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n")
    'nfs4'
    """
    kind, longest = "unknown", -1
    for line in mounts.splitlines():
        point, found = line.split()[1:3]
        point = point.encode().decode("unicode_escape")  # A blank in a path is written \040.
        if path.is_relative_to(point) and len(point) >= longest:  # Of two on one point the later is seen.
            kind, longest = found, len(point)
    return kind


def check_locks(examination: Examination) -> Finding:
    """Check whether a lock of one holder keeps another one out: it guards the replay against two writers."""
    advice = "Choose a local disk with --run-dir."
    with _scratch(examination.config) as folder, (folder / "lock").open("w") as first:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return broken("file locks", f"do not work here ({error.strerror}).", advice)
        if not is_held(folder / "lock"):
            return broken("file locks", "do not keep a second writer out here.", advice)
    return ok("file locks", "work")


def is_held(path: Path) -> bool:
    """Tell whether somebody holds the lock of a file."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
