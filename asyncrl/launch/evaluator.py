"""The evaluator of a run with --evaluate-every: a process beside the training, and rank 0's view of it.

    learner ──checkpoints──► evaluator ──evaluations.jsonl──► rank 0: rows, curves
                                 └──► videos, checkpoints/best

evaluator   consumes   checkpoints, every LOOK_EVERY seconds    ended by: rank 0, with the run
            produces   a line per measured version              waited for by: the end of the run only

When it dies too often, training goes on without it.

Measures versions of a run's policy in a simulator, for --evaluate-every: chooses, plays, draws.

`evaluator` runs it beside the training.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from asyncrl import registry
from asyncrl.config.loading import overlay, to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.evaluation import run_checkpoints
from asyncrl.evaluation.contact_sheet import (
    JudgedEpisode,
    judge,
    unjudged,
    write_judged_movie,
    write_judged_sheet,
)
from asyncrl.evaluation.evaluate import (
    acting,
    check_fits,
    refuse_foreign_tasks,
    simulator_of_tasks,
    summarise,
)
from asyncrl.evaluation.run_checkpoints import EvaluatedVersion, Measured, RunCheckpoints, is_due
from asyncrl.launch.children import Supervisor
from asyncrl.launch.environment import Environment, EnvironmentFiles, build_environment, check_environment
from asyncrl.launch.named_models import load_policy_version
from asyncrl.launch.placement import pick_device
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.logger import LARGEST_PICTURE, SHEET, VIDEOS, picture_name
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Play, SimulatedEpisode, evaluation_plays, rollout
from asyncrl.storage.assets import simulator_named
from asyncrl.storage.checkpoint import clean_up, forget_best_after
from asyncrl.storage.media import movie_suffix
from asyncrl.storage.untrusted import make_folder, read_bytes, read_rows

ROWS: Final = 8
"""Of every pass of the policy."""
_NAME_ONE: Final = (
    "Name one: --evaluation.simulator NAME, or package.module:make; or leave --evaluate-every out."
)


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What is played of every version."""

    source: SimulatorSource
    spec: SimulatorSpec
    plays: tuple[Play, ...]


def plan(
    config: TrainConfig, files: EnvironmentFiles | SimulatorFiles, policy: Policy | None = None
) -> EvaluationPlan:
    """Choose the simulator and the episodes.

    Args:
        policy: Of the run, to be checked too; None: that was done before.
    """
    tasks = [] if isinstance(files, SimulatorFiles) else sorted({state.task for state in files.starts})
    source = _source(config, files, tasks)
    spec = source.spec()
    try:
        refuse_foreign_tasks(tasks, spec.tasks, source.name, _NAME_ONE)
        if policy is not None:
            check_fits(policy, spec)
    except ConfigError as error:
        raise ConfigError(f"--evaluate-every is {config.evaluate_every}, but {error}") from error
    wanted = config.evaluation.episodes
    trials = min(-(-wanted // len(spec.tasks)), spec.trials) if spec.trials else 0
    plays = evaluation_plays(spec, episodes=0 if trials else wanted, tasks=(), trials=trials, repeats=1)
    return EvaluationPlan(source=source, spec=spec, plays=tuple(plays[:wanted]))


def _source(
    config: TrainConfig, files: EnvironmentFiles | SimulatorFiles, tasks: Sequence[str]
) -> SimulatorSource:
    settings = config.evaluation
    own = simulator_named(config.world)
    name = settings.simulator or own or simulator_of_tasks(tasks)
    if not name:
        example = f", as {tasks[0]!r}" if tasks else ""
        raise ConfigError(
            f"--evaluate-every is {config.evaluate_every}, but no built-in simulator has the tasks of the "
            f"start states{example}. {_NAME_ONE}"
        )
    keywords = config.world_settings if own and not settings.simulator else settings.simulator_settings
    source = SimulatorSource(name=name, settings=keywords, horizon=config.simulator.horizon)
    if getattr(registry.resolve("simulator", name), "any_image_size", False):
        source = source.with_(image_size=files.image_size)
    most = -(-settings.episodes // max(settings.workers, 1))
    return source.with_(places=max(1, min(source.usual_places(), most)))


class VersionPlayer:
    """Plays a version's episodes and draws some of them. Keeps the simulators between two versions."""

    def __init__(
        self, config: TrainConfig, plan: EvaluationPlan, run_dir: Path, device: torch.device
    ) -> None:
        """Begin without a simulator: the first version builds it."""
        self._config, self._plan, self._run_dir, self._device = config, plan, run_dir, device
        self._pool: SimulatorPool | None = None

    def __call__(self, version: int, folder: Path | None) -> Measured:
        """Measure one version; see `run_checkpoints.Measure`."""
        with process_status.activity(f"loading version {version} to play it", self._config.startup_timeout):
            policy = load_policy_version(self._config, folder, self._device)
            if self._pool is None:
                workers = self._config.evaluation.workers
                self._pool = SimulatorPool(self._plan.source, workers, steps=policy.action_spec.chunk)
        drawn = self._config.evaluation.movies
        plays = self._plan.plays
        episodes = self._play(policy, plays[:drawn], version, 0, keep_frames=True)
        shown = list(episodes)
        episodes += self._play(policy, plays[drawn:], version, len(episodes), keep_frames=False)
        del policy
        _free_memory(self._device)
        result = summarise(episodes)
        if not shown:
            return Measured(result=result)
        with process_status.activity(f"drawing version {version}", self._config.startup_timeout):
            title = f"version {version}: true success {result.overall.successes} of {result.overall.episodes}"
            sheet, movie = self._draw(shown, version, title)
        _free_memory(self._device)
        return Measured(result=result, sheet=sheet, movie=movie)

    def close(self) -> None:
        """End the simulators."""
        if self._pool is not None:
            self._pool.close()

    def _play(
        self, policy: Policy, plays: Sequence[Play], version: int, before: int, *, keep_frames: bool
    ) -> list[SimulatedEpisode]:
        """Play some of the episodes, in the order of `plays`, and say how far that is."""
        assert self._pool is not None
        algorithm, total = self._config.algorithm, len(self._plan.plays)
        act = acting(policy, SamplingParams(temperature=algorithm.temperature, top_k=algorithm.top_k), ROWS)
        order = {play.start.name: place for place, play in enumerate(plays)}
        played: list[SimulatedEpisode] = []
        with process_status.activity(_doing(version, before, total), self._config.hang_timeout):
            for episode in rollout(self._pool, act, plays, keep_frames=keep_frames):
                played.append(episode)
                process_status.progress()
                process_status.describe(_doing(version, before + len(played), total))
        return sorted(played, key=lambda episode: order[episode.start.name])

    def _draw(self, episodes: Sequence[SimulatedEpisode], version: int, title: str) -> tuple[str, str]:
        """Write sheet and movie; returns their names below the run's folder."""
        judged = self._judged(episodes)
        make_folder(self._run_dir / VIDEOS)
        sheet = picture_name(version, SHEET)
        movie = picture_name(version, movie_suffix())
        write_judged_sheet(self._run_dir / sheet, judged, title)
        write_judged_movie(self._run_dir / movie, judged, title)
        return sheet, movie

    def _judged(self, episodes: Sequence[SimulatedEpisode]) -> list[JudgedEpisode]:
        """Load world and reward model for as long as they draw: they may be large."""
        if simulator_named(self._config.world):
            return unjudged(episodes)
        environment = build_environment(self._config, self._device)
        assert isinstance(environment, Environment)
        actor = self._config.actor
        return judge(
            episodes,
            environment.world,
            environment.reward,
            threshold=actor.success_threshold,
            frames=self._config.success_frames,
        )


def _free_memory(device: torch.device) -> None:
    """Give back what models took: whoever shares the device needs it until the next version."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _doing(version: int, played: int, total: int) -> str:
    return f"true success of version {version}: {played} of {total} episodes"


def open_checkpoints(
    config: TrainConfig, run_dir: Path, device: torch.device, stack: ExitStack
) -> RunCheckpoints:
    """Join simulator, models and the run's checkpoints; `stack` ends the simulators."""
    chosen = plan(config, check_environment(config))
    player = VersionPlayer(config, chosen, run_dir, device)
    stack.callback(player.close)
    return RunCheckpoints(
        run_dir,
        player,
        every=config.evaluate_every,
        last=config.updates,
        simulator=chosen.source.name,
        temperature=config.algorithm.temperature,
    )


def evaluation_device(config: TrainConfig, local_rank: int) -> torch.device:
    """Return where the models of the evaluator go."""
    chosen = config.evaluation.device
    return pick_device(config.device if chosen == "auto" else chosen, local_rank)


ROLE: Final = "evaluator"
LOOK_EVERY: Final = 0.5
"""Seconds between two looks, for a checkpoint and for a result."""
RESPAWNS: Final = 2
"""How often in a row it comes back when it dies."""
NICENESS: Final = 19
"""Of the evaluator and its simulators on a CPU, the lowest there is: what trains goes first."""
_SHOWN: Final = (SHEET, ".gif")
"""Kinds of files that TensorBoard shows."""
_log = logging.getLogger(__name__)


def evaluator_main(config_json: str, run_dir_text: str, local_rank: str) -> None:
    """Measure the run's versions as they come, until rank 0 ends this process."""
    import json
    import multiprocessing

    import torch

    from asyncrl.launch.own_device import make_current
    from asyncrl.observability import signals
    from asyncrl.storage import run_owner

    signals.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config, run_dir = (
        overlay(TrainConfig(), json.loads(config_json), "the run's settings"),
        Path(run_dir_text),
    )
    lock = run_owner.join(run_dir)
    multiprocessing.current_process().daemon = False  # So that it may have workers, which end with it.
    process_status.publish_as(run_dir, ROLE)
    process_status.set_activity("loading models", config.startup_timeout)
    device = evaluation_device(config, int(local_rank))
    make_current(device)
    if device.type == "cpu":
        os.nice(NICENESS)
        torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(lock.release)
        checkpoints = open_checkpoints(config, run_dir, device, stack)
        while True:
            if not checkpoints.round():
                process_status.set_activity("waiting for a checkpoint to measure")
                time.sleep(LOOK_EVERY)


class EvaluatorProcess:
    """Rank 0's view of the evaluator. Create and use it on one thread that outlives it."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        version: int,
        report: Callable[[int, dict[Metric, float], dict[str, bytes]], None],
        local_rank: int,
    ) -> None:
        """Start the evaluator, unless --evaluate-every is 0."""
        self._config, self._run_dir, self._report = config, run_dir, report
        self._child: Supervisor | None = None
        self._looked_at = -LOOK_EVERY
        self.lost = ""
        """Why there will be no more results; empty: there may be."""
        if config.evaluate_every:
            run_checkpoints.cut_evaluations(run_dir, version)
            forget_best_after(run_dir, version)
            self._known = _reported(run_dir / "metrics.jsonl")
            self._child = Supervisor(
                ROLE,
                "asyncrl.launch.evaluator:evaluator_main",
                (to_json(config), str(run_dir), str(local_rank)),
                run_dir / "logs" / f"{ROLE}.log",
                RESPAWNS,
            )

    def poll(self) -> list[str]:
        """Report what is newly known, respawn the evaluator when it died; return lines for the console."""
        if self._child is None or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        lines = []
        self._report_new()
        if not self.lost:
            try:
                self._child.poll()
            except RunError as error:
                self.lost = str(error)
                lines.append(f"true success is not measured any more, the training goes on: {error}")
        return lines

    def finish(self, version: int, poll: Callable[[], bool]) -> str:
        """Wait for the result of the run's last version, as long as episodes are played.

        Returns:
            Why there is none; empty: there is one, or it is not due.
        """
        due = is_due(version, self._config.evaluate_every, self._config.updates)
        if self._child is None or self.lost or not due:
            return ""
        allowed = self._config.hang_timeout
        seen, since = "", time.monotonic()
        with waits.waiting(waits.EVALUATION, allowed):
            while version not in self._known:
                if poll() or self.lost:
                    return f"version {version} was not measured" if not self.lost else ""
                doing = self._doing()
                what = doing.what if doing else ""
                # What it does has a deadline of its own, as loading has; else this wait's holds.
                if what != seen or (doing and doing.allowed and not doing.overdue):
                    since = time.monotonic()
                    process_status.progress()
                if what != seen:
                    seen = what
                    process_status.describe(f"{waits.EVALUATION.name}: {what}")
                if time.monotonic() - since > allowed:
                    return (
                        f"version {version} was not measured: nothing moved on for {allowed:g} s "
                        f"(--hang-timeout). See {self._run_dir / 'logs' / f'{ROLE}.log'}"
                    )
                time.sleep(LOOK_EVERY / 5)
        return ""

    def close(self) -> None:
        """End the evaluator, report what it had measured, and put away what it held."""
        if self._child is not None:
            self._child.stop(1.0)
            self._report_new()
            clean_up(self._run_dir)

    def _report_new(self) -> None:
        for row in run_checkpoints.read_evaluations(self._run_dir):
            if row.version not in self._known:
                self._known.add(row.version)
                self._report(row.version, metrics_of(row), pictures_of(self._run_dir, row))

    def _doing(self) -> process_status.ThreadActivity | None:
        """Read what the evaluator's process says that it does."""
        found = (p for p in process_status.read(self._run_dir) if p.role == ROLE and p.alive)
        return next((a for p in found for a in p.activities if a.thread == "MainThread"), None)


def _reported(rows: Path) -> set[int]:
    """Return the versions whose measurement is in metrics.jsonl."""
    found = (row for _, row in read_rows(rows) if row is not None) if rows.is_file() else ()
    return {row["step"] for row in found if m.EVAL_SUCCESS.name in row and type(row.get("step")) is int}


def pictures_of(run_dir: Path, row: EvaluatedVersion) -> dict[str, bytes]:
    """Return what TensorBoard shows of a measured version: name of the card -> content of the file.

    It shows no .mp4; and what is too large, or was taken away, is left out with a line in the process's log.
    """
    found = {}
    for tag, path in (("eval/sheet", row.sheet), ("eval/movie", row.movie)):
        suffix = Path(path).suffix
        if suffix in _SHOWN:
            try:
                found[tag] = read_bytes(run_dir / picture_name(row.version, suffix), LARGEST_PICTURE)
            except OSError as error:
                _log.warning("TensorBoard does not get %s of version %d: %s", tag, row.version, error)
    return found


def metrics_of(row: EvaluatedVersion) -> dict[Metric, float]:
    """Return what curves and rows say of a measured version."""
    return {
        m.EVAL_SUCCESS: row.success,
        m.EVAL_LOW: row.low,
        m.EVAL_HIGH: row.high,
        m.EVAL_EPISODES: float(row.episodes),
        m.EVAL_STEPS: row.steps,
    }
