"""`asyncrl doctor`: this machine in, a list of what works and what is missing out."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from asyncrl.errors import AssetError, CheckpointError

GIB: Final = 2**30
NEEDED: Final = {
    "torch": "2.11",
    "transformers": "5.17",
    "diffusers": "0.42",
    "peft": "0.18",
    "safetensors": "0.6",
    "pyzmq": "27",
    "tyro": "1.0",
    "tensorboardX": "2.6.4",
    "h5py": "3.15",
    "numpy": "2.0",
    "mujoco": "3.3.7",
    "tqdm": "4.66",
    "pillow": "11",
}
"""Lowest version of every dependency, as in pyproject.toml."""
LOW_MEMORY, LOW_DISK = 4 * GIB, 2 * GIB
SOCKET_DEADLINE = 2000
"""Milliseconds that one message may take between two sockets of this process."""


class Verdict(Enum):
    """What a finding means for training."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "BROKEN"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    text: str


def _ok(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.OK, text=text)


def _warning(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.WARNING, text=text)


def _broken(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.BROKEN, text=text)


def doctor() -> int:
    """Print the report. Returns 0 when training can run here, else 1."""
    findings = []
    for finding in examine():
        findings.append(finding)
        print(render(finding), flush=True)
    broken = [finding.name for finding in findings if finding.verdict is Verdict.BROKEN]
    print(f"\nTraining cannot run: {', '.join(broken)}." if broken else "\nTraining can run: asyncrl train")
    return int(bool(broken))


def render(finding: Finding) -> str:
    """One aligned line of the report."""
    return f"{finding.name:<14}{finding.verdict.value:<9}{finding.text}"


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after the other."""
    yield _python()
    for package in NEEDED:
        yield check_package(package, NEEDED[package])
    checks: tuple[Callable[[], Finding | None], ...] = (
        _devices,
        _torchvision,
        _opengl,
        _cores,
        _memory,
        _disk,
        _assets,
        _sockets,
    )
    for check in checks:
        if finding := check():
            yield finding


def check_package(package: str, lowest: str) -> Finding:
    """Look up an installed package and compare its version with the lowest one that works."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _broken(package, f"not installed. Install it with: pip install '{package}>={lowest}'")
    if _numbers(version) < _numbers(lowest):
        return _broken(package, f"{version} is too old. Update it with: pip install '{package}>={lowest}'")
    try:
        return _ok(package, version + _library_beneath(package))
    except (ImportError, OSError) as error:
        return _broken(package, f"{version} cannot be imported ({_one_line(error)}). Install it again.")


def _library_beneath(package: str) -> str:
    if package == "pyzmq":
        import zmq

        return f", libzmq {zmq.zmq_version()}" + ("" if zmq.has("curve") else " without CURVE encryption")
    if package == "h5py":
        import h5py

        return f", HDF5 {h5py.version.hdf5_version}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version; '2.13.0+cpu' is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return (
        _ok("Python", text) if sys.version_info >= (3, 11) else _broken("Python", f"{text}; 3.11 is needed.")
    )


def _devices() -> Finding:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torch
        except (ImportError, OSError) as error:
            return _broken("devices", f"torch cannot be imported: {_one_line(error)}. Install torch again.")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        return _ok("devices", ", ".join(f"{x.name} {x.total_memory / GIB:.0f} GiB" for x in properties))
    if torch.version.cuda and said:
        return _warning(
            "devices", f"CPU; torch is built for CUDA {torch.version.cuda}, but: {_one_line(said[0].message)}"
        )
    return _ok("devices", "CPU (no CUDA device)")


def _torchvision() -> Finding | None:
    """A torchvision built for another torch breaks transformers, which imports it when it is there."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return _warning(
            "torchvision",
            f"is installed but does not fit torch ({_one_line(error)}). asyncrl does not use it, but "
            "transformers may fail over it. Remove it with: pip uninstall torchvision",
        )
    return _ok("torchvision", f"{importlib.metadata.version('torchvision')} (not used)")


def _opengl() -> Finding:
    from asyncrl.simulators.rendering import require_backend

    try:
        return _ok("OpenGL", require_backend())
    except AssetError as error:
        return _warning(
            "OpenGL", f"{_one_line(error)} Training works without it; evaluate and collect do not."
        )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max").split()
    limit = f", limited to {int(quota[0]) / int(quota[1]):g}" if quota and quota[0] != "max" else ""
    return _ok("CPU cores", f"{count}{limit}")


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup("memory.max")
    total = min(total, int(limit)) if limit.isdecimal() else total
    if total < LOW_MEMORY:
        return _warning(
            "memory", f"{total / GIB:.1f} GiB; a learner and an actor want {LOW_MEMORY // GIB} GiB."
        )
    return _ok("memory", f"{total / GIB:.1f} GiB")


def _cgroup(name: str) -> str:
    """A limit of the container this runs in; '' where there is none."""
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else ""


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free < LOW_DISK:
        return _warning("free disk", f"{free / GIB:.1f} GiB here; set --replay.max-gigabytes below that.")
    return _ok("free disk", f"{free / GIB:.1f} GiB here")


def _assets() -> Finding:
    from asyncrl.assets import policy_folder, start_states_file, world_folder

    try:
        found = (policy_folder("tabletop"), world_folder("tabletop"), start_states_file("tabletop"))
    except CheckpointError:
        return _broken(
            "shipped files",
            "asyncrl/assets/tabletop is incomplete (policy, world, start_states.h5). Install asyncrl again, "
            "or rebuild them with torchrun_scripts/rebuild_assets.sh",
        )
    files = [
        path for root in found for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file()
    ]
    size = sum(path.stat().st_size for path in files)
    return _ok("shipped files", f"tabletop policy, world and start states, {size / 2**20:.1f} MiB")


def _sockets() -> Finding | None:
    try:
        import zmq
    except (ImportError, OSError):  # The line about pyzmq says so.
        return None
    kinds = {"loopback": "tcp://127.0.0.1:*"}
    with tempfile.TemporaryDirectory() as folder:
        if zmq.has("ipc"):
            kinds["ipc"] = f"ipc://{folder}/doctor"
        for kind, address in kinds.items():
            try:
                exchange(address)
            except (zmq.ZMQError, OSError) as error:
                return _broken("sockets", f"{kind} sockets do not work ({_one_line(error)}): allow them.")
    return _ok("sockets", " and ".join(kinds))


def exchange(address: str) -> None:
    """Send one message through a fresh pair of sockets.

    Raises:
        zmq.ZMQError: it could not be bound, or the message did not arrive in time (zmq.Again).
    """
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as receiver, context.socket(zmq.PAIR) as sender:
        for end in (receiver, sender):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVTIMEO, SOCKET_DEADLINE)
            end.setsockopt(zmq.SNDTIMEO, SOCKET_DEADLINE)
        receiver.bind(address)
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        sender.send(b"hello")
        receiver.recv()


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
