"""Find out whether there is a device to draw with, before ManiSkill is asked.

Without a Vulkan device SAPIEN cannot even build scenes that nobody draws: a material needs one. Its own
failure is a line deep in a traceback.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from typing import Any, Final

from asyncrl.errors import AssetError

PIP: Final = "pip install 'asyncrl[maniskill]'"
_REMEDY: Final = (
    "Install the GPU vendor's driver with its Vulkan part (in containers: NVIDIA_DRIVER_CAPABILITIES=all), "
    "or Mesa 24 or newer to draw on the CPU (`apt-get install mesa-vulkan-drivers`, on Debian 12 from "
    "bookworm-backports): docs/maniskill.md."
)
_RAY_TRACING: Final = "SAPIEN_DISABLE_RAY_TRACING"


def load_sapien() -> Any:
    """Import SAPIEN."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says that it brings a Vulkan loader of its own.
            importlib.import_module("sapien.render")
            return importlib.import_module("sapien")
    except ModuleNotFoundError as error:
        raise AssetError(
            f"ManiSkill's simulators need the package {error.name}, which is not installed. Install the "
            f"extra: {PIP}"
        ) from error


def require_device() -> str:
    """Return the name of the device that SAPIEN draws with.

    Raises:
        AssetError: The extra is not installed, or there is no such device: says what to install.
    """
    sapien = load_sapien()
    try:
        summary = sapien.render.get_device_summary()
    except RuntimeError as error:
        raise AssetError(
            f"There is no Vulkan device here ({error}), and ManiSkill needs one even where nothing is drawn. "
            f"{_REMEDY}"
        ) from error
    found = devices_of(summary)
    usable = [name for name, supported in found if supported]
    if usable:
        return usable[0]
    names = ", ".join(name for name, _ in found) or "none at all"
    unset = (
        f" {_RAY_TRACING} is set, which rules out CPU devices: unset it."
        if _RAY_TRACING in os.environ
        else ""
    )
    raise AssetError(f"SAPIEN can use no Vulkan device here (there is: {names}).{unset} {_REMEDY}")


def devices_of(summary: str) -> list[tuple[str, bool]]:
    r"""Read names of devices, and whether SAPIEN supports them, from its summary.

    >>> devices_of("GPU: llvmpipe (LLVM 15)\n  Supported: 1\n  Present:   0\n")
    [('llvmpipe (LLVM 15)', True)]
    """
    pairs = re.findall(r"^GPU:\s*(.*?)\s*$\s*^\s*Supported:\s*(\d)", summary, re.M)
    return [(name, flag == "1") for name, flag in pairs]
