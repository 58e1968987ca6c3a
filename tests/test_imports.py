"""Imports point down the floors of docs/architecture.md, never in a circle; light packages stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
FLOORS: list[set[str]] = [
    {"errors"},
    {"storage.untrusted", "facts"},
    {"records", "registry", "storage.atomic"},
    {"episode_layout", "storage.assets"},
    {"observability"},
    {"config", "devices", "messaging", "storage.run_owner"},
    {"storage", "weights", "simulators"},
    {"policies", "worlds", "rewards", "replay"},
    {"actors", "learner", "fitting", "evaluation", "replay_tools"},
    {"launch"},
    {"doctor"},
    {"commands"},
    {"cli"},
]
"""Lowest first. A part imports only what is on a lower floor than its own. A module can be one by itself."""
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
LIGHT = (
    "errors",
    "registry",
    "records",
    "episode_layout",
    "config",
    "observability",
    "messaging",
    "replay",
    "replay_tools",
    "cli",
    "commands.doctor",
    "commands.replay",
)
"""Import neither torch nor a library of models or physics."""
HEAVY = {"torch", "transformers", "diffusers", "mujoco", "pyarrow", "av"}


def part_of(file: Path) -> str:
    """First name below asyncrl, a package or a module of the top level, or the module that `FLOORS` names."""
    return part_named(".".join(("asyncrl", *file.relative_to(ROOT).with_suffix("").parts)))


def part_named(module: str) -> str:
    """The part of 'asyncrl.package.module', or of a name in that module."""
    first, *rest = module.split(".")[1:]
    alone = ".".join([first, *rest[:1]])
    return alone if alone in FLOOR else first


def modules_imported(file: Path) -> set[str]:
    """Dotted names of asyncrl that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name for name in found if name.startswith("asyncrl.")}


KINDS = {"wan", "opensora", "evac"}
OWN_FLOORS = ("asyncrl.worlds.", "asyncrl.fitting.")
"""Parts that may know kinds of worlds by name."""


FILES = [file for file in ROOT.rglob("*.py") if part_of(file) not in ("__init__", "__main__")]
BY_NAME = {".".join(("asyncrl", *file.relative_to(ROOT).with_suffix("").parts)): file for file in FILES}


@pytest.mark.parametrize("part", sorted({part_of(file) for file in FILES}))
def test_imports_point_down(part: str) -> None:
    used = {
        part_named(name)
        for file in FILES
        if part_of(file) == part
        for name in modules_imported(file)
        if name.split(".")[1] != "__version__"
    }
    upward = {name for name in used - {part} if FLOOR[name] >= FLOOR[part]}
    assert not upward, f"asyncrl/{part} may not import {upward}: they are not below it"


def test_no_module_imports_itself_in_a_circle() -> None:
    arrows = {name: modules_imported(file) & BY_NAME.keys() for name, file in BY_NAME.items()}
    finished: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in finished:
            for below in sorted(arrows[name]):
                visit(below, (*above, name))
            finished.add(name)

    for name in sorted(arrows):
        visit(name, ())


def words_in(dotted: str) -> set[str]:
    """Lower-case words of a dotted name: {"asyncrl", "worlds", "wan", "load", "world"} and the like."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", dotted)}


def test_no_module_outside_worlds_and_fitting_imports_a_kind_of_world() -> None:
    assert {"wan"} <= words_in("asyncrl.storage.is_wan_file")
    assert {"evac", "wan"} <= words_in("asyncrl.EvacWorld.WAN_VAE")
    outside = {name: file for name, file in BY_NAME.items() if not f"{name}.".startswith(OWN_FLOORS)}
    naming = {
        name
        for name, file in outside.items()
        if any(words_in(imported) & KINDS for imported in modules_imported(file))
    }
    assert not naming


def test_light_parts_import_no_torch() -> None:
    light = [name for name in BY_NAME if any(f"{name}.".startswith(f"asyncrl.{part}.") for part in LIGHT)]
    check = (
        f"import sys; {'; '.join(f'import {name}' for name in light)}; print({HEAVY} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
