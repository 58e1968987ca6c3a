"""The scripts of the shipped weights and of LIBERO-Spatial: asyncrl takes every command that they give."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from asyncrl.commands import fit
from asyncrl.commands.audit import AuditConfig
from asyncrl.commands.collect import CollectConfig
from asyncrl.commands.evaluate import EvaluateConfig
from asyncrl.config.run import TrainConfig
from asyncrl.fitting.settings import FitDecoder, FitReward, FitStarts, FitWorld
from support import ROOT

ASSETS, LIBERO = (ROOT / "torchrun_scripts" / f"{name}.sh" for name in ("rebuild_assets", "libero_spatial"))
COMMANDS = {"collect": CollectConfig, "evaluate": EvaluateConfig, "audit": AuditConfig, "fit": fit.ARGUMENTS}
SEEN = ("explore", "aims", "demos", "clumsy", "places", "rollouts", "hot")
PYTHON = """#!{python}
import json, os, sys
from pathlib import Path

def named(flag):
    return Path(sys.argv[sys.argv.index(flag) + 1])

if sys.argv[1] == "-":
    sys.exit(int(Path("{folder}/verdict").read_text()))
if sys.argv[1] != "-m":
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with Path("{folder}/notes").open("a") as notes:
    notes.write(json.dumps(sys.argv[2:]) + "\\n")
if "{makes}" in sys.argv:
    named("--out").mkdir(parents=True, exist_ok=True)
if "reward" in sys.argv:
    named("--world").mkdir(parents=True, exist_ok=True)
    for suffix in ("json", "safetensors"):
        (named("--world") / f"reward.{{suffix}}").touch()
"""
"""In the place of python3: notes commands, makes what later ones read, and judges figures by `verdict`."""


def run(
    script: Path, folder: Path, *arguments: str, verdict: int = 0, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with commands that do nothing."""
    python = folder / "bin" / "python3"
    python.parent.mkdir(exist_ok=True)
    makes = "--out" if script == ASSETS else "--refine"
    python.write_text(PYTHON.format(python=sys.executable, folder=folder, makes=makes))
    python.chmod(0o755)
    (folder / "verdict").write_text(str(verdict))
    places = {"WORK": str(folder / "work"), "ASSETS": str(folder / "assets" / "tabletop"), "WORKERS": "16"}
    places |= {"PYTHON": str(python), "PATH": f"{python.parent}:{os.environ['PATH']}", "COMPILE": "--compile"}
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=os.environ | places | settings,
        capture_output=True,
        text=True,
        timeout=200,
    )


def noted(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def read(command: list[str]) -> Any:
    """What asyncrl makes of a command line; refuses what it does not take."""
    module, name, *arguments = command
    if module == "torch.distributed.run":
        return tyro.cli(TrainConfig, args=arguments[1:])
    assert module == "asyncrl"
    return tyro.cli(COMMANDS[name], args=arguments)


def test_the_recipe_of_the_shipped_weights_reads_what_was_made_before_it(tmp_path: Path) -> None:
    assets, work = tmp_path / "assets", tmp_path / "work"
    assert run(ASSETS, tmp_path).returncode == 0
    made = set[Path]()
    for config in map(read, noted(tmp_path)):
        for name in ("data", "refine", "autoencoder", "world", "policy", "start_states"):
            value = getattr(config, name, ())
            for part in value if isinstance(value, tuple) else (value,):
                assert not str(part) or Path(part) in made, f"{name} {part} of {config} is not there yet"
        made.add(Path(config.world) if isinstance(config, FitReward | FitDecoder) else config.out)
    starts = {assets / f"tabletop{kind}" / "start_states.h5" for kind in ("", "_evac")}
    worlds = {assets / f"tabletop{kind}" / "world" for kind in ("", "_opensora", "_evac")}
    policy = {assets / "tabletop" / "policy"}
    assert {path for path in made if assets in path.parents} == starts | worlds | policy
    assert {work / name for name in SEEN} < made


@pytest.mark.parametrize("kind", ["opensora", "evac"])
def test_one_world_is_made_alone_from_recordings_that_are_there(kind: str, tmp_path: Path) -> None:
    for name in SEEN[:-1]:
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "part-00000.h5").write_bytes(b"")
    opensora = tmp_path / "assets" / "tabletop_opensora" / "world"
    if kind == "evac":
        opensora.mkdir(parents=True)
        for name in ("reward.json", "reward.safetensors"):
            (opensora / name).write_text(name)
    assert run(ASSETS, tmp_path, ONLY=kind, COMPILE="", STEPS="0.01").returncode == 0
    recorded, world, last = map(read, noted(tmp_path))
    assert isinstance(recorded, CollectConfig)
    assert (recorded.out, recorded.episodes) == (tmp_path / "work" / "hot", 2000), "what was missing, whole"
    assert isinstance(world, FitWorld)
    assert (world.kind, world.compile) == (kind, False)
    assert world.steps == {"opensora": 300, "evac": 200}[kind]
    assert world.data == tuple(tmp_path / "work" / name for name in SEEN)
    assert world.out == tmp_path / "assets" / f"tabletop_{kind}" / "world"
    if kind == "opensora":
        assert (world.autoencoder, world.vae_steps) == ("", 70)
        assert isinstance(last, FitReward)
        assert last.world == world.out
    else:  # It draws the same latents: it takes the autoencoder and its judge.
        assert world.autoencoder == str(opensora)
        assert (world.out / "reward.safetensors").read_text() == "reward.safetensors"
        assert isinstance(last, FitStarts)


def test_every_command_of_libero_spatial_is_valid_and_nothing_is_done_twice(tmp_path: Path) -> None:
    done = run(LIBERO, tmp_path)
    assert done.returncode == 0, done.stderr
    commands = noted(tmp_path)
    for command in commands:
        config = read(command)
        if command[1] in ("collect", "evaluate", "audit"):
            assert "scene=light" in config.simulator_settings
    assert sum(name == "collect" for _, name, *_ in commands) == 24
    assert run(LIBERO, tmp_path).returncode == 0
    assert noted(tmp_path) == commands


def test_a_no_go_ends_the_script_unless_anyway(tmp_path: Path) -> None:
    assert run(LIBERO, tmp_path, "data", "policy", verdict=3).returncode == 3
    assert not any("policy" in command for command in noted(tmp_path))
    assert run(LIBERO, tmp_path, "--anyway", "data", "policy", verdict=3).returncode == 0
    assert any("policy" in command for command in noted(tmp_path))


def test_what_is_missing_unknown_or_made_otherwise_is_refused(tmp_path: Path) -> None:
    missing = run(LIBERO, tmp_path, "audit")
    assert (missing.returncode, "bash" in missing.stderr) == (2, True)
    assert missing.stderr.rstrip().endswith(f"{LIBERO} world")
    assert run(LIBERO, tmp_path, "adit").returncode == 2
    other = run(LIBERO, tmp_path, "data", SIZE="64")
    assert other.returncode == 2
    assert "was made with other settings: SCALE=1 EPISODES=1 SIZE=128" in other.stderr
    unknown = run(ASSETS, tmp_path, ONLY="opensora opensoar", WORK=str(tmp_path / "new"))
    assert unknown.returncode == 2
    assert "opensoar, which is none of: clone" in unknown.stderr
    assert not (tmp_path / "new").exists()
