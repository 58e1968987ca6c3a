"""The flags of a run at full size with random weights, whose files are written where they are not there yet.

Small batches, so that an update takes seconds; sizes and precision of models are those of the recipe.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RECIPE: Final = ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml"
BATCH: Final = (
    *("--lora.rank", "32", "--optimizer.learning-rate", "1e-4"),
    *("--algorithm.groups-per-update", "4", "--algorithm.minibatches", "1"),
    *("--actor.slots", "16", "--actor.max-decisions", "2"),
)


def full_size_flags(folder: Path) -> list[str]:
    """Return recipe and flags of a run with the models in `folder`, which takes 45 GB when it is made."""
    policy, world = folder / "policy" / "asyncrl", folder / "world"
    if not (policy / "config.json").is_file():
        _call("published_policy.py", str(folder / "policy"), "--only-write")
        _call("published_policy.py", str(folder / "policy"), "--step", "convert")
    if not (world / "dataset").is_dir():
        _call("published_world.py", str(world), "--only", "write")
    return [str(RECIPE), "--policy", str(policy), "--world", str(world), *BATCH]


def run_flags(full: str, flags: str, *, compile: bool) -> list[str]:
    """Return the flags of a benchmark's runs; later ones win.

    Args:
        full: Folder of models for `full_size_flags`; empty: `flags` name theirs.
        flags: Further ones, as on a command line.
        compile: Learner and actors are.
    """
    models = full_size_flags(Path(full)) if full else []
    fast = ["--imagination.compile", "--learner.compile"] if compile else []
    return [*models, *fast, *shlex.split(flags)]


def _call(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), *arguments], check=True)
