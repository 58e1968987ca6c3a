"""Odd ways to call asyncrl, each in a process of its own, and a table of what became of them. Bounded.

    python benchmarks/fuzz_invocations.py                   all, about 3 minutes on two cores
    python benchmarks/fuzz_invocations.py --only placement  those whose name contains one of these texts

The calls are those of `tests/support/odd_invocations.py`: numbers beyond every bound, files that are none,
text that is not UTF-8, a full device or a closed pipe as output. What must not be: a traceback; more seconds
than a small run takes and 10; memory, 1 GiB more than a small run takes, touched or only reserved; a changed
byte in the models and the run that the calls are given.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzz_folders import OFFENCES, PATIENCE, SLOW_ONCE, import_all, make_run, offences

from asyncrl import cli
from support import measured
from support.folder_damage import contents
from support.measured import MIB, Outcome
from support.odd_invocations import INVOCATIONS, Invocation, filled_in, make_files, policy_of_many_layers
from support.tiny_models import flags_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Call asyncrl in odd ways."""

    only: tuple[str, ...] = ()
    """Only calls whose name contains one of these texts."""
    verbose: bool = False
    """Print the last line that every call said."""


def call(invocation: Invocation, folder: Path, work: Path, models: Path, allowed: float) -> Outcome:
    """Call asyncrl in a new folder."""
    arguments = list(filled_in(invocation, work, models, folder, flags_of(models)))
    output, reader = None, None
    if invocation.output == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    elif invocation.output == "closed pipe":
        reader, output = os.pipe()
        os.close(reader)

    def program() -> int:
        sys.argv = ["asyncrl", *arguments]
        return cli.main(arguments)

    try:
        return measured.run(program, folder, allowed=allowed, environ=invocation.environ, output=output)
    finally:
        if output is not None:
            os.close(output)


def main() -> int:
    """Make all calls; exit code 1 when anything was found."""
    settings = tyro.cli(Settings)
    import_all()
    names = [name for name in INVOCATIONS if not settings.only or any(text in name for text in settings.only)]
    counts, findings = Counter[str](), list[str]()
    began = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="fuzz-invocations-"))
    try:
        models = make_run(base / "models").parent
        make_files(base / "odd")
        policy_of_many_layers(models / "policy", base / "odd/policy_layers")
        before = contents(models)
        sound = Invocation(arguments=("train", "{flags}", "--inline", "--updates", "1"))
        normal = _in_a_folder(sound, base, models, 60.0)
        assert normal.code == 0, normal.said
        sizes = f"{normal.resident // MIB} MiB resident, {normal.reserved // MIB} MiB reserved"
        print(f"a small run: {normal.seconds:.1f} s, {sizes}", flush=True)
        for name in names:
            outcome = _in_a_folder(INVOCATIONS[name], base, models, normal.seconds + PATIENCE)
            if outcome.hung:  # Perhaps the host was busy.
                outcome = _in_a_folder(INVOCATIONS[name], base, models, normal.seconds + PATIENCE)
                counts.update([SLOW_ONCE] * (not outcome.hung))
            wrong = offences(outcome, normal, outside=contents(models) != before)
            counts.update([*wrong, f"code {outcome.code}"])
            last = (outcome.said.strip().splitlines() or [""])[-1][:300]
            findings += [f"{name!a}: {', '.join(wrong)}: {last}"] if wrong else []
            if settings.verbose:
                shown = json.dumps(outcome.said[-300:])
                print(f"{name!a} | {outcome.code} {outcome.seconds:.1f} s | {shown}", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    codes = sorted(what for what in counts if what.startswith("code"))
    print(
        f"\n{len(names)} calls: "
        + ", ".join(f"{counts[what]} {what}" for what in (*OFFENCES, SLOW_ONCE, *codes))
    )
    print(f"in {time.monotonic() - began:.0f} s")
    print("\n".join(findings))
    return int(bool(findings))


def _in_a_folder(invocation: Invocation, base: Path, models: Path, allowed: float) -> Outcome:
    with tempfile.TemporaryDirectory(dir=base) as folder:
        return call(invocation, Path(folder), base / "odd", models, allowed)


if __name__ == "__main__":
    raise SystemExit(main())
