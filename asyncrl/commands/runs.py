"""The runs on this host.

`asyncrl runs [FOLDER]`: list the runs of a folder.
`asyncrl runs plot RUN...`: draw success, lag and waits over the updates.
`asyncrl status RUN [--watch] [--json]`: show what every process of a run does, or how it ended.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tyro

from asyncrl.config.bounds import SECONDS, AtLeast, Bounded
from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.observability.process_status import Process
from asyncrl.replay_tools.episodes import NOTHING, table
from asyncrl.storage.media import require_png
from asyncrl.storage.run_folder import METRICS, RunSummary, State, folder_bytes, is_run, runs_in, summarise
from asyncrl.storage.untrusted import read_json_lines

LONG_AGO: Final = 300 * 86_400  # Seconds after which a date has its year instead of the time of day


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Bounded):
    """List the runs of a folder: start, state, progress, success, disk.

    `asyncrl runs plot RUN...` draws runs.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder of runs, or one run."""
    json: bool = False
    """Print JSON: a list with more digits, sizes in bytes."""


ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[RunsConfig]


def main(arguments: list[str]) -> int:
    """Print a row per run, in the order of their starts."""
    if arguments[:1] == ["plot"]:
        return plot(tyro.cli(PlotConfig, args=arguments[1:], prog="asyncrl runs plot"))
    if arguments[:1] == ["list"]:  # The name that the command had when there were others.
        arguments = arguments[1:]
    config: RunsConfig = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl runs")
    runs = [summarise(path) for path in runs_in(config.folder.expanduser())]
    if config.json:
        names = ("started", "version", "updates", "imagined_success", "true_success", "problem")
        listed = [
            {"run": str(run.path), "state": run.state.value, "bytes": folder_bytes(run.path)}
            | {name: getattr(run, name) for name in names}
            for run in runs
        ]
        print(json.dumps(listed, indent=2))
        return 0
    rows: list[tuple[str, ...]] = [("run", "started", "state", "updates", "imagined", "true", "MB")]
    for run in runs:
        rates = (run.imagined_success, run.true_success)
        shares = [NOTHING if rate is None else f"{rate:.1%}" for rate in rates]
        recent = 0 <= time.time() - run.started < LONG_AGO
        started = time.strftime("%m-%d %H:%M" if recent else "%Y-%m-%d", time.localtime(run.started))
        place = (run.path.name, started, run.state.value, f"{run.version}/{run.updates}")
        rows.append((*place, *shares, f"{folder_bytes(run.path) / 1e6:.1f}"))
    print(table(rows) if runs else f"There are no runs in {config.folder}.")
    for run in runs:
        if run.problem:
            print(f"{run.path.name}: {run.problem}", file=sys.stderr)
    return 0


# ---- asyncrl runs plot ------------------------------------------------------------------------------

PANELS: Final = {
    "success": {"imagined": m.SUCCESS_ONCE, "true": m.EVAL_SUCCESS},
    "lag (versions)": {"mean": s.LAG_MEAN, "largest": s.LAG_MAX},
    "waiting (share)": {"learner": s.LEARNER_WAITING, "actors": s.ACTORS_WAITING},
}
COLOURS: Final = ("#2b6cb0", "#d97706")  # Of the first and the second curve of a panel


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Bounded):
    """Draw success, lag and waits of runs over their updates: a thin line each, their mean as a thick one."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Runs of one kind, for example of several seeds."""
    panels: tuple[Literal["success", "lag", "waiting"], ...] = ("success", "lag", "waiting")
    """What to draw."""
    out: Path = Path("runs.png")
    """File to write, ending in .png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_png(self.out)


def plot(config: PlotConfig) -> int:
    """Draw the chosen `PANELS`."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "a plot needs the package matplotlib. Install it with pip install 'asyncrl[plot]'."
        ) from None
    runs = [list(read_json_lines(run.expanduser() / METRICS, {"step": int})) for run in config.runs]
    for run, rows in zip(config.runs, runs, strict=True):
        if not rows:
            raise ConfigError(f"{run / METRICS} has no update. Name folders of runs that have begun.")
    panels = {title: curves for title, curves in PANELS.items() if title.split()[0] in config.panels}
    figure = Figure(figsize=(max(6, 4 * len(panels)), 3.6), layout="constrained", dpi=120)
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(drawn, panels.items(), strict=True):
        for colour, (name, metric) in zip(COLOURS, curves.items(), strict=True):
            by_step: dict[int, list[float]] = {}
            for rows in runs:
                line = {row["step"]: row[metric.name] for row in rows if row.get(metric.name) is not None}
                axes.plot(line.keys(), line.values(), color=colour, alpha=0.35, linewidth=1)
                for step, value in line.items():
                    by_step.setdefault(step, []).append(value)
            mean = {step: sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}
            axes.plot(mean.keys(), mean.values(), c=colour, lw=2, marker=".", label=name + " -" * (not mean))
        axes.set(title=title, xlabel="update", ylim=(0, None if "lag" in title else 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(config.out)
    print(f"{config.out}: {len(runs)} runs")
    return 0


# ---- asyncrl status ---------------------------------------------------------------------------------

WRITING_SECONDS = 1.0  # Time for the processes to write their stacks
CODES: Final[Mapping[State, int]] = {State.RUNNING: 0, State.DEAD: 1, State.FINISHED: 3, State.STOPPED: 4}
"""Exit codes; with --watch a finished run is 0."""
_CLEARED: Final = "\033[H\033[J"  # Clears a terminal


@dataclass(frozen=True, kw_only=True)
class StatusConfig(Bounded):
    """Show the activity of a run's processes on this host; for dead ones, the last.

    Exit code 0: it is running; 3: it finished; 4: it was stopped, or failed, before its last update; 1: it is
    dead. With --watch 0: it finished.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    stacks: bool = False
    """Also make every living process append the stacks of its threads to RUN/processes/*.stacks."""
    json: bool = False
    """Print JSON: state, version, updates, processes and their threads; with
    --watch an object a line."""
    watch: bool = False
    """Show it again and again until the run has ended."""
    every: Annotated[float, AtLeast(0.05, "it counts seconds.", "Use 5.", highest=SECONDS)] = 5.0
    """Seconds between two reports of --watch."""


STATUS: Any = tyro.conf.FlagCreatePairsOff[StatusConfig]


def status(arguments: list[str]) -> int:
    """Print a row per thread; return the exit code of the run's state (`CODES`)."""
    config: StatusConfig = tyro.cli(STATUS, args=arguments, prog="asyncrl status")
    run = Path(config.run).expanduser()
    state = _shown(run, config)
    while config.watch and state is State.RUNNING:
        time.sleep(config.every)  # Ended by the end of the run, or by Ctrl-C.
        state = _shown(run, config)
    if config.stacks and (files := process_status.dump_stacks(run)):
        time.sleep(WRITING_SECONDS)
        print("stacks: " + " ".join(map(str, files)), file=sys.stderr if config.json else sys.stdout)
    return 0 if config.watch and state is State.FINISHED else CODES[state]


def _shown(run: Path, config: StatusConfig) -> State:
    processes = process_status.read(run)
    if not processes and not is_run(run):
        raise ConfigError(
            f"{run} has no folder {process_status.FOLDER!r} with files: no run was started there."
        )
    if is_run(run):
        summary = summarise(run)
        state, head = summary.state, _headline(summary)
    else:  # Processes of a run whose config.json is missing.
        summary, head = None, ""
        state = State.RUNNING if any(process.alive for process in processes) else State.DEAD
    if config.json:
        found = _as_dict(run, state, summary, processes)
        print(json.dumps(found, indent=None if config.watch else 2), flush=True)
        return state
    width = shutil.get_terminal_size().columns if config.watch and sys.stdout.isatty() else None
    lines = [head] * bool(head) + [line for process in processes for line in _lines(process, state)]
    text, end = "\n".join(line[:width] for line in lines), "\n\n" if config.watch and not width else "\n"
    print(f"{_CLEARED if width else ''}{text}", end=end, flush=True)
    return state


def _headline(summary: RunSummary) -> str:
    said = f"{summary.path.name}: {summary.state.value}, {summary.version} of {summary.updates} updates"
    said += f" ({summary.problem})" * bool(summary.problem)
    if summary.state is State.DEAD:
        said += "; it ended without a word: killed, or its host went down"
    if summary.state is State.STOPPED:
        said += f"; why is in {summary.path / 'logs'}"
    if (when := summary.last_row.get("time")) and type(when) in (int, float) and 0 < when < 2**32:
        said += time.strftime("; last update %Y-%m-%d %H:%M:%S", time.localtime(when))
    return said


def _lines(process: Process, state: State) -> list[str]:
    gone = "dead" if state is State.DEAD else "ended"
    lines = [f"{process.role:<12}{process.pid:>8}  {'alive' if process.alive else gone}"]
    for activity in process.activities:
        late = f", more than {activity.allowed:.0f} s" if activity.overdue else ""
        since = f", {activity.seconds:.1f} s{late}" if process.alive else ""  # What is over grows no older.
        lines.append(f"    {activity.thread:<20}{activity.what}{since}")
    return lines


def _as_dict(run: Path, state: State, summary: RunSummary | None, processes: list[Process]) -> dict[str, Any]:
    names = ("version", "updates", "imagined_success", "true_success")
    rows = [
        {
            **{name: getattr(process, name) for name in ("role", "pid", "alive")},
            "threads": [asdict(thread) | {"overdue": thread.overdue} for thread in process.activities],
        }
        for process in processes
    ]
    return {
        **{"run": str(run), "time": round(time.time(), 3), "state": state.value},
        **{name: getattr(summary, name, None) for name in names},
        "processes": rows,
    }
