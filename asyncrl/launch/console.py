"""The log of a run, and the lines on its console at start and end."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncrl import __version__, registry
from asyncrl.config.algorithm import AlgorithmSettings, idle_settings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.launch.placement import Placement, span
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import trackers
from asyncrl.observability.logger import MetricsLogger, flat, start_command
from asyncrl.observability.metrics import Readings
from asyncrl.observability.terminal import duration
from asyncrl.records import returns_differ
from asyncrl.storage import assets, checkpoint
from asyncrl.storage.assets import simulator_named
from asyncrl.storage.atomic import replacing
from asyncrl.storage.run_folder import BEST, VIDEOS, folder_bytes, record_start
from asyncrl.storage.untrusted import make_folder, read_json_lines

if TYPE_CHECKING:
    from asyncrl.launch.build import LearnerStart, LoadedModels
    from asyncrl.learner.learner import Learner
    from asyncrl.learner.ranks import Groups

ENDS: Final = 5  # Updates at each end of the run whose success is averaged; fewer where they would overlap
WIDTH: Final = 80  # Columns at which lines of several parts are broken
SKIPPED: Final = 2  # first updates of a start, which compile and fill the pipeline
LEAST: Final = 3  # updates that `balance` needs
NOTICEABLE: Final = 1.05  # Speed-up from which another placement is worth a sentence


def banner(config: TrainConfig, run_dir: Path, processes: str, device: str, world: str = "") -> str:
    """Describe the placement of processes in lines of at most `WIDTH` columns, and the world in one."""
    parts = (
        f"asyncrl {__version__}",
        f"run {short_path(run_dir)}",
        processes,
        f"world {config.world}",
        f"policy {config.policy}",
        f"seed {config.seed}",
        f"lag <= {config.replay.max_lag}",
        device,
    )
    return "\n".join([*joined(parts), *filter(None, [world])])


def joined(parts: Iterable[str]) -> list[str]:
    """Join parts by two spaces into lines of at most `WIDTH` columns; a longer part has a line to itself."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def world_line(asked: TrainConfig, said: WorldDefaults) -> str:
    """Return a line about the world's settings and their origin; empty for a shipped world."""
    if assets.is_shipped_world(asked.world):
        return ""
    if said.simulated:
        limit = asked.actor.max_decisions
        how = f"{limit} (as set)" if limit else f"{said.max_decisions} ({said.source})"
        return f"simulator  decisions {how}, workers {asked.simulator.workers}"
    context = "" if asked.imagination.context == "auto" else asked.imagination.context
    entries = (
        ("steps", asked.imagination.steps, said.steps),
        ("context", context, said.context if said.steps else ""),  # Own classes have no such setting.
        ("decisions", asked.actor.max_decisions, said.max_decisions),
    )
    by_world = [f"{name} {default}" for name, own, default in entries if not own and default]
    by_user = [f"{name} {own}" for name, own, _ in entries if own]
    parts = ["world"]
    parts += [f"{', '.join(by_world)} ({said.source})"] if by_world else []
    parts += [f"{', '.join(by_user)} (as set)"] if by_user else []
    chosen = asked.algorithm
    if said.temperature and chosen.kind == "grpo" and chosen.temperature != said.temperature:
        parts.append(
            f"--algorithm.temperature {chosen.temperature:g} (published recipe: {said.temperature:g})"
        )
    return "  ".join(parts)


def resumed(config: TrainConfig, version: int) -> list[str]:
    """Return a line with the update that a resumed run continues from."""
    if not config.resume:
        return []
    if version < config.updates:
        return [f"goes on from version {version} of {config.updates}"]
    return [
        f"nothing is left to do: version {version} is reached, and --updates is {config.updates}. A larger "
        "--updates goes on"
    ]


def join_hint(config: TrainConfig, endpoint: str, keys: str, *, waits: bool) -> str:
    """Return a line about how an actor joins; with `waits`, nothing happens before one does."""
    # Keys of the user's own are copied to wherever the actor runs.
    where = "DIR" if config.replay.keys else keys
    command = f"asyncrl actor --join {endpoint}" + (f" --keys {where}" if where else "")
    if not waits:
        return f"more actors can join: {command}"
    return f"waits up to {config.batch_timeout:g} s (--batch-timeout) for actors to join: {command}"


def notes(config: TrainConfig) -> list[str]:
    """Return lines about settings with a surprising or no effect."""
    lines = idle_settings(config.algorithm, config.correction, config.critic)
    reasons = {
        "evaluation": "" if config.evaluate_every else "without --evaluate-every no version is evaluated",
        "lora": "" if config.lora.rank else "without --lora.rank there are no adapters",
    }
    for section, why in reasons.items():
        settings = getattr(config, section)
        for field in dataclasses.fields(settings) if why else ():
            if getattr(settings, field.name) != field.default and not field.name.startswith("simulator"):
                lines.append(f"--{section}.{field.name.replace('_', '-')} has no effect: {why}")
    chosen = config.optimizer
    if chosen.schedule != "constant" and 0 < chosen.decay_updates < config.updates:
        lines.append(
            f"the learning rate falls until update {chosen.decay_updates} of {config.updates} and stays at "
            f"0 from there; --optimizer.decay-updates {config.updates} lets it fall longer"
        )
    if config.monitor.listen:
        from asyncrl.observability import monitor

        lines.append(monitor.line_about(config.monitor.listen))
    return lines


def introduce(
    log: MetricsLogger,
    asked: TrainConfig,
    models: LoadedModels,
    start: LearnerStart,
    processes: str,
    begun: Sequence[str] = (),
    hints: Sequence[str] = (),
) -> None:
    """Print the first lines of a run: banner, resumed update, and notes about its settings."""
    config, world = models.config, world_line(asked, models.defaults)
    log.banner(banner(config, start.run_dir, processes, str(start.policy.device), world))
    lines = [*begun, *resumed(config, start.version), *hints, *notes(config)]
    if lines:
        log.banner("\n".join(lines))


@contextmanager
def failure_noted(config: TrainConfig, run_dir: Path, learner: Learner) -> Iterator[None]:
    """Add a note about the saved state to an error that the block raises."""
    try:
        yield
    except Exception as error:
        error.add_note(_after_failure(config, run_dir, learner.version))
        raise


def _after_failure(config: TrainConfig, run_dir: Path, version: int) -> str:
    newest = checkpoint.latest(run_dir)
    if newest is None:
        return f"Nothing is saved: the run has no checkpoint. Its logs are in {run_dir / 'logs'}"
    saved = int(newest.name.rpartition("_")[2])
    what = f"Version {version} is saved"
    if saved != version:
        what = f"Version {version} is not saved, {saved} is"
    return (
        f"{what}: {short_path(newest)}\nlogs:                   {short_path(run_dir / 'logs')}\n"
        f"{_how_to_continue(config, run_dir)}"
    )


def final_summary(
    config: TrainConfig, run_dir: Path, reason: str = "", tasks: Sequence[str] = (), seconds: float = 0.0
) -> str:
    """Return result, reason of an early end, time and disk used, checkpoint and next commands."""
    rows = update_rows(run_dir / "metrics.jsonl")
    rates = successes(rows)
    empty = [why for row in rows if (why := nothing_learned(config.algorithm, row))]
    newest = checkpoint.latest(run_dir)
    run = shlex.quote(short_path(run_dir))
    why = f": {reason}" if reason else ""
    early = len(rates) < config.updates
    lines = [f"stopped after {len(rates)} of {config.updates} updates{why}"] if early else []
    if rates:
        where = "the simulator" if simulator_named(config.world) else "imagination"
        lines.append(f"{f'success in {where}:':<23} {_change(rates)}")
    if 2 * len(empty) >= max(1, len(rows)):
        lines.append(f"nothing to learn from:  in {len(empty)} of {len(rows)} updates {empty[-1]}")
    lines += _measured(run_dir)
    megabytes = folder_bytes(run_dir) / 1e6
    lines.append(f"took:                   {duration(seconds)}, {megabytes:.0f} MB in {short_path(run_dir)}")
    if newest is not None:
        lines.append(f"newest checkpoint:      {short_path(newest)}")
    if shown := sorted((run_dir / VIDEOS).glob("imagined_*.png")):
        lines.append(f"imagined episodes:      {short_path(shown[-1])}")
    lines.append(f"true success rate:      {_how_to_evaluate(config, run, tasks)}")
    lines.append("                        and with --temperature 0: its most likely actions")
    if early:
        lines.append(_how_to_continue(config, run_dir))
    return "\n".join(lines)


def _change(rates: Sequence[float]) -> str:
    count = min(ENDS, len(rates) // 2)
    if not count:
        return f"{rates[0]:.1%} (one update)"
    first, last = sum(rates[:count]) / count, sum(rates[-count:]) / count
    return f"{first:.1%} (first {count} of {len(rates)} updates) -> {last:.1%} (last {count})"


def _measured(run_dir: Path) -> list[str]:
    from asyncrl.evaluation.run_checkpoints import read_evaluations

    rows = read_evaluations(run_dir)
    if not rows:
        return []
    first, last, best = rows[0], rows[-1], max(rows, key=lambda row: (row.success, row.version))
    change = str(first) if first is last else f"{first}\n{'':<23} -> {last}"
    lines = [f"{f'true success, {last.simulator}:':<23} {change}"]
    if best.version and (kept := run_dir / checkpoint.FOLDER / BEST).is_dir():
        lines.append(f"best, version {best.version}:".ljust(24) + short_path(kept))
    if last.movie:
        lines.append(f"true and imagined:      {short_path(run_dir / last.movie)}")
    return lines


def _how_to_continue(config: TrainConfig, run_dir: Path) -> str:
    own = "".join(f" {flag} {shlex.quote(text)}" for flag, text in registry.own_code(config))
    run = shlex.quote(short_path(run_dir))
    return f"continue:               asyncrl train --run-dir {run} --resume{own}"


def _how_to_evaluate(config: TrainConfig, run: str, tasks: Sequence[str]) -> str:
    from asyncrl.evaluation.success_rate import simulator_of_tasks

    policy, _ = registry.split(config.policy)
    command = f"asyncrl evaluate {policy}@{run}" if policy else f"asyncrl evaluate {run}"
    if simulator_named(config.world):
        own = f" --simulator {config.world}" if registry.names_code(config.world) else ""
        return f"{command}{own}, at starts that were not trained on"
    if simulator := config.evaluation.simulator or simulator_of_tasks(set(tasks)):
        own = f" --simulator {simulator}" if registry.names_code(simulator) else ""
        return f"{command}{own}"
    return f"{command} --simulator package.module:Class (no built-in simulator plays this world's tasks)"


def update_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of updates from a metrics.jsonl."""
    return [row for row in read_json_lines(path) if m.EVAL_SUCCESS.name not in row]


def successes(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the success rate of every update."""
    rates: list[Any] = [row.get(m.SUCCESS_ONCE.name) for row in rows]
    return [float(rate) if type(rate) in (int, float) else 0.0 for rate in rates]


def nothing_learned(settings: AlgorithmSettings, row: Mapping[str, Any]) -> str:
    """Return why an update had nothing to learn, by its metrics; empty if it had."""
    algorithm = "" if registry.names_code(settings.advantage) else settings.kind
    mean, spread = row.get(m.RETURN.name), row.get(m.REWARD_STD.name)
    advice = s.SIGNAL_GROUPS.advice.partition("Low: ")[2]
    if algorithm == "grpo" and row.get(s.SIGNAL_GROUPS.name) == 0:
        return f"no group had both outcomes, so nothing was learned: {advice}"
    if not (algorithm == "ppo" and isinstance(mean, float) and isinstance(spread, float)):
        return ""
    if not returns_differ(0.0, spread, abs(mean)):
        return f"all episodes returned {mean:.3g}, so none was better than another: {advice}"
    return ""


def _tell_nothing_learned(
    settings: AlgorithmSettings, tell: Callable[[str], None]
) -> Callable[[int, Readings], None]:
    before = ""

    def note(step: int, values: Readings) -> None:
        nonlocal before
        why = nothing_learned(settings, {metric.name: value for metric, value in values.items()})
        if why and why != before:
            tell(f"update {step}: {why}")
        before = why

    return note


def balance(config: TrainConfig, placement: Placement, run_dir: Path, version: int) -> str:
    """Describe learners' and actors' median time per update since `version`, and a better placement.

    Empty after too few updates, if ranks have both roles, or if actors may join. Assumes even work per rank.
    """
    names = (s.GROUPS_PER_MINUTE.name, s.LEARNER_WAITING.name, s.ACTORS_WAITING.name)
    rows = list(read_json_lines(run_dir / "metrics.jsonl", {"step": int}))
    rows = [row for row in rows if all(type(row.get(name)) is float for name in names)]
    rows = [row for row in rows if row["step"] > version][SKIPPED:]
    learners, actors = len(placement.learners), len(placement.actors)
    mixed = set(placement.learners) & set(placement.actors) or config.replay.listen
    if mixed or not actors or len(rows) < LEAST:
        return ""
    pace, *waits = (statistics.median(row[name] for row in rows) for name in names)
    if pace <= 0:
        return ""
    ranks, groups = learners + actors, config.algorithm.groups_per_update
    seconds = 60 * groups / pace
    learning, imagining = (seconds * (1 - wait) for wait in waits)

    def expected(count: int) -> float:
        sides = (learning * learners / count, imagining * actors / (ranks - count))
        return max(sides) if config.replay.max_lag else sum(sides)

    # All weights are sharded over the learners: fewer may lack the memory.
    least, most = 1 if config.lora.rank else learners, max(learners, min(ranks - 1, groups))
    best = min(range(least, most + 1), key=lambda count: (expected(count), abs(count - learners)))
    gain = seconds / expected(best)
    advice = f"No other placement of {ranks} ranks keeps both busier"
    if best != learners and gain > NOTICEABLE:
        text = f"learner={span(0, best)},actor={span(best, ranks - best)}"
        advice = f"--placement {text}: {gain:.2f} times the pace"
    sides = " and ".join(
        f"{count} {side}{'s' * (count > 1)} {time:.3g} s"
        for count, side, time in ((learners, "learner", learning), (actors, "actor", imagining))
    )
    shares = " and ".join(f"{wait:.0%}" for wait in waits)
    return f"balance: an update takes {sides}; they wait {shares} of the time. {advice}"


def short_path(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


# ---- the log and its sinks ---------------------------------------------------------------------------


def check_sinks(config: TrainConfig) -> None:
    """Check before anything starts that the trackers are installed and the monitor can listen."""
    trackers.check_installed(config.log_with)
    if config.monitor.listen:
        from asyncrl.observability import monitor

        monitor.check_free(config.monitor.listen)


def pictures(config: TrainConfig, run_dir: Path, log: MetricsLogger) -> Callable[[int, Groups], None]:
    """Return the learner's `show`: it draws the episodes of updates 1, 2, 5, 10, 20, 50 ... and the last."""

    def draw(version: int, groups: Groups) -> None:
        from asyncrl.replay_tools.pictures import sheet_of

        chosen = version == config.updates or str(version).rstrip("0") in ("1", "2", "5")
        if not (config.pictures and chosen and groups):
            return
        sheet = sheet_of([episode for group in groups for episode in group])
        log.add_picture(version, "imagined/episodes", np.asarray(sheet))

        def save() -> None:
            try:
                make_folder(run_dir / VIDEOS)
                with replacing(run_dir / VIDEOS / f"imagined_{version:06d}.png") as part:
                    sheet.save(part, "PNG")
            except OSError as error:
                log.banner(f"the picture of update {version} is not written: {error}")

        threading.Thread(target=save, name="picture", daemon=True).start()  # A disk may block.

    return draw


@contextmanager
def opened_log(config: TrainConfig, start: LearnerStart) -> Iterator[MetricsLogger]:
    """Open the log of a run and the sinks of its rows for the length of the block."""
    command = start_command()
    log = MetricsLogger(
        start.run_dir,
        updates=config.updates,
        resume_step=start.version,
        evaluates=config.evaluate_every > 0,
        settings=flat(dataclasses.asdict(config)),
        command=command,
    )
    with ExitStack() as stack:
        sent = trackers.Trackers(config.log_with, start.run_dir, log.banner, command=command)
        stack.enter_context(sent)  # Ended last: it reads what the log wrote.
        stack.enter_context(log)
        record_start(
            start.run_dir,
            attempt=start.identity.attempt,
            command=command,
            version=start.version,
            tell=log.banner,
        )
        nothing_learned = _tell_nothing_learned(config.algorithm, log.banner)
        log.readers += [sent.note, nothing_learned]
        if config.monitor.listen:
            from asyncrl.observability import monitor

            address = monitor.parse_address(config.monitor.listen)
            there = monitor.Monitor(address, start.run_dir, updates=config.updates, resume_step=start.version)
            log.readers.append(stack.enter_context(there).note)
        yield log
