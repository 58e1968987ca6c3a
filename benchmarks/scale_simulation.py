"""How far does a run scale? Events over the real limiter, with the costs of docs/doctor.md#pace.

    python benchmarks/scale_simulation.py

The limiter (`asyncrl/replay/limiter.py`) grants, bounds the lag and picks, as in a run (`simulated_run.py`).
The first table makes the whole runs of docs/measurements/run_speed.md from their measured one-sided rates:
what the simulation adds is waiting. The second one is of a recipe on 8, 64 and 512 GPUs, half of them
learners: with the recipe's own batch, and with one in proportion to the GPUs; with a replay that costs
nothing, and with one thread that takes in, stores and hands over everything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from measuring import commit, table
from simulated_run import Scale, Simulation

from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H200
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import Placement

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Simulate a recipe on many GPUs."""

    recipe: str = str(ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml")
    gpus: tuple[int, ...] = (8, 64, 512)
    updates: int = 9
    """Of each run."""
    skip: int = 3
    """First updates that do not count."""
    shortest: float = 0.5
    """See `Scale`; with successes, episodes end early."""
    ingest: float = 386e6
    """Bytes per second that the replay takes in and stores (docs/measurements/replay_speed.md)."""
    hand_over: float = 1.1e9
    """Bytes per second of a batch from the replay to the learner: ZeroMQ over ipc, 40 MB a message."""
    seed: int = 0


MEASURED = (
    # GPUs, actors, steps per hour asynchronous, synchronous, learner alone, actors alone; waits, lag
    (2, 1, 457_650, 222_942, 446_021, 473_715, 0.014, 0.008),
    (4, 2, 668_414, 378_705, 670_580, 1_025_215, 0.020, 0.255),
)
"""docs/measurements/run_speed.md: 4 groups of 8 episodes of 2 decisions."""
STEPS = 8 * 64
"""Of an update of those runs."""


def measured_scale(actors: int, learner: float, imagining: float, *, max_lag: int) -> Scale:
    """Return a whole run of the page, from the steps per hour of its learner and of its actors alone."""
    decisions_per_second = imagining / 3600 / 8
    return Scale(
        actors=actors,
        slots=16,
        round_seconds=16 * actors / decisions_per_second,
        update_seconds=3600 * STEPS / learner,
        group_size=8,
        groups_per_update=4,
        decisions=2,
        max_lag=max_lag,
        weights_seconds=0.007,
    )


def measured_rows(seed: int) -> Iterator[list[object]]:
    """Hold the simulation against the whole runs of the page."""
    for gpus, actors, asynchronous, synchronous, learner, imagining, waits, credit in MEASURED:
        for how, lag, measured in (("asynchronous", 2, asynchronous), ("synchronous", 0, synchronous)):
            scale = measured_scale(actors, learner, imagining, max_lag=lag)
            found = Simulation(scale, seed).run(40, skip=10)
            steps = found.decisions_per_second * 8 * 3600
            said = f"{waits:.1%} / {credit:.1%}" if lag else "-"
            yield [
                f"{gpus} GPUs, {how}", f"{measured:,}", f"{steps:,.0f}", f"{steps / measured - 1:+.1%}",
                said, f"{found.learner_waits:.1%} / {found.actors_wait:.1%}",
                f"{found.lag_mean:.1f} / {found.lag_max}",
            ]  # fmt: skip


def recipe_scale(
    config: TrainConfig, work: RunWork, sizes: Sizes, gpus: int, settings: Settings
) -> tuple[Scale, Prediction]:
    """Return a recipe on so many GPUs, half of them learners as far as there are groups for these."""
    learners = min(gpus // 2, config.algorithm.groups_per_update)
    placement = Placement(learners=tuple(range(learners)), actors=tuple(range(learners, gpus)))
    expected = predict(config, work, sizes, H200, placement)
    shorter = (1 + settings.shortest) / 2  # What is learned from and imagined, on average.
    once = sizes.version / (H200.network if gpus > 8 else H200.links)
    scale = Scale(
        actors=len(placement.actors),
        slots=config.actor.slots,
        round_seconds=config.actor.slots * expected.actor.decision,
        update_seconds=expected.learner.update * shorter,
        group_size=config.algorithm.group_size,
        groups_per_update=config.algorithm.groups_per_update,
        decisions=work.decisions,
        max_lag=config.max_lag,
        shortest=settings.shortest,
        weights_seconds=once + sizes.version / H200.links * (gpus > 8),
    )
    return scale, expected


def recipe_rows(settings: Settings) -> Iterator[list[object]]:
    """Simulate the recipe: batches, numbers of GPUs, and what the replay costs."""
    config = load_file(Path(settings.recipe))
    sizes, work = published_run(config)
    smallest = min(settings.gpus)
    for grows in (False, True):
        for gpus in settings.gpus:
            if grows and gpus == smallest:
                continue
            groups = config.algorithm.groups_per_update * (gpus // smallest if grows else 1)
            algorithm = replace(config.algorithm, groups_per_update=groups)
            scale, expected = recipe_scale(replace(config, algorithm=algorithm), work, sizes, gpus, settings)
            costly = replace(scale, ingest=settings.ingest, hand_over=settings.hand_over)
            for replay, chosen in (("free", scale), ("one thread", costly)):
                print(f"{gpus} GPUs, {groups} groups, replay {replay}", file=sys.stderr, flush=True)
                found = Simulation(chosen, settings.seed).run(settings.updates, skip=settings.skip)
                ideal = expected.seconds * (1 + settings.shortest) / 2
                yield [
                    gpus, gpus - scale.actors, groups, replay, f"{found.seconds:.1f}", f"{ideal:.1f}",
                    f"{found.decisions_per_second:,.0f}", f"{found.lag_mean:.1f} / {found.lag_max}",
                    found.dropped, f"{found.learner_waits:.0%}", f"{found.actors_wait:.0%}",
                    f"{found.bytes_per_second / 1e6:,.0f}", f"{found.replay_busy:.0%}",
                    f"{scale.weights_seconds:.2f}",
                ]  # fmt: skip


def main() -> None:
    """Simulate, print."""
    settings = tyro.cli(Settings, description=__doc__)
    print(f"commit {commit()}, seed {settings.seed}\n")
    titles = ["", "measured", "simulated", "off by", "measured waits", "simulated", "lag avg / max"]
    print(table(titles, list(measured_rows(settings.seed))) + "\n", flush=True)
    titles = ["GPUs", "learners", "groups", "replay", "s/update", "cost model", "decisions/s",
              "lag avg / max", "dropped", "learner waits", "slots empty", "MB/s", "replay busy",
              "weights s"]  # fmt: skip
    print(table(titles, list(recipe_rows(settings))))


if __name__ == "__main__":
    main()
