"""The script of LIBERO-Spatial: every command is valid, and a no-go or a missing input stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from asyncrl.commands import fit
from asyncrl.commands.audit import AuditConfig
from asyncrl.commands.collect import CollectConfig
from asyncrl.commands.evaluate import EvaluateConfig
from asyncrl.config.run import TrainConfig
from support import ROOT

SCRIPT = ROOT / "torchrun_scripts" / "libero_spatial.sh"
COMMANDS = {"collect": CollectConfig, "evaluate": EvaluateConfig, "audit": AuditConfig}
NOTES = """#!{python}
import json, sys
from pathlib import Path

if sys.argv[1] == "-":
    sys.exit(int(Path("{folder}/verdict").read_text()))
if sys.argv[1] == "-c":
    import os
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with Path("{folder}/notes").open("a") as notes:
    notes.write(json.dumps(sys.argv[2:]) + "\\n")
if "reward" in sys.argv:
    place = Path(sys.argv[sys.argv.index("--world") + 1])
    place.mkdir(parents=True, exist_ok=True)
    (place / "reward.json").touch()
if "--refine" in sys.argv:
    Path(sys.argv[sys.argv.index("--out") + 1]).mkdir(parents=True, exist_ok=True)
"""
"""In the place of python3: notes the commands, and finds every stage's figures as `verdict` says."""


def run(folder: Path, *arguments: str, verdict: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script with commands that do nothing."""
    python = folder / "python"
    python.write_text(NOTES.format(python=sys.executable, folder=folder))
    python.chmod(0o755)
    (folder / "verdict").write_text(str(verdict))
    places = {"WORK": str(folder / "work"), "PYTHON": str(python), "WORKERS": "16", "COMPILE": "--compile"}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | places | settings,
        capture_output=True,
        text=True,
        timeout=200,
    )


def noted(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.timeout(240)
def test_every_command_is_valid_and_nothing_is_done_twice(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    commands = noted(tmp_path)
    for module, name, *arguments in commands:
        if module == "torch.distributed.run":
            tyro.cli(TrainConfig, args=arguments[1:])
        elif name == "fit":
            tyro.cli(fit.ARGUMENTS, args=arguments)
        else:
            config = tyro.cli(COMMANDS[name], args=arguments)
            assert "scene=light" in config.simulator_settings
    assert sum(name == "collect" for _, name, *_ in commands) == 14
    assert run(tmp_path).returncode == 0
    assert noted(tmp_path) == commands


def test_a_no_go_ends_the_script_unless_anyway(tmp_path: Path) -> None:
    assert run(tmp_path, "data", "policy", verdict=3).returncode == 3
    assert not any("policy" in command for command in noted(tmp_path))
    assert run(tmp_path, "--anyway", "data", "policy", verdict=3).returncode == 0
    assert any("policy" in command for command in noted(tmp_path))


def test_what_is_missing_unknown_or_made_otherwise_is_refused(tmp_path: Path) -> None:
    missing = run(tmp_path, "audit")
    assert (missing.returncode, "bash" in missing.stderr) == (2, True)
    assert missing.stderr.rstrip().endswith(f"{SCRIPT} world")
    assert run(tmp_path, "adit").returncode == 2
    other = run(tmp_path, "data", SIZE="128")
    assert other.returncode == 2
    assert "was made with other settings: SCALE=1 SIZE=64" in other.stderr
