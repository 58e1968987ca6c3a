"""Writes what a run says besides its rows: at its start and end, and how long things take."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl import __version__, registry
from asyncrl.config.idle_settings import idle_settings
from asyncrl.config.run import TrainConfig, WorldDefaults
from asyncrl.launch.simulated import simulator_named
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics_logger import duration
from asyncrl.storage import asset_paths, checkpoint
from asyncrl.storage.bounded_json import read_rows

WORTH_TELLING = 30.0
"""Seconds from which on it is said how long a batch or an update takes."""
ENDS = 5
"""Updates at each end of the run whose success is averaged."""


def banner(config: TrainConfig, run_dir: Path, processes: str, device: str, world: str = "") -> str:
    """One line: what runs where; and one about the world.

    Args:
        config: Settings of the run.
        run_dir: Its folder.
        processes: For example '1 learner + 3 actors'.
        device: For example 'cpu'.
        world: See `world_line`.
    """
    parts = (
        f"asyncrl {__version__}",
        f"run {short_path(run_dir)}",
        processes,
        f"world {config.world}",
        f"policy {config.policy}",
        f"seed {config.seed}",
        f"lag <= {config.max_lag}",
        device,
    )
    return "\n".join(filter(None, ["  ".join(parts), world]))


def world_line(asked: TrainConfig, said: WorldDefaults) -> str:
    """One line: how long and with what the world imagines, and who says so; empty for a shipped world.

    Args:
        asked: Settings before the world's defaults were put in.
        said: The world's defaults.
    """
    if asset_paths.is_shipped_world(asked.world):
        return ""
    if said.simulated:
        limit = asked.actor.max_decisions
        how = f"{limit} (as set)" if limit else f"{said.max_decisions} ({said.source})"
        return f"simulator  decisions {how}, workers {asked.simulator.workers}"
    context = "" if asked.imagination.context == "auto" else asked.imagination.context
    entries = (
        ("steps", asked.imagination.steps, said.steps),
        ("context", context, said.context),
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


def join_hint(config: TrainConfig, endpoint: str, keys: str, *, waits: bool) -> str:
    """One line: how an actor joins, and (`waits`) that nothing happens before one does.

    Args:
        config: Of the run.
        endpoint: Of the replay.
        keys: Folder of the keys it is used with; empty: none.
        waits: Whether no actor is there.
    """
    # Keys of the user's own are copied to wherever the actor runs.
    where = "DIR" if config.replay.keys else keys
    command = f"asyncrl actor --join {endpoint}" + (f" --keys {where}" if where else "")
    if not waits:
        return f"more actors can join: {command}"
    return f"waits up to {config.batch_timeout:g} s (--batch-timeout) for actors to join: {command}"


def notes(config: TrainConfig) -> list[str]:
    """Lines about settings that do something else than one may think."""
    lines = idle_settings(config.algorithm, config.correction, config.critic)
    chosen = config.optimizer
    if chosen.schedule != "constant" and 0 < chosen.decay_updates < config.updates:
        final = chosen.final_lr_share * chosen.learning_rate
        effect = "" if final else ", where updates change nothing"
        lines.append(
            f"the learning rate falls until update {chosen.decay_updates} of {config.updates} and stays at "
            f"{final:g} from there{effect}; --optimizer.decay-updates {config.updates} lets it fall longer"
        )
    if config.replay.sampler == "prioritized":
        lines.append(
            "--replay.sampler prioritized changes what is maximised: where more groups are ready than an "
            "update takes, a group counts in proportion to the spread of its returns (docs/staleness.md)"
        )
    return lines


def tell_estimate(config: TrainConfig, tell: Callable[[str], None]) -> Callable[[str, float], None]:
    """Return what says how long a batch or an update takes, in a line, when that is long.

    Args:
        config: Of the run.
        tell: Prints a line.
    """

    def told(what: str, seconds: float) -> None:
        flag, limit, sign = (
            ("--batch-timeout", config.batch_timeout, "episode or reported decision")
            if what == "batch"
            else ("--hang-timeout", config.hang_timeout, "micro-batch")
        )
        if seconds > WORTH_TELLING:
            tell(
                f"{'a batch' if what == 'batch' else 'an update'} takes about {duration(seconds)}; {flag} "
                f"({limit:g} s) counts from the last {sign}"
            )

    return told


def after_failure(config: TrainConfig, run_dir: Path, version: int) -> str:
    """Say what of a run that failed is saved, and how it goes on.

    Args:
        config: Settings of the run.
        run_dir: Its folder.
        version: Of the last finished update.
    """
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


@contextmanager
def failure_noted(note: Callable[[], str]) -> Iterator[None]:
    """Add a note to whatever the block raises: it is printed behind the error."""
    try:
        yield
    except Exception as error:
        error.add_note(note())
        raise


def final_summary(config: TrainConfig, run_dir: Path, reason: str = "") -> str:
    """What was reached, where the newest checkpoint is, and the command that comes next.

    Args:
        config: Settings of the run.
        run_dir: Its folder.
        reason: Why it ended well before its last update.
    """
    rates = successes(run_dir / "metrics.jsonl")
    newest = checkpoint.latest(run_dir)
    run = shlex.quote(short_path(run_dir))
    why = f": {reason}" if reason else ""
    early = len(rates) < config.updates
    lines = [f"stopped after {len(rates)} of {config.updates} updates{why}"] if early else []
    if rates:
        first, last = rates[:ENDS], rates[-ENDS:]
        where = "the simulator" if simulator_named(config.world) else "imagination"
        lines.append(
            f"{f'success in {where}:':<23} {sum(first) / len(first):.1%} (first {len(first)} updates) -> "
            f"{sum(last) / len(last):.1%} (last {len(last)})"
        )
    if newest is not None:
        lines.append(f"newest checkpoint:      {short_path(newest)}")
    lines.append(f"true success rate:      {_how_to_evaluate(config, run)}")
    lines.append("                        and with --temperature 0: that of its most likely actions")
    if early:
        lines.append(_how_to_continue(config, run_dir))
    return "\n".join(lines)


def _how_to_continue(config: TrainConfig, run_dir: Path) -> str:
    own = "".join(f" {flag} {shlex.quote(text)}" for flag, text in registry.own_code(config))
    run = shlex.quote(short_path(run_dir))
    return f"continue:               asyncrl train --run-dir {run} --resume{own}"


def _how_to_evaluate(config: TrainConfig, run: str) -> str:
    """Say how the truth is measured: the built-in simulator plays the tasks of its own worlds only."""
    policy, _ = registry.split(config.policy)
    command = f"asyncrl evaluate {policy}@{run}" if policy else f"asyncrl evaluate {run}"
    if simulator := simulator_named(config.world):
        of_world = "" if simulator == "tabletop" else f" --simulator {simulator}"
        return f"{command}{of_world}, at starts that were not trained on"
    if asset_paths.is_shipped_world(config.world):
        return f"{command} --episodes 256"
    if registry.names_code(config.world):
        return f"{command} --simulator SIMULATOR --episodes 256"
    if (Path(config.world) / "world.json").is_file():
        return f"{command} --episodes 256 (if {config.world} was fitted to tabletop; else add --simulator)"
    known = "not measured here: no built-in simulator plays the tasks of this world"
    if policy:
        return f"{known}. With a simulator of your own: {command} --simulator SIMULATOR"
    export = f"asyncrl convert {run} EXPORT --to openvla --original PUBLISHED"
    return f"{known}. Evaluate it where the policy came from: {export}"


def successes(path: Path) -> list[float]:
    """Success rate of every update in a metrics.jsonl."""
    if not path.exists():
        return []
    rates = [row.get(m.SUCCESS_ONCE.name) for _, row in read_rows(path) if row is not None]
    return [float(rate) if isinstance(rate, int | float) else 0.0 for rate in rates]


def short_path(path: Path) -> str:
    """A path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
