"""Worlds that a round accepted, without the round."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from asyncrl.pace import rounds
from asyncrl.pace.rounds import Round


def write_world(run: Path, world: Path, version: int) -> Path:
    """Write the folder of a version, which no round accepts yet; it draws as `world` does."""
    target = rounds.world_folder(run, version)
    shutil.copytree(world, target)
    about = json.loads((target / "world.json").read_text())
    (target / "world.json").write_text(json.dumps(about | {"version": version}))
    return target


def accepted_row(version: int) -> Round:
    """A round of the policy version of the same number, that accepts it."""
    values = {"int": 1, "float": 0.0, "bool": True, "str": "the test"}
    numbers: Any = {field.name: values[str(field.type)] for field in fields(Round)}
    return replace(Round(**numbers), version=version, world=version)


def accept(run: Path, world: Path, version: int) -> None:
    """Do what a round does that accepts a world."""
    write_world(run, world, version)
    rounds.append(run, accepted_row(version))
