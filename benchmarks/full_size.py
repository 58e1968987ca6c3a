"""The flags of a run at full size with random weights, whose files are written where they are not there yet.

Small batches, so that an update takes seconds; sizes and precision of models are those of the recipe.

    python benchmarks/full_size.py models/random --world opensora      write them only
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

ROOT: Final = Path(__file__).resolve().parents[1]
RECIPE: Final = ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml"
BATCH: Final = (
    *("--lora.rank", "32", "--optimizer.learning-rate", "1e-4"),
    *("--algorithm.groups-per-update", "4", "--algorithm.minibatches", "1"),
    *("--actor.slots", "16", "--actor.max-decisions", "2"),
)
Kind = Literal["wan", "opensora", "evac"]
Scale = Literal["full", "tiny"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Write a policy and a world with random weights."""

    folder: Annotated[Path, tyro.conf.Positional]
    world: Kind = "wan"
    scale: Scale = "full"
    """tiny: small ones in the same layouts, to try a script on a CPU."""


def full_size_flags(folder: Path) -> list[str]:
    """Return recipe and flags of a run with the models in `folder`, which takes 45 GB when it is made."""
    policy, world = written(folder)
    return [str(RECIPE), "--policy", str(policy), "--world", str(world), *BATCH]


def written(folder: Path, kind: Kind = "wan", scale: Scale = "full") -> tuple[Path, Path]:
    """Return the folders of a policy and a world, and write what is not there, both at the same time."""
    policy = folder / "policy" / "asyncrl"
    world = folder / ("world" if kind == "wan" else kind)
    with ThreadPoolExecutor(2) as writers:
        for job in (writers.submit(_policy, policy, scale), writers.submit(_world, world, kind, scale)):
            job.result()
    return policy, world


def _policy(folder: Path, scale: Scale) -> None:
    if (folder / "config.json").is_file():
        return
    published = str(folder.parent)
    _call("published_policy.py", published, "--only-write", "--scale", scale)
    _call("published_policy.py", published, "--step", "convert", "--scale", scale)


def _world(folder: Path, kind: Kind, scale: Scale) -> None:
    if (folder / "dataset").is_dir():
        return
    if kind == "wan":
        _call("published_world.py", str(folder), "--only", "write", "--scale", scale)
    else:
        _call("random_worlds.py", str(folder), "--kind", kind, "--scale", scale)


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


def main() -> None:
    """Write."""
    settings = tyro.cli(Settings, description=__doc__)
    print(*written(settings.folder, settings.world, settings.scale))


if __name__ == "__main__":
    main()
