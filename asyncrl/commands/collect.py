"""`asyncrl collect`: record the simulator, played by a scripted expert or a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

from tqdm import tqdm

from asyncrl.commands.evaluate import PlayConfig
from asyncrl.config.bounds import PIXELS, SEEDS, AtLeast
from asyncrl.config.help import ShortHelp
from asyncrl.errors import ConfigError
from asyncrl.evaluation.success_rate import acting, check_fits
from asyncrl.fitting.recording_files import episodes_per_part, must_be_new, write_part
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSource, SimulatorSpec, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT, Act, Play, SimulatedEpisode, chosen_tasks, rollout

MOST_PLACES: Final = 8  # Episodes of a worker at once: their frames are in memory


@dataclass(frozen=True, kw_only=True)
class CollectConfig(PlayConfig):
    """Record episodes of a true simulator as HDF5: from a scripted expert, or from a policy."""

    out: Path
    """Folder for the recordings; must not hold any yet."""
    episodes: Annotated[int, AtLeast(1, "there is something to record.", "Use 256.", highest=HELD_OUT)] = 256
    """Episodes to record."""
    seed: Annotated[int, AtLeast(0, "seeds are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """First simulator seed. Below 1000000, which is where the seeds of `asyncrl evaluate` begin."""
    policy: str = ""
    """Recorded instead of the expert: folder, run, shipped name, package.module:Class@FOLDER."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """How good the expert is."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: as in the simulator's protocol."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Height and width of the pictures; 0: the simulator's own."""


ARGUMENTS: Final = CollectConfig
HELP: Final = ShortHelp(
    command="asyncrl collect",
    usage="--out FOLDER [--flags]",
    groups={
        "What is recorded": "out simulator simulator_settings episodes tasks seed image_size",
        "Who plays": "policy temperature expert.noise",
        "How fast": "workers",
    },
    examples=["asyncrl collect --out data/demos --episodes 1000 --expert.noise 0.1 0.25"],
)


def main(arguments: list[str]) -> int:
    """Record, with a progress bar."""
    config = HELP.parse(CollectConfig, arguments, shown=CollectConfig(out=Path()))
    source = config.source(
        min(config.episodes, MOST_PLACES * config.workers),
        image_size=config.image_size,
        horizon=config.horizon,
    )
    if not config.policy and not source.may_have_expert():
        raise ConfigError(
            f"--simulator {config.simulator} has no expert to record. Record a policy in it with --policy, "
            "or add the method `expert`: docs/extending.md."
        )
    must_be_new(config.out)
    written = _record(config, source)
    print(f"{written} episodes in {config.out}. Next: asyncrl fit policy --data {config.out} --out POLICY")
    return 0


def _record(config: CollectConfig, source: SimulatorSource) -> int:
    policy, extra = None, 1  # Decisions recorded after the task is solved.
    act: Act | Demonstrator = config.expert
    about: dict[str, object] = {"demonstrator": asdict(config.expert)}
    if config.policy:
        from asyncrl.devices.tensors import take_device
        from asyncrl.launch.named_models import named_policy
        from asyncrl.policies.interface import SamplingParams

        named = named_policy(config.policy, config.policy_settings)
        policy = named.load(take_device(config.device))
        act = acting(policy, SamplingParams(temperature=config.temperature, top_k=0), rows=8)
        about = {"policy": config.policy, "temperature": config.temperature}
        extra = 0
    with SimulatorPool(source, workers=config.workers) as pool:
        if policy is not None:
            check_fits(policy, pool.spec)
        starts = training_starts(pool.spec, config.episodes, config.seed, config.tasks)
        about |= {"source": asdict(source)}
        return record(config.out, pool, act, starts, extra_decisions=extra, about=about)


def training_starts(
    spec: SimulatorSpec, episodes: int, seed: int, tasks: Sequence[str] = ()
) -> list[SimStart]:
    """List random starts for a recording, task by task; stored ones are what `asyncrl evaluate` plays."""
    if tasks and not spec.trials:
        raise ConfigError(
            f"--tasks chooses among the tasks of stored starts, but in {spec.name} every seed is a start. "
            "Leave it out."
        )
    chosen = chosen_tasks(spec, tasks)
    # A seed's task is its remainder: where there are tasks, these are all seeds of the chosen ones.
    stride, offsets = (len(spec.tasks), chosen) if spec.trials else (1, [0])
    last = seed + -(-episodes // len(offsets))
    if not 0 <= seed <= last <= HELD_OUT // stride:
        raise ConfigError(
            f"--seed {seed} with --episodes {episodes} reaches the held-out seeds from {HELD_OUT // stride} "
            f"on{' of each task' if spec.trials else ''}. Use smaller ones."
        )
    seeds = [one * stride + offset for one in range(seed, last) for offset in offsets]
    starts = [random_start(spec, one) for one in seeds[:episodes]]
    return sorted(starts, key=lambda start: (start.task_id, start.seed))


def record(
    folder: Path,
    pool: SimulatorPool,
    act: Act | Demonstrator,
    starts: Sequence[SimStart],
    *,
    extra_decisions: int,
    about: dict[str, object],
) -> int:
    """Record one episode from each start, in order, whole decisions with all frames; return how many."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = pool.spec
    per_part = episodes_per_part((spec.max_steps + 1) * len(spec.cameras) * spec.image_size**2 * 3)
    places = {start.name: number for number, start in enumerate(starts)}
    parts: dict[int, dict[int, SimulatedEpisode]] = {}
    plays = [Play(start=start) for start in starts]
    written = 0
    with tqdm(total=len(starts), desc=f"record {folder.name}", unit="episode", mininterval=2.0) as bar:
        for episode in rollout(pool, act, plays, keep_frames=True, extra_decisions=extra_decisions):
            place = places[episode.start.name]
            number = place // per_part
            part = parts.setdefault(number, {})
            part[place] = episode
            if len(part) == min(per_part, len(starts) - number * per_part):
                episodes = [part[i] for i in sorted(parts.pop(number))]
                file = folder / f"part-{number:05d}.h5"
                written += write_part(file, episodes, spec.name, spec.cameras, about)
            bar.update(1)
    assert not parts, "every start was played once"
    return written
