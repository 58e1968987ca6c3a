"""Check the host: cores, memory, shared memory, open files and OpenGL. No torch."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Final

from asyncrl.doctor.findings import Examination, Finding, ok, one_line, warning
from asyncrl.errors import AssetError
from asyncrl.launch.placement import ranks_named

GIB: Final = 2**30
LOW_MEMORY: Final = 4 * GIB
SHARED: Final = Path("/dev/shm")  # noqa: S108
LOW_SHARED: Final = GIB
"""NCCL moves data through shared memory between GPUs that cannot reach each other directly."""
OPEN_FILES: Final = 256
"""What one process may open, with room to spare: rank 0 of a run of two ranks was seen with 42 at most."""
OPEN_FILES_PER_RANK: Final = 32
"""Connections and pipes that rank 0 opens for each further rank, likewise."""


def check_opengl(_: Examination) -> Finding:
    """Check whether MuJoCo can draw."""
    from asyncrl.simulators.rendering import require_backend

    try:
        return ok("OpenGL", require_backend())
    except AssetError as error:
        return warning("OpenGL", one_line(error), "Training works without it; evaluate and collect do not.")


def check_cores(_: Examination) -> Finding:
    """Check how many cores there are for this process."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max").split()
    limit = f", limited to {int(quota[0]) / int(quota[1]):g}" if quota and quota[0] != "max" else ""
    return ok("CPU cores", f"{count}{limit}")


def check_memory(_: Examination) -> Finding:
    """Check how much memory there is for this process, in all."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup("memory.max")
    total = min(total, int(limit)) if limit.isdecimal() else total
    seen = f"{total / GIB:.1f} GiB"
    if total < LOW_MEMORY:
        return warning("memory", f"{seen}.", f"A learner and an actor want {LOW_MEMORY // GIB} GiB.")
    return ok("memory", seen)


def free_memory() -> int:
    """Read the bytes of memory that this process could still get."""
    meminfo = Path("/proc/meminfo")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meminfo.is_file():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def _cgroup(name: str) -> str:
    """Read a limit of the container this runs in; '' where there is none."""
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else ""


def gpus_of_host() -> int:
    """Count the NVIDIA GPUs that the driver shows; asked without torch."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_shared_memory(_: Examination, folder: Path = SHARED, gpus: int | None = None) -> Finding:
    """Check whether several GPUs have the shared memory that NCCL may use between them.

    Args:
        folder: Where shared memory is mounted.
        gpus: None: as many as the host has.
    """
    usage = shutil.disk_usage(folder) if folder.is_dir() else None
    free, total = (usage.free, usage.total) if usage else (0, 0)
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in {folder}"
    if (gpus_of_host() if gpus is None else gpus) < 2:
        return ok("shared memory", f"{seen} (needed between several GPUs only)")
    if free < LOW_SHARED:
        advice = "Start the container with --shm-size=8g, or delete what was left there."
        return warning(
            "shared memory", f"{seen}; NCCL may want {LOW_SHARED // GIB} GiB between GPUs.", advice
        )
    return ok("shared memory", seen)


def check_open_files(examination: Examination) -> Finding:
    """Check whether a process may open as many files as it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * ranks_named(examination.config.placement)
    most = "any number" if hard == resource.RLIM_INFINITY else f"{hard}"
    seen = f"{soft} of {most} per process"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return warning("open files", f"{seen}; a run wants {needed}.", f"Raise it: ulimit -n {needed}")
    return ok("open files", seen)
