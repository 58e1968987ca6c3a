"""The arrows of docs/architecture.md point one way, and light packages stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
BASE = {"errors", "recipe", "imagination", "config", "records", "metrics", "assets", "activity", "waits"}
MODELS = {
    "pixels",
    "placing",
    "capture",
    "messaging",
    "worlds",
    "policies",
    "rewards",
    "simulators",
    "checkpoint",
    "logbook",
    "run_folder",
}
MIDDLE = {"replay", "weights"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "activity": set(),
    "assets": {"errors"},
    "records": {"errors"},
    "recipe": {"errors"},
    "imagination": {"errors"},
    "config": {"errors", "recipe", "imagination"},
    "metrics": {"errors"},
    "waits": {"activity", "metrics"},
    "memory": set(),
    "parking": {"waits"},
    "metric_advice": {"metrics", "waits"},
    "metric_page": {"metrics", "metric_advice"},
    "pixels": set(),
    "placing": set(),
    "capture": set(),
    "tensor_files": {"errors"},
    "messaging": BASE,
    "worlds": BASE | {"capture", "pixels", "placing", "tensor_files"},
    "policies": BASE | {"capture", "placing"},
    "rewards": BASE | {"pixels", "placing", "tensor_files"},
    "simulators": BASE,
    "checkpoint": BASE | {"checkpoint_state", "checkpoint_writer"},
    "checkpoint_state": BASE,
    "checkpoint_writer": BASE,
    "logbook": BASE,
    "run_folder": BASE,
    "replay": BASE | {"messaging"},
    "weights": BASE | {"messaging"},
    "actors": BASE | MODELS | MIDDLE | {"memory", "parking"},
    "learner": BASE | MODELS | MIDDLE | {"memory", "parking"},
    "fitting": BASE | MODELS,
    "evaluation": BASE | MODELS,
    "contact_sheet": BASE | MODELS,
    "doctoring": BASE | MODELS | MIDDLE | {"launch"},
    "launch": BASE | MODELS | MIDDLE | {"actors", "learner", "evaluation", "parking"},
    "commands": BASE
    | MODELS
    | MIDDLE
    | {"actors", "learner", "fitting", "evaluation", "contact_sheet", "doctoring", "launch", "metric_page"},
}
LIGHT = [
    "errors",
    "recipe",
    "config",
    "records",
    "metrics",
    "metric_page",
    "messaging.wire",
    "replay.service",
    "replay.inspect",
    "cli",
    "commands.convert",
    "commands.doctor",
    "doctoring.examination",
    "doctoring.devices",
    "doctoring.network",
    "doctoring.storage",
]


def imports_of(package: str) -> set[str]:
    """Names of asyncrl's top-level parts that a package or module imports, anywhere in its files."""
    files = [ROOT / f"{package}.py"] if (ROOT / f"{package}.py").exists() else (ROOT / package).rglob("*.py")
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            found |= {name.split(".")[1] for name in names if name.startswith("asyncrl.")}
    return found - {package}


def test_every_part_of_the_package_has_its_arrows() -> None:
    parts = {p.stem if p.is_file() else p.name for p in ROOT.iterdir() if not p.name.startswith("__")}
    assert parts - {"cli", "assets"} == MAY_IMPORT.keys() - {"assets"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_arrows_point_one_way(package: str) -> None:
    used = imports_of(package)
    assert used <= MAY_IMPORT[package], f"asyncrl/{package} may not import {used - MAY_IMPORT[package]}"


def test_light_parts_import_no_torch() -> None:
    modules = "; ".join(f"import asyncrl.{name}" for name in LIGHT)
    heavy = "{'torch', 'transformers', 'diffusers', 'mujoco'}"
    check = f"import sys; {modules}; print({heavy} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
