"""Measured seconds of both sides of a run, and the placement that keeps both busy at the next start.

    balance.json    written at the end of a run: seconds of learners and actors for one update, and waits
    --placement auto   chooses by it where the run is resumed

The work of a side for an update is shared by its ranks, so other numbers of ranks need other times.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.launch.job import Hosts, Job, run_of_earlier_start
from asyncrl.launch.own_device import count_gpus
from asyncrl.launch.placement import Placement, check_learner_devices, checked_placement, span
from asyncrl.observability import metrics_system as s
from asyncrl.storage import run_folder
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.untrusted import read_json_lines

FILE: Final = "balance.json"
SKIPPED: Final = 2  # first updates of a start, which compile and fill the pipeline
LEAST: Final = 3  # updates that have to count
NOTICEABLE: Final = 1.05
"""Speed-up from which another placement is worth a line."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Measurements of a run in which no rank both learned and imagined."""

    policy: str
    world: str
    adapters: bool
    """True if only adapters are trained. All weights are sharded: fewer learners may lack the memory."""
    learners: int
    actors: int
    learner_seconds: float
    """Time of the learners for one update, without waiting."""
    actor_seconds: float
    """Time of the actors for one update's groups, without waiting."""
    seconds: float  # from one update to the next
    groups_per_update: int
    group_size: int
    slots: int  # per actor
    max_lag: int

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.learners + self.actors


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Split of the ranks that keeps both sides busy, and numbers that fit it."""

    learners: int
    actors: int
    slots: int  # per actor
    groups_per_update: int
    seconds: float
    """From one update of as many groups as measured to the next."""

    @property
    def placement(self) -> str:
        """The text for --placement."""
        return f"learner={span(0, self.learners)},actor={span(self.learners, self.actors)}"


def measure(config: TrainConfig, placement: Placement, rows: Iterable[Mapping[str, Any]]) -> Balance | None:
    """Fold the rows of one start of a run.

    Returns:
        None after too few updates, or where the times of the sides say nothing of other placements: a rank
        both learned and imagined, an actor has two devices, or others could join.
    """
    apart = not set(placement.learners) & set(placement.actors) and not placement.worlds
    apart = apart and bool(placement.actors) and not config.replay.listen
    needed = (s.GROUPS_PER_MINUTE.name, s.LEARNER_WAITING.name, s.ACTORS_WAITING.name)
    counted = [row for row in list(rows)[SKIPPED:] if all(type(row.get(name)) is float for name in needed)]
    if not apart or len(counted) < LEAST:
        return None
    pace, learner_waits, actors_wait = (statistics.median(row[name] for row in counted) for name in needed)
    if pace <= 0:
        return None
    seconds = 60 * config.algorithm.groups_per_update / pace
    return Balance(
        policy=config.policy,
        world=config.world,
        adapters=config.lora.rank > 0,
        learners=len(placement.learners),
        actors=len(placement.actors),
        learner_seconds=seconds * (1 - learner_waits),
        actor_seconds=seconds * (1 - actors_wait),
        seconds=seconds,
        groups_per_update=config.algorithm.groups_per_update,
        group_size=config.algorithm.group_size,
        slots=config.actor.slots,
        max_lag=config.replay.max_lag,
    )


def expected_seconds(found: Balance, learners: int, actors: int) -> float:
    """Return the seconds from one update to the next with other numbers of ranks."""
    learning = found.learner_seconds * found.learners / learners
    imagining = found.actor_seconds * found.actors / actors
    return max(learning, imagining) if found.max_lag else learning + imagining


def advise(found: Balance) -> Advice:
    """Choose the split of the ranks with the shortest update.

    Slots: at most as many episodes as there can be credit for. Groups: a multiple of the learner ranks.
    """
    current, most = found.learners, min(found.ranks - 1, found.groups_per_update)
    least = 1 if found.adapters else current
    learners = min(
        range(min(least, current), max(most, current) + 1),
        key=lambda n: (expected_seconds(found, n, found.ranks - n), abs(n - current)),
    )
    actors = found.ranks - learners
    credit = (found.max_lag + 1) * found.groups_per_update * found.group_size
    return Advice(
        learners=learners,
        actors=actors,
        slots=min(found.slots, max(1, credit // actors)),
        groups_per_update=-(-found.groups_per_update // learners) * learners,
        seconds=expected_seconds(found, learners, actors),
    )


def line(found: Balance) -> str:
    """Describe in one line what was measured and what would keep both sides busy."""
    advice = advise(found)
    learners, actors = (
        f"{number} {who}{'s' * (number > 1)} {seconds:.3g} s"
        for number, who, seconds in (
            (found.learners, "learner", found.learner_seconds),
            (found.actors, "actor", found.actor_seconds),
        )
    )
    waits = (1 - seconds / found.seconds for seconds in (found.learner_seconds, found.actor_seconds))
    shares = " and ".join(f"{max(0.0, share):.0%}" for share in waits)
    sides = f"balance: an update takes {learners} and {actors}; they wait {shares} of the time"
    fitting = []
    if advice.slots != found.slots:
        fitting.append(f"--actor.slots {advice.slots}")
    if advice.groups_per_update != found.groups_per_update:
        fitting.append(f"--algorithm.groups-per-update {advice.groups_per_update}")
    gain = found.seconds / advice.seconds
    if advice.learners != found.learners and gain > NOTICEABLE:
        chosen = " ".join([f"--placement {advice.placement}", *fitting])
        return f"{sides}. {chosen}: {gain:.2f} times the pace, and what --placement auto chooses next time"
    if fitting:
        return f"{sides}. Fits this placement: {' '.join(fitting)}"
    return f"{sides}. No other placement of {found.ranks} ranks keeps both busier"


def write(run_dir: Path, found: Balance) -> None:
    """Write the file of a run, with the advice."""
    advised = {**dataclasses.asdict(advise(found)), "placement": advise(found).placement}
    write_json(run_dir / FILE, {"measured": dataclasses.asdict(found), "advice": advised})


def note_at_end(config: TrainConfig, placement: Placement, run_dir: Path, version: int) -> str:
    """Write the file of a run that ends, and return its line; empty if nothing was measured."""
    rows = read_json_lines(run_dir / "metrics.jsonl")
    updates = [row for row in rows if s.UPDATE_SECONDS.name in row and isinstance(row.get("step"), int)]
    found = measure(config, placement, [row for row in updates if row["step"] > version])
    if found is None:
        return ""
    try:
        write(run_dir, found)
    except OSError as error:
        return f"{line(found)} (not kept: {error.strerror})"
    return line(found)


def read(run_dir: Path) -> Balance | None:
    """Read the file of a run; None if it has none."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        content = read_json(path)["measured"]
        return Balance(**{field.name: content[field.name] for field in dataclasses.fields(Balance)})
    except (CheckpointError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say how a run was balanced ({error}). Remove it, or name the placement."
        ) from None


def chosen_placement(config: TrainConfig, ranks: int, resumed: Path | None) -> str:
    """Return --placement, or for `auto` the placement by a measured balance of the `resumed` run."""
    if config.placement != "auto":
        return config.placement
    found = read(resumed) if resumed is not None else None
    now = (config.policy, config.world, ranks, config.lora.rank > 0, config.algorithm.group_size)
    if found is None or now != (found.policy, found.world, found.ranks, found.adapters, found.group_size):
        return "auto"
    # Another number of groups changes both sides alike, and how many ranks can learn.
    groups = config.algorithm.groups_per_update
    return advise(dataclasses.replace(found, groups_per_update=groups)).placement


def placement_of_start(config: TrainConfig, job: Job, hosts: Hosts) -> str:
    """Return the placement of this start: by a measured balance if these hosts can do that."""
    if config.placement != "auto":
        return config.placement
    resumed = run_of_earlier_start(job) or (run_folder.locate(config) if config.resume else None)
    chosen = chosen_placement(config, hosts.size, resumed)
    if chosen != "auto":
        try:
            placement = checked_placement(dataclasses.replace(config, placement=chosen), hosts.size)
            check_learner_devices(placement, hosts, {0: count_gpus(config.device)})
        except ConfigError:  # It was measured where there were more devices.
            return "auto"
    return chosen
