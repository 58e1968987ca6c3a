"""The recipe of the shipped weights: every command that it gives is one that asyncrl takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from asyncrl.commands import collect, fit
from asyncrl.commands.collect import CollectConfig
from asyncrl.fitting.settings import FitDecoder, FitReward, FitStarts, FitWorld
from support import ROOT

SCRIPT = ROOT / "torchrun_scripts" / "rebuild_assets.sh"
SEEN = ("explore", "aims", "demos", "clumsy", "places", "rollouts", "hot")
NOTES = """#!{python}
import json, os, sys
from pathlib import Path

if sys.argv[1] != "-m":
    os.execv("{python}", ["{python}", *sys.argv[1:]])
assert sys.argv[2] == "asyncrl"
with Path("{notes}").open("a") as notes:
    notes.write(json.dumps(sys.argv[3:]) + "\\n")
out = sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else "{folder}/assets/none"
Path(out).mkdir(parents=True, exist_ok=True)
if "reward" in sys.argv:
    for suffix in ("json", "safetensors"):
        Path(sys.argv[sys.argv.index("--world") + 1], "reward." + suffix).touch()
"""
"""In the place of python3: notes what asyncrl is asked for, and makes the files that a later line copies."""


def asked(folder: Path, **settings: str) -> list[list[str]]:
    """Run the recipe; returns the arguments of each `asyncrl` in turn."""
    notes, python = folder / "notes", folder / "bin" / "python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text(NOTES.format(python=sys.executable, notes=notes, folder=folder))
    python.chmod(0o755)
    notes.unlink(missing_ok=True)
    places = {"WORK": str(folder / "work"), "ASSETS": str(folder / "assets" / "tabletop")}
    environ = os.environ | places | {"PATH": f"{python.parent}:{os.environ['PATH']}"} | settings
    done = subprocess.run(["bash", str(SCRIPT)], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in notes.read_text().splitlines()]


def read(command: list[str]) -> Any:
    """What asyncrl makes of a command line."""
    name, *arguments = command
    if name == "collect":
        return tyro.cli(CollectConfig, args=arguments, prog=collect.__name__)
    assert name == "fit"
    return tyro.cli(fit.ARGUMENTS, args=arguments, prog=fit.__name__)


@pytest.mark.timeout(120)
def test_every_command_of_the_recipe_is_valid_and_reads_what_was_made_before_it(tmp_path: Path) -> None:
    assets, work = tmp_path / "assets", tmp_path / "work"
    made = set[Path]()
    for config in map(read, asked(tmp_path, COMPILE="--compile")):
        for name in ("data", "refine", "autoencoder", "world", "policy", "start_states"):
            value = getattr(config, name, ())
            for part in value if isinstance(value, tuple) else (value,):
                assert not str(part) or Path(part) in made, f"{name} {part} of {config} is not there yet"
        made.add(Path(config.world) if isinstance(config, FitReward | FitDecoder) else config.out)
    kinds = ("", "_opensora", "_evac")
    starts = {assets / f"tabletop{kind}" / "start_states.h5" for kind in ("", "_evac")}
    worlds = {assets / f"tabletop{kind}" / "world" for kind in kinds}
    assert {path for path in made if assets in path.parents} == starts | worlds | {
        assets / "tabletop" / "policy"
    }
    assert {work / name for name in SEEN} < made


@pytest.mark.parametrize("kind", ["opensora", "evac"])
def test_one_world_is_made_alone_from_recordings_that_are_there(kind: str, tmp_path: Path) -> None:
    for name in SEEN:
        if name != "hot":
            (tmp_path / "work" / name).mkdir(parents=True)
            (tmp_path / "work" / name / "part-00000.h5").write_bytes(b"")
    opensora = tmp_path / "assets" / "tabletop_opensora" / "world"
    if kind == "evac":
        opensora.mkdir(parents=True)
        for name in ("reward.json", "reward.safetensors"):
            (opensora / name).write_text(name)
    recorded, world, *rest = map(read, asked(tmp_path, ONLY=kind, COMPILE="", STEPS="0.01"))
    assert isinstance(recorded, CollectConfig)
    assert (recorded.out, recorded.episodes) == (tmp_path / "work" / "hot", 2000), "what was missing, whole"
    assert isinstance(world, FitWorld)
    assert (world.kind, world.compile) == (kind, False)
    assert world.steps == {"opensora": 300, "evac": 200}[kind]
    assert world.data == tuple(tmp_path / "work" / name for name in SEEN)
    assert world.out == tmp_path / "assets" / f"tabletop_{kind}" / "world"
    (last,) = rest
    if kind == "opensora":
        assert (world.autoencoder, world.vae_steps) == ("", 70)
        assert isinstance(last, FitReward)
        assert last.world == world.out
    else:  # It draws the same latents: it takes the autoencoder and its judge.
        assert world.autoencoder == str(opensora)
        assert (world.out / "reward.safetensors").read_text() == "reward.safetensors"
        assert isinstance(last, FitStarts)


def test_a_stage_that_there_is_not_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    environ = os.environ | {"ONLY": "opensora opensoar", "WORK": str(tmp_path / "work")}
    done = subprocess.run(["bash", str(SCRIPT)], env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "opensoar, which is none of: clone" in done.stderr
    assert not (tmp_path / "work").exists()
