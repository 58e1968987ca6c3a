"""Recordings of episodes.

`asyncrl collect`: record the simulator, played by a scripted expert or a policy.
`asyncrl recordings list|stats|import`: look into recordings, and make recordings of other data sets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import tyro

from asyncrl.commands.evaluate import PlayConfig
from asyncrl.config.bounds import PIXELS, SEEDS, AtLeast, Bounded
from asyncrl.config.help import ShortHelp, subcommands
from asyncrl.errors import ConfigError
from asyncrl.evaluation.success_rate import acting, check_fits
from asyncrl.fitting.recording_files import (
    RecordingFile,
    episodes_per_part,
    must_be_new,
    read_part,
    write_part,
)
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.observability.terminal import progress
from asyncrl.replay_tools.episodes import table
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSource, SimulatorSpec, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT, Act, Play, SimulatedEpisode, chosen_tasks, rollout

MOST_PLACES: Final = 8  # Episodes of a worker at once: their frames are in memory
WRITTEN_AFTER: Final = 60.0  # Seconds until files that lack episodes are written too, and replaced later


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
    """Policy instead of the expert: folder, run, shipped name, package.module:Class@FOLDER."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """Quality of the expert."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: as in the simulator's protocol."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Height and width of the pictures; 0: the simulator's own."""


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
        sampling = SamplingParams(temperature=config.temperature, top_k=0)
        act = acting(policy, sampling, 8, f"policy {config.policy}")
        about = {"policy": config.policy, "temperature": config.temperature}
        extra = 0
    with SimulatorPool(source, workers=config.workers) as pool:
        starts = training_starts(pool.spec, config.episodes, config.seed, config.tasks)
        if policy is not None:
            check_fits(policy, pool.spec, (start.task for start in starts))
        about |= {"source": asdict(source)}
        return record(config.out, pool, act, starts, extra_decisions=extra, about=about)


def training_starts(
    spec: SimulatorSpec, episodes: int, seed: int, tasks: Sequence[str] = ()
) -> list[SimStart]:
    """List random starts for a recording, task by task; stored ones are left to `asyncrl evaluate`."""
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


class _Parts:
    """Episodes that are not in a complete file yet; `write_late` writes those played so far."""

    def __init__(self, folder: Path, spec: SimulatorSpec, total: int, about: dict[str, object]) -> None:
        self._folder, self._spec, self._total, self._about = folder, spec, total, about
        self._size = episodes_per_part((spec.max_steps + 1) * len(spec.cameras) * spec.image_size**2 * 3)
        self._parts: dict[int, dict[int, SimulatedEpisode]] = {}
        self._unwritten, self._due = set[int](), time.monotonic() + WRITTEN_AFTER
        self.played = 0

    def add(self, place: int, episode: SimulatedEpisode) -> None:
        number = place // self._size
        self.played += 1
        self._parts.setdefault(number, {})[place] = episode
        self._unwritten.add(number)
        if len(self._parts[number]) == min(self._size, self._total - number * self._size):
            self._write(number)
            del self._parts[number]
        if time.monotonic() >= self._due:
            self.write_late()

    def write_late(self) -> None:
        for number in [*self._unwritten]:
            self._write(number)
        self._due = time.monotonic() + WRITTEN_AFTER

    def _write(self, number: int) -> None:
        file, part = self._folder / f"part-{number:05d}.h5", self._parts[number]
        write_part(file, [part[i] for i in sorted(part)], self._spec.name, self._spec.cameras, self._about)
        self._unwritten.discard(number)


def record(
    folder: Path,
    pool: SimulatorPool,
    act: Act | Demonstrator,
    starts: Sequence[SimStart],
    *,
    extra_decisions: int,
    about: dict[str, object],
) -> int:
    """Record whole decisions of an episode from each start; episodes played before an error are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {start.name: number for number, start in enumerate(starts)}
    plays, parts = [Play(start=start) for start in starts], _Parts(folder, pool.spec, len(starts), about)
    with progress(total=len(starts), desc=f"record {folder.name}", unit="episode") as bar:
        try:
            for episode in rollout(pool, act, plays, keep_frames=True, extra_decisions=extra_decisions):
                parts.add(places[episode.start.name], episode)
                bar.update(1)
        except BaseException as error:
            parts.write_late()
            error.add_note(f"{parts.played} of {len(starts)} episodes are in {folder}")
            raise
    return len(starts)


# ---- asyncrl recordings -----------------------------------------------------------------------------

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]


def _own_parts(given: tuple[Path, ...]) -> list[RecordingFile]:
    from asyncrl.fitting.sources import list_sources

    files = [source for path in given for source in list_sources(path)]
    if others := [path for path, kind in files if kind != "recording"]:
        raise ConfigError(
            f"{others[0]} is a data set of another program. Make recordings of it first: asyncrl recordings "
            f"import {others[0]} --out FOLDER."
        )
    return [read_part(file) for file, _ in files]


@dataclass(frozen=True, kw_only=True)
class ListFiles(Bounded):
    """List the files of recordings."""

    data: Folders
    """Recording folders, or files."""

    def run(self) -> int:
        """Print a row per file."""
        titles = ("file", "simulator", "cameras", "picture", "episodes", "frames", "solved")
        rows: list[tuple[str, ...]] = [titles]
        for part in _own_parts(self.data):
            looks, counts = part.looks, (len(part.tasks), part.frames, int(part.solved().sum()))
            shown = (looks.simulator, ",".join(looks.cameras), f"{looks.height}x{looks.width}")
            rows.append((str(part.path), *shown, *map(str, counts)))
        print(table(rows))
        return 0


@dataclass(frozen=True, kw_only=True)
class TaskStats(Bounded):
    """Count episodes and successes by task, and measure the actions."""

    data: Folders
    """Recording folders, or files."""

    def run(self) -> int:
        """Print a row per task, then one per number of an action."""
        parts = _own_parts(self.data)
        tasks = np.array([task for part in parts for task in part.tasks])
        solved = np.concatenate([part.solved() for part in parts])
        lengths = np.concatenate([np.diff(part.offsets) - 1 for part in parts])
        rows = [("task", "episodes", "solved", "mean steps", "longest")]
        for task in sorted(set(tasks.tolist())):
            own = tasks == task
            share, mean = solved[own].mean(), lengths[own].mean()
            rows.append((task, str(own.sum()), f"{share:.0%}", f"{mean:.1f}", str(lengths[own].max())))
        print(table(rows))
        if len({part.actions.shape[1] for part in parts}) > 1:
            raise ConfigError(
                "The actions of these recordings differ in width. Look at one folder at a time."
            )
        actions = np.concatenate([np.delete(part.actions, part.offsets[:-1], axis=0) for part in parts])
        shown: list[tuple[str, ...]] = [("action", "min", "q01", "mean", "q99", "max")]
        for number, values in enumerate(actions.T.astype(np.float64) if len(actions) else []):
            low, high = np.quantile(values, [0.01, 0.99])
            cells = (values.min(), low, values.mean(), high, values.max())
            shown.append((str(number), *(f"{cell:.4f}" for cell in cells)))
        print(f"\n{table(shown)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Import(Bounded):
    """Write recordings of a LeRobot v3 folder, of robomimic's files, or of LIBERO's demonstrations (HDF5)."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """LeRobot v3 folders; robomimic's HDF5 files; or NAME_demo.hdf5 files of one of LIBERO's suites. Or
    folders of such files."""
    out: Path
    """Folder for the recordings; must not hold any yet."""
    simulator: str = ""
    """LIBERO: the suite; empty: the one that has these tasks, else the folder's name."""
    wrist: bool = True
    """LIBERO: keep the wrist camera, as `asyncrl collect` does."""
    dataset: DataSetSettings = field(default_factory=DataSetSettings)
    """How LeRobot and robomimic are read."""

    def run(self) -> int:
        """Import, and print their number."""
        from asyncrl.fitting.robomimic import LIBERO_CAMERAS, open_libero
        from asyncrl.fitting.sources import import_data_sets, list_sources, open_data_sets

        must_be_new(self.out)
        sources = [source for given in self.files for source in list_sources(given)]
        if own := [path for path, kind in sources if kind == "recording"]:
            raise ConfigError(f"{own[0]} is a recording already: give it to --data as it is.")
        libero = [path for path, kind in sources if kind == "libero"]
        data_sets: list[Any] = [
            one for path, kind in sources if kind != "libero" for one in open_data_sets(path, self.dataset)
        ]
        if libero:
            data_sets += open_libero(libero, self.simulator, list(LIBERO_CAMERAS)[: 2 if self.wrist else 1])
        written = import_data_sets(data_sets, self.out)
        print(f"{written} episodes in {self.out}. Next: asyncrl fit policy --data {self.out} --out POLICY")
        return 0


RECORDINGS: Any = subcommands({"list": ListFiles, "stats": TaskStats, "import": Import})


def recordings(arguments: list[str]) -> int:
    """Run a command on recordings."""
    wanted: Any = tyro.cli(RECORDINGS, args=arguments, prog="asyncrl recordings")
    return wanted.run()
