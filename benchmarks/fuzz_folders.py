"""A small real run whose folder is damaged in every known way: what the commands make of it. Bounded.

    python benchmarks/fuzz_folders.py                       all kinds, about 12 minutes on two cores
    python benchmarks/fuzz_folders.py --only HDF5 group     those whose name contains one of these texts

Per kind of damage (`tests/support/folder_damage.py`) six commands: `train --resume`, the same from the run's
config.json, `replay verify`, `list`, `stats`, and `doctor --resume`. Each runs in a process of its own. What
must not be: a traceback; a hang, which is 10 s more than the command takes on the undamaged folder; memory, 1
GiB more than there, touched or only reserved; a changed byte in the folder beside the run's or in its models.
The doctor's check of links between devices is left out: it knows nothing of the folder, and takes seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from asyncrl import cli
from support import measured
from support.folder_damage import DAMAGES, contents, copy_run, make_neighbour
from support.measured import MIB, Outcome

PATIENCE = 10.0
"""Seconds beyond the command's time on the undamaged folder."""
MEMORY = 1024 * MIB
"""Bytes beyond those on the undamaged folder."""
COMMANDS = ("train", "train config", "verify", "list", "stats", "doctor")
OFFENCES = ("traceback", "hang", "memory", "outside")
SLOW_ONCE = "slow once"
"""It ended in time when it was tried again: counted, but no offence."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Damage a run's folder and run commands on it."""

    only: tuple[str, ...] = ()
    """Only kinds of damage whose name contains one of these texts."""
    commands: tuple[str, ...] = COMMANDS
    """Which commands."""
    verbose: bool = False
    """Print the last line that every command said."""


def arguments_of(command: str, run: Path) -> tuple[str, list[str]]:
    """Return what follows `asyncrl` on the command line."""
    resume = ["--run-dir", str(run), "--resume", "--updates", "4"]
    return {
        "train": ("train", resume),
        "train config": ("train", [str(run / "config.json"), *resume]),
        "verify": ("replay", ["verify", str(run)]),
        "list": ("replay", ["list", str(run)]),
        "stats": ("replay", ["stats", str(run)]),
        "doctor": ("doctor", resume),
    }[command]


def import_all() -> None:
    """Import what the commands use, once, before they are forked."""
    import tensorboardX  # noqa: F401

    from asyncrl.doctor import checks

    checks.CHECKS = tuple(check for check in checks.CHECKS if check.name != "links")  # type: ignore[misc]


def make_run(folder: Path) -> Path:
    """Make models and a run of three updates with one checkpoint."""
    from support.tiny_models import write_models

    folder.mkdir()

    def train() -> int:
        flags = [*write_models(folder), "--inline", "--updates", "3", "--checkpoint-every", "1"]
        more = ["--keep-checkpoints", "1", "--run-dir", str(folder / "run")]
        return cli.run("train", [*flags, *more])

    done = measured.run(train, folder, allowed=120)
    assert done.code == 0, done.said
    return folder / "run"


def offences(outcome: Outcome, normal: Outcome, *, outside: bool) -> list[str]:
    """Name what must not be."""
    reserved = outcome.reserved > normal.reserved + MEMORY
    found = {
        "traceback": outcome.traceback or (outcome.code < 0 and not outcome.hung),
        "hang": outcome.hung,
        "memory": outcome.resident > normal.resident + MEMORY or reserved,
        "outside": outside,
    }
    return [name for name in OFFENCES if found[name]]


def try_damage(
    name: str, run: Path, normal: dict[str, Outcome], watched: Callable[[], object]
) -> dict[str, tuple[Outcome, list[str]]]:
    """Damage copies of a run and run the commands; return their outcomes and what must not be.

    A command that does not end in time is tried again on a fresh copy: a host that is busy is no hang.
    """
    found = {}
    for command in normal:
        for again in (False, True):
            with tempfile.TemporaryDirectory(dir=run.parents[1]) as folder:
                outcome, outside = _try_once(name, command, run, Path(folder), normal[command], watched)
            found[command] = outcome, offences(outcome, normal[command], outside=outside)
            if not outcome.hung:
                found[command][1].extend([SLOW_ONCE] * again)
                break
    return found


def _try_once(
    name: str, command: str, run: Path, folder: Path, normal: Outcome, watched: Callable[[], object]
) -> tuple[Outcome, bool]:
    neighbour = make_neighbour(folder / "neighbour")
    copy = copy_run(run, folder / "run")
    DAMAGES[name](copy, neighbour)
    before = contents(neighbour), watched()
    action = partial(cli.run, *arguments_of(command, copy))
    outcome = measured.run(action, folder, allowed=normal.seconds + PATIENCE)
    return outcome, (contents(neighbour), watched()) != before


def main() -> int:
    """Try everything; exit code 1 when anything was found."""
    settings = tyro.cli(Settings)
    import_all()
    kinds = [name for name in DAMAGES if not settings.only or any(text in name for text in settings.only)]
    counts: Counter[tuple[str, str]] = Counter()
    findings = list[str]()
    began = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="fuzz-folders-"))
    try:
        run = make_run(base / "models")
        watched = partial(_models, base / "models")
        whole = contents(run)
        normal = {name: _undamaged(name, run, base) for name in settings.commands}
        for kind in kinds:
            for command, (outcome, wrong) in try_damage(kind, run, normal, watched).items():
                counts.update((command, what) for what in (*wrong, f"code {outcome.code}"))
                last = (outcome.said.strip().splitlines() or [""])[-1][:200]
                if set(wrong) & set(OFFENCES):
                    findings.append(f"{kind} | {command}: {', '.join(wrong)}: {last}")
                if settings.verbose:
                    print(f"{kind} | {command}: {outcome.code} {outcome.seconds:.1f} s | {last}", flush=True)
        if contents(run) != whole:
            findings.append("the undamaged run itself was changed")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    show(counts, settings.commands, len(kinds), time.monotonic() - began)
    print("\n".join(findings))
    return int(bool(findings))


def _models(folder: Path) -> object:
    """What is beside the run: its models."""
    return {name: seen for name, seen in contents_of_models(folder).items() if not name.startswith("run")}


def contents_of_models(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of writing of everything of the models."""
    paths = [
        path
        for part in ("policy", "world", "starts.h5")
        for path in (folder / part, *(folder / part).rglob("*"))
    ]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def _undamaged(command: str, run: Path, base: Path) -> Outcome:
    """Measure a command on a sound copy."""
    folder = base / f"sound-{command.replace(' ', '-')}"
    folder.mkdir()
    copy = copy_run(run, folder / "run")
    outcome = measured.run(partial(cli.run, *arguments_of(command, copy)), folder, allowed=120)
    assert outcome.code == 0, f"{command}: {outcome.said}"
    print(
        f"undamaged: {command:<14}{outcome.seconds:5.1f} s{outcome.resident // MIB:7} MiB resident"
        f"{outcome.reserved // MIB:8} MiB reserved",
        flush=True,
    )
    return outcome


def show(counts: Counter[tuple[str, str]], commands: tuple[str, ...], kinds: int, seconds: float) -> None:
    """Print a row per command."""
    codes = sorted({what for _, what in counts if what.startswith("code")})
    columns = (*OFFENCES, SLOW_ONCE)
    print(f"\n{f'{kinds} kinds of damage':<24}" + "".join(f"{what:>11}" for what in (*columns, *codes)))
    for command in commands:
        print(f"{command:<24}" + "".join(f"{counts[command, what]:>11}" for what in (*columns, *codes)))
    print(f"in {seconds:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
