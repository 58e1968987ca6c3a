"""Check Python and the installed packages against the lowest versions that work."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from typing import Final

from asyncrl.doctor.findings import Examination, Finding, broken, ok, one_line, warning

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


def check_python(_: Examination) -> Finding:
    """Check whether this Python is new enough."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return ok("Python", text) if sys.version_info >= (3, 11) else broken("Python", f"{text}; 3.11 is needed.")


def check_package(package: str, lowest: str) -> Finding:
    """Look up an installed package and compare its version with the lowest one that works."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return broken(package, "not installed.", f"Install it with: pip install '{package}>={lowest}'")
    if numbers(version) < numbers(lowest):
        return broken(package, f"{version} is too old.", f"Update it with: pip install '{package}>={lowest}'")
    try:
        return ok(package, version + _library_beneath(package))
    except (ImportError, OSError) as error:
        return broken(package, f"{version} cannot be imported ({one_line(error)}).", "Install it again.")


def _library_beneath(package: str) -> str:
    if package == "pyzmq":
        import zmq

        return f", libzmq {zmq.zmq_version()}" + ("" if zmq.has("curve") else " without CURVE encryption")
    if package == "h5py":
        import h5py

        return f", HDF5 {h5py.version.hdf5_version}"
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """Read the leading numbers of a version; '2.13.0+cpu' is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_torchvision(_: Examination) -> Finding | None:
    """Check torchvision: one built for another torch breaks transformers, which imports it."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return warning(
            "torchvision",
            f"is installed but does not fit torch ({one_line(error)}).",
            "asyncrl does not use it, but transformers may fail over it. Remove it with: "
            "pip uninstall torchvision",
        )
    return ok("torchvision", f"{importlib.metadata.version('torchvision')} (not used)")
