"""Check memory, limits, disk and network of this host. No torch."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.checks import Examination, Finding, Sizes, broken, ok, one_line, warning
from asyncrl.errors import AssetError, ConfigError
from asyncrl.launch import endpoints
from asyncrl.launch.job import Hosts, Job
from asyncrl.launch.placement import Placement, parse_placement, ranks_named
from asyncrl.storage import run_folder
from asyncrl.storage.run_folder import check_folder

GIB: Final = 2**30
LOW_MEMORY: Final = 4 * GIB
SHARED: Final = Path("/dev/shm")  # noqa: S108
BULK: Final = 64 * 10**6  # bytes written to measure the speed
SYNCS_PER_GROUP: Final = 4  # The group's file, its folder, and the ledger's lines of its grant and its use
SLOW: Final = 10.0  # Seconds to store the groups of one update, above which the learner waits for the disk
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs"}
)
"""File systems on which a rename and a sync may not survive a crash; also all of fuse.*."""


def check_opengl(_: Examination) -> Finding:
    """Check that MuJoCo can draw."""
    from asyncrl.simulators.rendering import require_backend

    try:
        return ok("OpenGL", require_backend())
    except AssetError as error:
        return warning("OpenGL", one_line(error), "Training works without it; evaluate and collect do not.")


def check_memory(_: Examination) -> Finding:
    """Check cores and total memory of this process, within its container's limits."""
    quota, limit = _cgroup("cpu.max").split(), _cgroup("memory.max")
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if quota and quota[0] != "max":
        cores += f", limited to {int(quota[0]) / int(quota[1]):g}"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = min(total, int(limit)) if limit.isdecimal() else total
    seen = f"{total / GIB:.1f} GiB, {cores}"
    if total < LOW_MEMORY:
        return warning("memory", f"{seen}.", f"A learner and an actor want {LOW_MEMORY // GIB} GiB.")
    return ok("memory", seen)


def free_memory() -> int:
    """Return the bytes of memory that this process can still allocate."""
    meminfo = Path("/proc/meminfo")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meminfo.is_file():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def _cgroup(name: str) -> str:
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else ""


def check_shared_memory(_: Examination, folder: Path = SHARED, gpus: int | None = None) -> Finding:
    """Check the shared memory that NCCL may use between `gpus` GPUs; None: as many as the driver lists."""
    usage = shutil.disk_usage(folder) if folder.is_dir() else None
    free, total = (usage.free, usage.total) if usage else (0, 0)
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in {folder}"
    if (len(list(Path("/dev").glob("nvidia[0-9]*"))) if gpus is None else gpus) < 2:
        return ok("shared memory", f"{seen} (needed between several GPUs only)")
    if free < GIB:  # NCCL moves data through it between GPUs without peer access.
        seen += "; NCCL may want 1 GiB between GPUs."
        advice = "Start the container with --shm-size=8g, or delete what was left there."
        return warning("shared memory", seen, advice)
    return ok("shared memory", seen)


def existing_parent(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _disk_folder(config: TrainConfig) -> Path:
    return existing_parent(Path(config.run_dir.partition(run_folder.TIME)[0] or ".").expanduser())


def _scratch(config: TrainConfig) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=".asyncrl-doctor-", dir=_disk_folder(config))


def check_run_folder(examination: Examination) -> Finding:
    """Check that the run's folder can be made, or found with --resume."""
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
    """Compare the largest size of replay and checkpoints with the free space."""
    config, folder = examination.config, _disk_folder(examination.config)
    free = shutil.disk_usage(folder).free + _held(config)
    # While a checkpoint is written, all kept ones are still there.
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
    if not config.resume:
        return 0
    try:
        folder = run_folder.locate(config)
    except ConfigError:  # Reported by the check of the run folder.
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_disk_speed(examination: Examination) -> Finding:
    """Measure writing and syncing; one update's groups must be stored within `SLOW` seconds."""
    config = examination.config
    with _scratch(config) as folder:
        speed = BULK / _seconds_to_write(Path(folder) / "bulk", os.urandom(1 << 20) * (BULK >> 20))
        syncs = [_seconds_to_write(Path(folder) / f"small-{n}", bytes(256)) for n in range(10)]
    sync = statistics.median(syncs)
    seen = f"writes {speed / 1e6:.0f} MB/s, a sync of a small file takes {1000 * sync:.1f} ms"
    if examination.sizes is None:
        return ok("disk speed", seen)
    seconds = seconds_per_update(config, examination.sizes, speed, sync)
    seen += f"; one update's groups are stored in {seconds:.2g} s"
    if seconds > SLOW:
        seen += f", more than {SLOW:g}: the replay could not keep up."
        return warning("disk speed", seen, "Choose a local disk with --run-dir.")
    return ok("disk speed", seen)


def seconds_per_update(config: TrainConfig, sizes: Sizes, speed: float, sync: float) -> float:
    """Estimate the seconds to store the groups of one update at `speed` bytes per second."""
    decisions, spec = config.actor.max_decisions, sizes.action_spec
    pictures = decisions + 1.0
    if config.replay.keep_video_every:
        pictures += decisions * spec.chunk / config.replay.keep_video_every
    # Tokens, log-probs, actions; rewards, scores.
    arrays = decisions * spec.chunk * (3 * 4 * spec.dim + 8)
    group = config.algorithm.group_size * (pictures * sizes.frame + arrays)
    return config.algorithm.groups_per_update * (group / speed + SYNCS_PER_GROUP * sync)


def _seconds_to_write(path: Path, content: bytes) -> float:
    begin = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def check_file_system(examination: Examination) -> Finding:
    """Warn of a network file system."""
    folder = _disk_folder(examination.config)
    kind = kind_of(folder.resolve(), Path("/proc/mounts").read_text())
    if kind in NETWORK or kind.startswith("fuse"):
        return warning(
            "file system",
            f"{kind} in {folder}: whether a synced and renamed file survives a crash is up to its server.",
            "Choose a local disk with --run-dir, and copy the run afterwards.",
        )
    return ok("file system", f"{kind} in {folder}")


def kind_of(path: Path, mounts: str) -> str:
    r"""Return the type of the file system of `path`; 'unknown' if no line of /proc/mounts has it.

    >>> kind_of(Path("/home/me/runs"), "disk / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n")
    'nfs4'
    """
    kind, longest = "unknown", -1
    for line in mounts.splitlines():
        point, found = line.split()[1:3]
        point = point.encode().decode("unicode_escape")  # A blank in a path is written \040.
        if path.is_relative_to(point) and len(point) >= longest:  # A later mount hides an earlier one.
            kind, longest = found, len(point)
    return kind


def placement_of(config: TrainConfig) -> Placement:
    """Return the placement of a run that `asyncrl train` starts with these settings."""
    joined = bool(config.replay.listen)
    return parse_placement(config.placement, ranks_named(config.placement), joined=joined)


def check_network(examination: Examination) -> Finding | None:
    """Check that the replay can listen, and admits this run's processes; None without --replay.listen."""
    config = examination.config
    if not config.replay.listen:
        return None
    try:
        endpoints.check(config, placement_of(config), Hosts(), Job())
    except ConfigError as error:
        return broken("network", one_line(error))
    keys = endpoints.server_keys(config.replay.keys)
    admitted = f"; {len(keys.allowed)} clients are admitted" if keys else ""
    return ok("network", f"{config.replay.listen} is an address of this host, and the port is free{admitted}")
