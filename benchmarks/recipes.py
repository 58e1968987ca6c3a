"""Do the shipped full-size recipes finish updates, and what do they take beside what is expected of them?

    python benchmarks/recipes.py configs/wan_libero_spatial_*.toml --full models/random --gpus 0,1
    python benchmarks/recipes.py configs/wan_libero_spatial_*.toml --full models/random --gpus 0,1 --groups 4

A recipe runs as it is shipped, on random weights of the published size, which are written where they are not
there; episodes have full length, and every decision counts. `--groups` makes an update smaller, and its
minibatches no more than its groups; where time is short `--decisions` ends episodes early. A learner that is
alone trains adapters, as the recipes' headers say, and one rank learns and imagines (--placement collocated).
Random worlds of OpenSora and EVAC have asyncrl's own layout, which is computed in float32 unless told
otherwise; they get --imagination.precision bf16, as the published ones compute.

The first update, which waits for everything to be compiled, does not count; with --skip 0 the time from it to
the second one is all that counts. Time and memory stand beside those of the cost model (`asyncrl doctor
--costs`) for the same batch and placement, and the burst rate of the GPU that is here. A recipe that does not
get that far is named, and the others are run all the same; then the exit status is 1.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, get_args

import asynchrony
import torch
import tyro
from asynchrony import Outcome
from full_size import Kind, Scale, written
from measuring import commit, heading, table

from asyncrl.config.imagination import ImaginationSettings
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.host import GIB
from asyncrl.doctor.pace import ADAPTERS, device_here
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H200
from asyncrl.errors import RunError
from asyncrl.launch.placement import parse_placement
from asyncrl.observability import metrics_system as s


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Run recipes of published policies in world models."""

    recipes: Annotated[tuple[Path, ...], tyro.conf.Positional]
    full: Path
    """Folder of models with random weights."""
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES of the runs; one rank each. Empty: two ranks on the CPU."""
    groups: int = 0
    """--algorithm.groups-per-update; 0: as shipped."""
    decisions: int = 0
    """--actor.max-decisions; 0: as shipped."""
    updates: int = 3
    """Of each run."""
    skip: int = 1
    """First updates that do not count."""
    limit: float = 7200.0
    """Seconds that a run may take after its first update, and as many that it has to come to that."""
    flags: str = ""
    """Further flags of `asyncrl train`."""
    scale: Scale = "full"
    """tiny: small models, to try the script on a CPU."""
    out: str = ""
    """Folder for the runs; default: a temporary one."""
    json: str = ""
    """Also write the numbers here."""


def kind_of(config: TrainConfig) -> Kind:
    """Return the kind of a recipe's world, by the name of its folder; in a simulator there is none: ends."""
    name = Path(config.world).name.lower()
    found = next((kind for kind in get_args(Kind) if kind in name), None)
    if found is None:
        raise SystemExit(f"--world is {config.world}, but this measures recipes in published worlds.")
    return found


def as_published(config: TrainConfig) -> ImaginationSettings:
    """Let a random world compute as the published one does, which only Wan's has the layout for."""
    imagination = config.imagination
    if kind_of(config) == "wan" or imagination.precision != "stored":
        return imagination
    return replace(imagination, precision="bf16")


def scaled(config: TrainConfig, settings: Settings, ranks: int) -> TrainConfig:
    """Return the recipe with a smaller batch, adapters where one rank learns, and both roles on one rank."""
    groups = settings.groups or config.algorithm.groups_per_update
    minibatches = min(config.algorithm.minibatches, groups)
    algorithm = replace(config.algorithm, groups_per_update=groups, minibatches=minibatches)
    placement = config.placement if ranks > 1 else "collocated"
    alone = len(parse_placement(placement, ranks, 0).learners) == 1
    rank = config.lora.rank or (ADAPTERS if alone else 0)
    lora = replace(config.lora, rank=rank)
    actor = replace(config.actor, max_decisions=settings.decisions or config.actor.max_decisions)
    return replace(
        config,
        algorithm=algorithm,
        actor=actor,
        lora=lora,
        placement=placement,
        imagination=as_published(config),
    )


def flags_of(recipe: Path, shipped: TrainConfig, config: TrainConfig, settings: Settings) -> list[str]:
    """Return the command line of a run."""
    policy, world = written(settings.full, kind_of(shipped), settings.scale)
    flags = [str(recipe.absolute()), "--policy", str(policy), "--world", str(world)]
    flags += ["--algorithm.groups-per-update", str(config.algorithm.groups_per_update)]
    flags += ["--algorithm.minibatches", str(config.algorithm.minibatches)]
    flags += ["--actor.max-decisions", str(config.actor.max_decisions)]
    if config.lora.rank != shipped.lora.rank:
        flags += ["--lora.rank", str(config.lora.rank), "--optimizer.learning-rate", "1e-4"]
    if config.imagination.precision != shipped.imagination.precision:
        flags += ["--imagination.precision", config.imagination.precision]
    return flags


def expected(config: TrainConfig, ranks: int, *, measured: bool) -> Prediction:
    """Ask the cost model, with the rate of the GPU that is here, or of an H200 where there is none."""
    device = device_here(torch.device("cuda", 0)) if measured else H200
    sizes, work = published_run(config)
    return predict(config, work, sizes, device, parse_placement(config.placement, ranks, 0))


def main() -> None:
    """Run, print."""
    settings = tyro.cli(Settings, description=__doc__)
    measured = bool(settings.gpus)
    print(heading(torch.device("cuda" if measured else "cpu")), flush=True)
    out = Path(settings.out or tempfile.mkdtemp(prefix="recipes-"))
    out.mkdir(parents=True, exist_ok=True)
    ranks = len(settings.gpus.split(",")) if measured else 2
    lines, content, cut = list[list[object]](), dict[str, object](), list[str]()
    for recipe in settings.recipes:
        shipped = load_file(recipe)
        config = scaled(shipped, settings, ranks)
        prediction = expected(config, ranks, measured=measured)
        try:
            result = run(recipe, shipped, config, settings, out, ranks)
        except RunError as error:
            print(f"{recipe.stem}: {error}", flush=True)
            cut.append(recipe.stem)
            continue
        lines.append(line_of(recipe, result, prediction))
        content[recipe.stem] = {"run": asdict(result), "expected": asdict(prediction)}
        print(lines[-1], flush=True)
    titles = ["recipe", "decisions", "s/update", "expected", "ratio", "learner GiB", "expected", "actor GiB",
              "expected", "learner waits", "actors wait", "first update s"]  # fmt: skip
    print("\n" + table(titles, lines))
    if settings.json:
        Path(settings.json).write_text(json.dumps({"commit": commit()} | content, indent=1))
    if cut:
        raise SystemExit(f"not measured: {', '.join(cut)}")


def run(
    recipe: Path, shipped: TrainConfig, config: TrainConfig, settings: Settings, out: Path, ranks: int
) -> Outcome:
    """Make one run."""
    flags = [*flags_of(recipe, shipped, config, settings), settings.flags]
    of_run = asynchrony.Settings(
        gpus=settings.gpus,
        flags=" ".join(flags),
        placement=config.placement,
        ranks=ranks,
        updates=settings.updates,
        skip=settings.skip,
        limit=settings.limit,
    )
    return asynchrony.train(of_run, "asynchronous", out, name=recipe.stem)


def line_of(recipe: Path, found: Outcome, prediction: Prediction) -> list[object]:
    """Return the table's line of a recipe."""
    seconds = 3600 * prediction.decisions * prediction.chunk / found.steps_per_hour
    learner = found.memory.get(s.LEARNER_MEMORY.name, float("nan")) / GIB
    actor = found.memory.get(s.ACTOR_MEMORY.name, float("nan")) / GIB
    return [
        recipe.stem, prediction.decisions, f"{seconds:.1f}", f"{prediction.seconds:.1f}",
        f"{seconds / prediction.seconds:.2f}", f"{learner:.1f}", f"{prediction.learner_bytes / GIB:.1f}",
        f"{actor:.1f}", f"{prediction.actor_bytes / GIB:.1f}", f"{found.learner_waiting:.1%}",
        f"{found.actors_waiting:.1%}", f"{found.first_update:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
