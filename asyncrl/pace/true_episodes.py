"""Where a round's true episodes come from: a simulator that the fitter plays in, or a robot's recordings.

An episode begins at a start that nothing is evaluated on: seeds of the last two fifths below the held-out
ones, each once in a run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final, Protocol

from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import acting
from asyncrl.fitting.collect import record, training_starts
from asyncrl.fitting.recordings import RecordingFile, read_part
from asyncrl.observability import process_status
from asyncrl.pace.rounds import TRUE
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.simulators.interface import SimStart, SimulatorSpec
from asyncrl.simulators.pool import Pool
from asyncrl.simulators.rollout import Act, Observations
from asyncrl.simulators.starts import HELD_OUT
from asyncrl.storage.regular_files import make_folder, remove

FIRST: Final = 0.6
"""Share of the seeds below the held-out ones that a run leaves to recordings from which models are fitted."""
ROWS: Final = 8
"""Of every pass of the policy."""


class TrueEpisodes(Protocol):
    """Gives a round its episodes."""

    @property
    def name(self) -> str:
        """Return what people call the source."""
        ...

    def ready(self, episodes: int) -> bool:
        """Tell whether a round of so many episodes can begin."""
        ...

    def collect(self, folder: Path, policy: Policy, episodes: int, spent: int) -> None:
        """Write recordings of `policy`, as part-*.h5.

        Args:
            folder: Complete when this returns; absent while it does not.
            policy: Of the newest version.
            episodes: How many.
            spent: Episodes of earlier rounds.

        Raises:
            ConfigError: There are no starts left.
        """
        ...


def unused_starts(spec: SimulatorSpec, *, episodes: int, spent: int) -> list[SimStart]:
    """Return starts that neither an earlier round nor any evaluation has.

    Args:
        spec: Of the simulator.
        episodes: How many.
        spent: Starts of earlier rounds.

    Raises:
        ConfigError: There are not so many.
    """
    tasks = len(spec.tasks) if spec.trials else 1
    first = int(HELD_OUT // tasks * FIRST) + -(-spent // tasks)
    return training_starts(spec, episodes=episodes, seed=first, tasks=(), stored=False)


class PlayedEpisodes:
    """`TrueEpisodes` of a simulator."""

    def __init__(self, pool: Pool, sampling: SamplingParams) -> None:
        """Play in `pool`, with actions drawn as the run draws them."""
        self._pool, self._sampling = pool, sampling
        self.name = pool.spec.name

    def ready(self, episodes: int) -> bool:
        """Say that a simulator is always ready."""
        return True

    def collect(self, folder: Path, policy: Policy, episodes: int, spent: int) -> None:
        """Play. See `TrueEpisodes.collect`."""
        unfinished = folder.with_name(f"{folder.name}.tmp")
        remove(unfinished)
        record(
            unfinished,
            self._pool,
            _reporting(acting(policy, self._sampling, ROWS)),
            unused_starts(self._pool.spec, episodes=episodes, spent=spent),
            extra_decisions=0,
            about={"temperature": self._sampling.temperature, "top_k": self._sampling.top_k},
        )
        unfinished.rename(folder)


def _reporting(act: Act) -> Act:
    """Let every decision be a sign of progress."""

    def reporting(shown: Observations) -> Any:
        process_status.progress()
        return act(shown)

    return reporting


class ArrivingRecordings:
    """`TrueEpisodes` of a folder that a robot's recordings arrive in; each file is used once in a run."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        """Look in `folder` for what no round of the run has."""
        self._folder, self._true = folder, run_dir / TRUE
        self.name = str(folder)
        self.refused: dict[str, str] = {}
        """Files that cannot be read, and why: perhaps they are still being written."""

    def ready(self, episodes: int) -> bool:
        """Tell whether so many new episodes have arrived."""
        return sum(len(part.tasks) for _, part in self._new()) >= episodes

    def collect(self, folder: Path, policy: Policy, episodes: int, spent: int) -> None:
        """Take the new files: copies of them. See `TrueEpisodes.collect`; all that is new is taken."""
        unfinished = folder.with_name(f"{folder.name}.tmp")
        remove(unfinished)
        make_folder(unfinished)
        for path, _ in self._new():
            shutil.copyfile(path, unfinished / path.name)
        unfinished.rename(folder)

    def _new(self) -> list[tuple[Path, RecordingFile]]:
        """Read the files that no round has, but for their pictures.

        Raises:
            ConfigError: Starts in one of them are held out for evaluation.
        """
        used = {path.name for path in self._true.glob("*/part-*.h5")}
        found = []
        for path in sorted(self._folder.glob("part-*.h5")):
            if path.name in used:
                continue
            try:
                part = read_part(path)
            except ConfigError as error:
                self.refused[path.name] = str(error)
                continue
            self.refused.pop(path.name, None)
            largest = int(part.seeds.max(initial=0))
            if largest >= HELD_OUT:
                raise ConfigError(
                    f"--pace.recordings {self._folder}: {path.name} has the seed {largest}, but "
                    f"those from {HELD_OUT} on are held out for evaluation, and whatever is fitted on them "
                    "cannot be judged on them. Record other starts."
                )
            found.append((path, part))
        return found
