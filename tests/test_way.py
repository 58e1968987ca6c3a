"""Budgets of the way: modules and lines of functions in a decision, an update, a start and a publication."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "asyncrl"
BUDGETS = {"decision": (40, 2000), "update": (20, 1300), "start": (90, None)}
"""Phase of an inline run -> most modules and lines of functions."""
PUBLICATIONS = {"shared_memory": (9, 750), "pull": (9, 700)}
"""Carrier -> the same of one publication, in the processes of both ends; a heartbeat may be among it."""
TRACED = """
import json, sys
from asyncrl import cli
from asyncrl.actors.actor import Actor
from asyncrl.learner.learner import Learner

seen, steps = {phase: set() for phase in ("start", "decision", "update")}, 0


def profile(phase):
    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            seen[phase].add((code.co_filename, code.co_firstlineno))

    sys.setprofile(record)


def traced(owner, name, phase):
    original = getattr(owner, name)

    def call(self, *args, **settings):
        global steps
        steps += phase == "decision"
        if phase and (phase != "decision" or steps > 3):  # Caches are filled by then.
            profile(phase)
        else:
            sys.setprofile(None)
        try:
            return original(self, *args, **settings)
        finally:
            sys.setprofile(None)

    setattr(owner, name, call)


traced(Learner, "run", None)
traced(Learner, "_learn", "update")
traced(Actor, "step", "decision")
profile("start")
cli.main(sys.argv[2:])
json.dump({phase: sorted(places) for phase, places in seen.items()}, open(sys.argv[1], "w"))
"""


def function_lengths() -> dict[tuple[str, int], int]:
    lengths: dict[tuple[str, int], int] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lengths[str(path), first] = (node.end_lineno or first) - first + 1
    return lengths


def passed(places: list[tuple[str, int]], lengths: dict[tuple[str, int], int]) -> tuple[int, int]:
    """Modules and lines of functions."""
    return len({path for path, _ in places}), sum(lengths.get((path, line), 0) for path, line in places)


@pytest.mark.slow
def test_the_way_stays_short(tmp_path: Path) -> None:
    out, run = tmp_path / "seen.json", tmp_path / "run"
    size = "--updates 2 --algorithm.group-size 2 --algorithm.groups-per-update 2 --actor.slots 4"
    command = [sys.executable, "-c", f"PACKAGE = {str(PACKAGE)!r}\n{TRACED}", out, "train", "--inline"]
    subprocess.run([*command, *size.split(), "--run-dir", run], check=True, timeout=170)
    lengths = function_lengths()
    for phase, places in json.loads(out.read_text()).items():
        modules, lines = BUDGETS[phase]
        found = passed(places, lengths)
        assert 10 < found[0] <= modules, (phase, found)
        assert lines is None or 500 < found[1] <= lines, (phase, found)


@pytest.mark.slow
@pytest.mark.parametrize("carrier", PUBLICATIONS)
def test_a_publication_stays_short(tmp_path: Path, carrier: str) -> None:
    out = tmp_path / "seen.json"
    command = [sys.executable, "-m", "support.traced_publication", carrier, out]
    subprocess.run(command, check=True, timeout=90, cwd=Path(__file__).parent)
    found, (modules, lines) = passed(json.loads(out.read_text()), function_lengths()), PUBLICATIONS[carrier]
    assert 2 < found[0] <= modules, found
    assert 50 < found[1] <= lines, found
