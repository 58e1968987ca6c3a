"""Check the settings of a run, or a simulator, and yield each finding as soon as it is known."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncrl.doctor.findings import Examination, Finding, Verdict, ok, render, run_check
from asyncrl.doctor.packages import NEEDED, check_package

if TYPE_CHECKING:
    from asyncrl.doctor.simulators import SimulatorExamination

DEADLINE: Final = 60.0
"""Seconds of a check that has no deadline of its own."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report, or none."""

    name: str
    """Of the finding when the check crashes."""
    where: str
    """'module:function' in this package. Imported when it runs, for what is missing is a finding too."""
    deadline: float = DEADLINE
    """Seconds."""
    acts: bool = False
    """Whether it writes files, opens sockets, starts processes, or computes."""


CHECKS: Final = (
    Check(name="torchvision", where="packages:check_torchvision"),
    Check(name="OpenGL", where="host:check_opengl"),
    Check(name="CPU cores", where="host:check_cores"),
    Check(name="memory", where="host:check_memory"),
    Check(name="shared memory", where="host:check_shared_memory"),
    Check(name="open files", where="host:check_open_files"),
    Check(name="run folder", where="storage:check_run_folder", acts=True),
    Check(name="file system", where="storage:check_file_system"),
    Check(name="file locks", where="storage:check_locks", acts=True),
    Check(name="sockets", where="network:check_sockets", acts=True),
    Check(name="TMPDIR", where="network:check_temporary_folder", acts=True),
    Check(name="replay.listen", where="network:check_listen", acts=True),
    Check(name="keys", where="network:check_keys"),
    Check(name="devices", where="gpus:check_devices"),
    Check(name="placement", where="gpus:check_placement"),
    Check(name="products", where="gpus:check_products", acts=True),
    Check(name="compile cache", where="gpus:check_compiler_cache"),
    Check(name="shipped files", where="models:check_shipped_files"),
    Check(name="models", where="models:check_models", deadline=600.0),
    Check(name="device memory", where="gpus:check_device_memory"),
    Check(name="world", where="worlds:check_world_model", deadline=300.0, acts=True),
    Check(name="free disk", where="storage:check_free_disk"),
    Check(name="disk speed", where="storage:check_disk_speed", acts=True),
    Check(name="links", where="links:check_links", deadline=180.0, acts=True),
)
"""In the order of the report; what the models need comes after them."""
SIMULATOR_CHECKS: Final = (
    Check(name="drawing", where="simulators:check_drawing"),
    Check(name="simulator", where="simulators:check_play", deadline=900.0),
    Check(name="reset", where="simulators:check_reset"),
    Check(name="step", where="simulators:check_step"),
    Check(name="memory", where="simulators:check_simulator_memory"),
)
"""Of a simulator. What it was seen to do comes after it was played in."""


def doctor(examination: Examination, *, as_json: bool) -> int:
    """Print the report, as lines or as a JSON list. Returns 0 when training can run here, else 1."""
    return _report(examine(examination), as_json, "Training can run: asyncrl train", "Training cannot run")


def doctor_simulator(examination: SimulatorExamination, *, as_json: bool) -> int:
    """Print the report on a simulator. Returns 0 when it can be played in here, else 1."""
    name = examination.source.name
    works = f"It can be played in: asyncrl evaluate CHECKPOINT --simulator {name}"
    return _report(examine_simulator(examination), as_json, works, f"{name} cannot be played in")


def _report(found: Iterable[Finding], as_json: bool, works: str, fails: str) -> int:
    findings = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            print(render(finding), flush=True)
    broken = [finding.name for finding in findings if finding.verdict is Verdict.BROKEN]
    if as_json:
        rows = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
        print(json.dumps(rows, indent=2))
    else:
        print(f"\n{fails}: {', '.join(broken)}." if broken else f"\n{works}")
    return int(bool(broken))


def examine(examination: Examination, *, reading_only: bool = False) -> Iterator[Finding]:
    """Make all checks, one after the other.

    Args:
        examination: What is examined.
        reading_only: Leave out those that act (`Check.acts`).
    """
    yield ok("settings", f"{examination.where}: {_summary(examination)}")
    checks = [("Python", partial(_call, "packages:check_python", examination), DEADLINE)]
    checks += [(name, partial(check_package, name, lowest), DEADLINE) for name, lowest in NEEDED.items()]
    chosen = [check for check in CHECKS if not (reading_only and check.acts)]
    checks += [(check.name, partial(_call, check.where, examination), check.deadline) for check in chosen]
    for name, action, deadline in checks:
        if finding := run_check(name, action, deadline):
            yield finding


def examine_simulator(examination: SimulatorExamination) -> Iterator[Finding]:
    """Check a simulator. It is not played in where what it needs is not there."""
    from asyncrl.doctor.simulators import PINNED, check_pinned

    source = examination.source
    settings = "".join(f", {text}" for text in source.settings)
    yield ok("settings", f"{source.name}, --places {source.places}{settings}")
    checks = [("Python", partial(_call, "packages:check_python", examination), DEADLINE)]
    pins = PINNED.get(examination.family, ())
    checks += [(pinned.package, partial(check_pinned, pinned), DEADLINE) for pinned in pins]
    checks += [
        (check.name, partial(_call, check.where, examination), check.deadline) for check in SIMULATOR_CHECKS
    ]
    unfit = False
    for name, action, deadline in checks:
        if name == "simulator" and unfit:
            return
        if finding := run_check(name, action, deadline):
            unfit |= finding.verdict is Verdict.BROKEN
            yield finding


def _call(where: str, examination: object) -> Finding | None:
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(f"asyncrl.doctor.{module}"), function)(examination)


def _summary(examination: Examination) -> str:
    config = examination.config
    return f"{config.algorithm.kind}, {config.updates} updates, policy {config.policy}, world {config.world}"
