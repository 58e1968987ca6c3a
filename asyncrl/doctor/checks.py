"""Run the checks of `asyncrl doctor` and report each finding; check Python and packages. No torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError
from asyncrl.observability.signals import BlockingThread
from asyncrl.observability.terminal import hanging
from asyncrl.records import ActionSpec, SlotBytes, StartState

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DEADLINE: Final = 60.0  # seconds, by default
PROGRESS_AFTER, PROGRESS_EVERY = 2.0, 10.0  # seconds until a check is named on stderr, and named again
QUICK: Final = 10.0  # seconds for all checks without --long
NAME_WIDTH: Final = 14


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run's models in bytes, unless noted otherwise."""

    policy: int  # As its file and an actor hold it
    parameters: int  # frozen ones included
    trained: int  # number of trained parameters
    float32_masters: int  # The policy as the learner holds it: float32 if --learner.precision is
    unsharded: int  # Share of `float32_masters` that every learner rank holds: frozen weights below adapters
    version: int  # The tensors that actors get after an update
    environment: int  # world and reward model
    frame: int
    action_spec: ActionSpec
    block: int = 0  # The policy's largest block, as passes gather it
    acting: int = 0  # Activations per decision of a forward pass; 0: unknown
    learning: int = 0  # Activations per decision of a micro-batch; 0: unknown
    slot: SlotBytes = field(default_factory=SlotBytes)

    @property
    def training(self) -> int:
        """Bytes of the gradient and AdamW's two moments, float32."""
        return 12 * self.trained

    @property
    def checkpoint(self) -> int:
        """The policy, and float32 weights and moments of the trained parameters."""
        return self.policy + 12 * self.trained


@dataclass(kw_only=True)
class Examination:
    """The settings under examination, and the sizes that the check of the models adds."""

    config: TrainConfig  # With the world's defaults once the models were loaded
    where: str = "the defaults"  # source of the settings, for the report
    host: int = 0  # number in --placement (ROLE=RANKS@HOST)
    sizes: Sizes | None = None
    starts: Sequence[StartState] = ()


class Verdict(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "BROKEN"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""  # The remedy; empty if none is needed, or if `seen` is an error that contains it


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name=name, verdict=Verdict.OK, seen=seen)


def warning(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that a run may survive."""
    return Finding(name=name, verdict=Verdict.WARNING, seen=seen, advice=advice)


def broken(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that prevents a run."""
    return Finding(name=name, verdict=Verdict.BROKEN, seen=seen, advice=advice)


def render(finding: Finding) -> str:
    """Format a finding, wrapped to the terminal."""
    text = f"{finding.seen} {finding.advice}".rstrip()
    return hanging(f"{finding.name:<{NAME_WIDTH - 1}} {finding.verdict.value:<9}", text)


def one_line(error: object) -> str:
    """Shorten an error to a line of at most 400 characters."""
    return " ".join(str(error).split())[:400]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check, imported when it runs: a missing package is a finding too."""

    name: str
    where: str  # 'module:function' in this package
    deadline: float = DEADLINE  # seconds
    acts: bool = False  # True if it writes files, opens sockets, starts processes, or computes
    long: bool = False  # Left to --long.


CHECKS: Final = (
    Check(name="torchvision", where="checks:check_torchvision"),
    Check(name="OpenGL", where="host:check_opengl"),
    Check(name="memory", where="host:check_memory"),
    Check(name="shared memory", where="host:check_shared_memory"),
    Check(name="run folder", where="host:check_run_folder", acts=True),
    Check(name="file system", where="host:check_file_system"),
    Check(name="network", where="host:check_network", acts=True),
    Check(name="devices", where="gpus:check_devices"),
    Check(name="placement", where="gpus:check_placement"),
    Check(name="models", where="models:check_models", deadline=600.0),
    Check(name="device memory", where="gpus:check_device_memory"),
    Check(name="world", where="models:check_world_model", deadline=300.0, acts=True, long=True),
    Check(name="free disk", where="host:check_free_disk"),
    Check(name="disk speed", where="host:check_disk_speed", acts=True, long=True),
    Check(name="links", where="links:check_links", deadline=180.0, acts=True, long=True),
)
"""In the order of the report; checks that need the models' sizes follow them."""


def check_python() -> Finding:
    """Check the version of Python."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return ok("Python", text) if sys.version_info >= (3, 11) else broken("Python", f"{text}; 3.11 is needed.")


def requirements(extra: str = "") -> list[Requirement]:
    """Return the packages that an extra of pyproject.toml needs; '': those of every installation."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in importlib.metadata.requires("asyncrl") or ()]
    except importlib.metadata.PackageNotFoundError:  # It is run from its folder: what it needs is unknown.
        return []
    return [one for one in needed if (one.marker.evaluate({"extra": extra}) if one.marker else not extra)]


def check_package(needed: Requirement) -> Finding:
    """Compare an installed package with the versions that work."""
    package, works = needed.name, needed.specifier
    remedy = f"Install it with: pip install '{package}{works}'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return broken(package, "not installed.", remedy)
    if not works.contains(version, prereleases=True):
        return broken(package, f"{version} does not work; {works} does.", remedy)
    return ok(package, version)


def check_torchvision(_: object) -> Finding | None:
    """Check that an installed torchvision imports: one built for another torch breaks transformers."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return warning(
            "torchvision",
            f"is installed but does not fit torch ({one_line(error)}).",
            "asyncrl does not use it, but transformers may fail over it. Remove it with: "
            "pip uninstall torchvision",
        )
    return ok("torchvision", f"{importlib.metadata.version('torchvision')} (not used)")


def report(found: Iterable[Finding], as_json: bool, works: str, fails: str) -> int:
    """Print findings as they come, or all as a JSON list, and the verdict; returns 1 if one is broken."""
    findings = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            print(render(finding), flush=True)
    failed = [finding.name for finding in findings if finding.verdict is Verdict.BROKEN]
    if as_json:
        rows = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
        print(json.dumps(rows, indent=2))
    else:
        print(f"\n{fails}: {', '.join(failed)}." if failed else f"\n{works}")
    return int(bool(failed))


def examine(
    examination: Examination, *, reading_only: bool = False, quick: bool = False
) -> Iterator[Finding]:
    """Run all checks in order; `reading_only` omits those with side effects, `quick` takes `QUICK` s."""
    config = examination.config
    settings = f"{config.algorithm.kind}, {config.updates} updates, policy {config.policy}"
    yield ok("settings", f"{examination.where}: {settings}, world {config.world}")
    checks = [("Python", check_python, DEADLINE)]
    checks += [(needed.name, partial(check_package, needed), DEADLINE) for needed in requirements()]
    chosen = [one for one in CHECKS if not ((reading_only and one.acts) or (quick and one.long))]
    checks += [(check.name, partial(_call, check.where, examination), check.deadline) for check in chosen]
    until = time.monotonic() + QUICK
    for name, action, deadline in checks:
        seconds = max(0.1, until - time.monotonic()) if quick else deadline
        if finding := run_check(name, action, seconds, hurried=seconds < deadline):
            yield finding


def _call(where: str, examination: object) -> Finding | None:
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(f"asyncrl.doctor.{module}"), function)(examination)


def run_check(
    name: str, check: Callable[[], Finding | None], deadline: float, *, hurried: bool = False
) -> Finding | None:
    """Run a check; errors and timeouts (warnings if `hurried`) become findings: other checks still run.

    It runs on a thread, which is abandoned if a file system or driver hangs: nothing can interrupt that.
    """
    found: list[Finding | None] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(check())
        except AsyncRLError as error:
            found.append(broken(name, one_line(error)))
        except (Exception, SystemExit) as error:
            found.append(broken(name, f"cannot be checked: {type(error).__name__}: {one_line(error)}"))
        finally:
            done.set()

    BlockingThread(run, f"check of {name}").start()
    pause, left = PROGRESS_AFTER, deadline
    until = time.monotonic() + deadline
    while not done.wait(min(pause, left)) and (left := until - time.monotonic()) > 0:
        print(f"{name}: still looking, for at most {left:.0f} s", file=sys.stderr, flush=True)
        pause = PROGRESS_EVERY
    if found:
        return found[0]
    if hurried:
        return warning(name, f"not known after {QUICK:g} s in all.", "`asyncrl doctor --long` looks longer.")
    advice = "A disk, a network file system or a driver hangs; see `dmesg`."
    return broken(name, f"the check did not end within {deadline:g} s.", advice)
