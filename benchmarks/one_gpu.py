"""How a learner and an actor best share one GPU: in turns, by time slices, or side by side (CUDA MPS).

    python benchmarks/one_gpu.py --gpu 0 --full models/random
    python benchmarks/one_gpu.py --gpu 0 --flags="configs/NAME.toml --policy models/p --world models/w"

The same run on the same GPU, with two ranks (learner=0,actor=1), one variant after the other, and all of them
again in each round:

    synchronous        the actor waits for every update: the baseline
    time slices        asynchronous; the driver lets one process after the other compute
    mps                asynchronous; both compute at the same time, as clients of one MPS server, and the
                       learner's kernels go first
    mps, equal         neither goes first (CUDA_MPS_CLIENT_PRIORITY)

The multiprocessors are not divided (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): products of matrices come out wrong
then, and a run refuses it.

The MPS control daemon is one of this benchmark's own, with its own pipe and log folder, and is ended by its
own `quit`; a daemon of the host's is left alone. Steps per hour are as in `asynchrony.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

import asynchrony
import torch
import tyro
from asynchrony import Outcome, train
from full_size import run_flags
from measuring import commit, heading, table

from asyncrl.errors import ConfigError
from asyncrl.launch.roles import PRIORITY

CONTROL: Final = "nvidia-cuda-mps-control"
ENDS_WITHIN: Final = 30.0
"""Seconds that the daemon has to answer `quit`, after which its server's clients are said to hang."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare ways to share one GPU."""

    gpu: str = "0"
    """CUDA_VISIBLE_DEVICES of the runs: one GPU."""
    full: str = ""
    """Folder of a policy and a world of full size with random weights; written where they are not there."""
    flags: str = ""
    """Recipe and flags of `asyncrl train`, behind those of --full."""
    compile: bool = True
    """Compile learner and actor."""
    only: tuple[str, ...] = ()
    """Names of the variants to run besides the synchronous one; none: all."""
    updates: int = 8
    skip: int = 3
    """First updates that do not count."""
    rounds: int = 2
    limit: float = 400.0
    """Seconds that one run may take after its first update, and as many that it has to come to that."""
    out: str = ""
    """Folder for the runs; default: a temporary one."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to share the GPU."""

    name: str
    mode: Literal["synchronous", "asynchronous"] = "asynchronous"
    mps: bool = False
    actor: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the rank that starts the actor."""


def variants_of(settings: Settings) -> list[Variant]:
    found = [
        Variant(name="synchronous", mode="synchronous"),
        Variant(name="time slices"),
        Variant(name="mps", mps=True),
        Variant(name="mps, equal", mps=True, actor={PRIORITY: "0"}),
    ]
    return [v for v in found if not settings.only or v.name in ("synchronous", *settings.only)]


@contextmanager
def mps_daemon(folder: Path, gpu: str) -> Iterator[dict[str, str]]:
    """Run an MPS control daemon for the block; yields the variables that make a process its client.

    Raises:
        ConfigError: This host has none, or it does not start.
    """
    if shutil.which(CONTROL) is None:
        raise ConfigError(
            f"{CONTROL} is not on this host: it comes with NVIDIA's driver. Leave mps out: --only."
        )
    pipes = Path(tempfile.mkdtemp(prefix="mps-"))  # Its sockets want a short path.
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = os.environ | variables | {"CUDA_VISIBLE_DEVICES": gpu}
    begun = subprocess.run([CONTROL, "-d"], env=environment, capture_output=True, text=True)
    if begun.returncode:
        raise ConfigError(
            f"{CONTROL} -d ended with {begun.returncode}: {begun.stderr.strip()}. See {folder}."
        )
    try:
        yield variables
    finally:
        subprocess.run([CONTROL], input="quit\n", env=environment, text=True, timeout=ENDS_WITHIN, check=True)
        shutil.rmtree(pipes, ignore_errors=True)


def starter(variant: Variant, folder: Path) -> list[str]:
    lines = ["#!/usr/bin/env bash", 'if [ "$RANK" != 0 ]; then :']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variant.actor.items()]
    lines += ["fi", f'exec {shlex.quote(sys.executable)} "$@"']
    path = folder / f"{variant.name.replace(' ', '-')}.sh"
    path.write_text("\n".join(lines) + "\n")
    return ["bash", str(path)]


def run(settings: Settings, variant: Variant, out: Path, flags: str) -> Outcome:
    of_runs = asynchrony.Settings(
        gpus=settings.gpu,
        flags=flags,
        placement="learner=0,actor=1",
        ranks=2,
        updates=settings.updates,
        skip=settings.skip,
        limit=settings.limit,
    )
    name, starts = variant.name, starter(variant, out)
    if not variant.mps:
        return train(of_runs, variant.mode, out, name=name, before_rank=starts)
    with mps_daemon(out, settings.gpu) as variables:
        return train(of_runs, variant.mode, out, name=name, variables=variables, before_rank=starts)


def report(found: Mapping[str, list[Outcome]]) -> str:
    titles = ["", "steps/h", "of synchronous", "s/update", "learner waits", "actor waits", "rounds"]
    lines = []
    for name, outcomes in found.items():
        ratios = [
            one.steps_per_hour / base.steps_per_hour
            for one, base in zip(outcomes, found["synchronous"], strict=False)
        ]
        middle = {key: statistics.median(getattr(one, key) for one in outcomes) for key in _READ}
        lines.append([
            name, f"{middle['steps_per_hour']:,.0f}", f"{statistics.median(ratios):.2f}",
            f"{middle['update_seconds']:.2f}", f"{middle['learner_waiting']:.1%}",
            f"{middle['actors_waiting']:.1%}", len(outcomes),
        ])  # fmt: skip
    return table(titles, lines)


_READ: Final = ("steps_per_hour", "update_seconds", "learner_waiting", "actors_waiting")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    variants = variants_of(settings)
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU to share: torch sees no CUDA device.")
    print(heading(torch.device("cuda")), flush=True)
    out = Path(settings.out or tempfile.mkdtemp(prefix="one-gpu-"))
    flags = shlex.join(run_flags(settings.full, settings.flags, compile=settings.compile))
    found: dict[str, list[Outcome]] = {}
    for number in range(settings.rounds):
        folder = out / f"round-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for variant in variants:
            found.setdefault(variant.name, []).append(run(settings, variant, folder, flags))
            print(f"  {found[variant.name][-1]}", flush=True)
    print("\n" + report(found))
    if settings.json:
        runs = {name: [asdict(one) for one in outcomes] for name, outcomes in found.items()}
        Path(settings.json).write_text(
            json.dumps({"commit": commit(), **asdict(settings), "runs": runs}, indent=1)
        )


if __name__ == "__main__":
    main()
