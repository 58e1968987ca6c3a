"""Writes what a run says at its start and end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from asyncrl import __version__, registry
from asyncrl.config.run import TrainConfig, WorldDefaults
from asyncrl.observability import metrics_training as m
from asyncrl.storage import asset_paths, checkpoint

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


def join_hint(config: TrainConfig, endpoint: str, *, waits: bool) -> str:
    """One line: how an actor joins, and (`waits`) that nothing happens before one does."""
    keys = " --keys DIR" if config.replay.keys else ""
    command = f"asyncrl actor --join {endpoint}{keys}"
    if not waits:
        return f"more actors can join: {command}"
    return f"waits up to {config.batch_timeout:g} s (--batch-timeout) for actors to join: {command}"


def final_summary(config: TrainConfig, run_dir: Path) -> str:
    """What was reached, where the newest checkpoint is, and the command that comes next."""
    rates = successes(run_dir / "metrics.jsonl")
    newest = checkpoint.latest(run_dir)
    run = shlex.quote(short_path(run_dir))
    lines = [f"stopped after {len(rates)} of {config.updates} updates"] if len(rates) < config.updates else []
    if rates:
        first, last = rates[:ENDS], rates[-ENDS:]
        lines.append(
            f"success in imagination: {sum(first) / len(first):.1%} (first {len(first)} updates) -> "
            f"{sum(last) / len(last):.1%} (last {len(last)})"
        )
    if newest is not None:
        lines.append(f"newest checkpoint:      {short_path(newest)}")
    lines.append(f"true success rate:      {_how_to_evaluate(config, run)}")
    if len(rates) < config.updates:
        own = "".join(f" {flag} {shlex.quote(text)}" for flag, text in registry.own_code(config))
        lines.append(f"continue:               asyncrl train --run-dir {run} --resume{own}")
    return "\n".join(lines)


def _how_to_evaluate(config: TrainConfig, run: str) -> str:
    """Say how the truth is measured: the built-in simulator plays the tasks of its own worlds only."""
    policy, _ = registry.split(config.policy)
    command = f"asyncrl evaluate {policy}@{run}" if policy else f"asyncrl evaluate {run}"
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
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [float(row.get(m.SUCCESS_ONCE.name) or 0.0) for row in rows]


def short_path(path: Path) -> str:
    """A path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
