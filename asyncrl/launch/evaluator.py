"""The evaluator of a run with --evaluate-every: a process next to the training, and rank 0's view of it.

    learner ──checkpoints──► evaluator ──evaluations.jsonl──► rank 0: rows, curves
                                 └──► videos, checkpoints/best

Only the end of the run waits for it. If it dies too often, training goes on without it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.devices.tensors import take_device
from asyncrl.errors import ConfigError, RunError
from asyncrl.evaluation import run_checkpoints, success_rate
from asyncrl.evaluation.contact_sheet import judge, unjudged, write_judged_movie, write_judged_sheet
from asyncrl.evaluation.run_checkpoints import RunCheckpoints, is_due
from asyncrl.launch.children import Supervisor
from asyncrl.launch.environment import WorldFiles, build_world_model, check_environment
from asyncrl.launch.named_models import load_policy_version, sampling_of
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy
from asyncrl.simulators.interface import SimulatorSource, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import DURING_TRAINING, Play, SimulatedEpisode, evaluation_seeds, rollout
from asyncrl.storage import run_owner
from asyncrl.storage.assets import simulator_named
from asyncrl.storage.checkpoint import clean_up, forget_best_after
from asyncrl.storage.media import movie_suffix
from asyncrl.storage.run_folder import VIDEOS
from asyncrl.storage.untrusted import make_folder, read_json_lines

ROLE: Final = "evaluator"
ROWS: Final = 8  # of a pass of the policy
LOOK_EVERY: Final = 0.5  # Seconds between two looks, for a checkpoint and for a result
RESPAWNS: Final = 2  # in a row
NICENESS: Final = 19  # Niceness of the evaluator and its simulators on a CPU: training goes first
MOVIES: Final = 6  # Episodes per version drawn into RUN/videos: true and imagined frames of the same actions
_NAME_ONE: Final = (
    "Name one: --evaluation.simulator NAME, or package.module:make; or leave --evaluate-every out."
)


def plan(
    config: TrainConfig, files: WorldFiles | SimulatorFiles, policy: Policy | None = None
) -> tuple[SimulatorSource, list[Play]]:
    """Choose the simulator and the episodes of every version; check that a given policy can play them."""
    settings, own = config.evaluation, simulator_named(config.world)
    tasks = files.tasks
    name = settings.simulator or own or success_rate.simulator_of_tasks(tasks)
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
    most = -(-settings.episodes // max(config.simulator.workers, 1))
    source = source.with_(places=max(1, min(source.usual_places(), most)))
    spec = source.spec()
    try:
        success_rate.refuse_foreign_tasks(tasks, spec.tasks, name, _NAME_ONE)
        if policy is not None:
            success_rate.check_fits(policy, spec)
    except ConfigError as error:
        raise ConfigError(f"--evaluate-every is {config.evaluate_every}, but {error}") from error
    # Never those of `asyncrl evaluate`, which the best version must not be chosen by; tasks take turns.
    seeds = evaluation_seeds(DURING_TRAINING, settings.episodes)
    return source, [Play(start=random_start(spec, seed)) for seed in seeds]


class VersionPlayer:
    """Plays a version's episodes and draws some of them. The simulators live as long as it."""

    def __init__(
        self,
        config: TrainConfig,
        source: SimulatorSource,
        plays: Sequence[Play],
        run_dir: Path,
        device: torch.device,
    ) -> None:
        self._config, self._plays, self._run_dir, self._device = config, plays, run_dir, device
        self._pool = SimulatorPool(source, max(1, config.simulator.workers))
        self.close = self._pool.close

    def __call__(self, version: int, folder: Path | None) -> tuple[success_rate.Evaluation, str, str]:
        """Measure one version; see `run_checkpoints.Measure`."""
        patience, plays = self._config.startup_timeout, self._plays
        with process_status.activity(f"loading version {version} to play it", patience):
            policy = load_policy_version(self._config, folder, self._device)
        shown = self._play(policy, plays[:MOVIES], version, 0, keep_frames=True)
        others = self._play(policy, plays[MOVIES:], version, len(shown), keep_frames=False)
        del policy
        _free_memory(self._device)
        result = success_rate.summarise([*shown, *others])
        with process_status.activity(f"drawing version {version}", patience):
            title = f"version {version}: true success {result.overall.successes} of {result.overall.episodes}"
            sheet, movie = self._draw(shown, version, title)
        _free_memory(self._device)
        return result, sheet, movie

    def _play(
        self, policy: Policy, plays: Sequence[Play], version: int, before: int, *, keep_frames: bool
    ) -> list[SimulatedEpisode]:
        played = list[SimulatedEpisode]()

        def doing() -> str:
            done = before + len(played)
            return f"true success of version {version}: {done} of {len(self._plays)} episodes"

        act = success_rate.acting(policy, sampling_of(self._config), ROWS, f"policy of version {version}")
        with process_status.activity(doing(), self._config.hang_timeout):
            for episode in rollout(self._pool, act, plays, keep_frames=keep_frames):
                played.append(episode)
                process_status.progress()
                process_status.describe(doing())
        order = {play.start.name: place for place, play in enumerate(plays)}
        return sorted(played, key=lambda episode: order[episode.start.name])

    def _draw(self, episodes: Sequence[SimulatedEpisode], version: int, title: str) -> tuple[str, str]:
        """Draw a sheet and a movie; world and reward model may be large: loaded for this call alone."""
        config = self._config
        if simulator_named(config.world):
            judged = [unjudged(episode) for episode in episodes]
        else:
            environment = build_world_model(config, self._device)
            judged = judge(
                episodes,
                environment.world,
                environment.reward,
                threshold=config.actor.success_threshold,
                frames=config.success_frames,
            )
        make_folder(self._run_dir / VIDEOS)
        sheet, movie = (f"{VIDEOS}/update_{version:06d}{kind}" for kind in (".png", movie_suffix()))
        write_judged_sheet(self._run_dir / sheet, judged, title)
        write_judged_movie(self._run_dir / movie, judged, title)
        return sheet, movie


def _free_memory(device: torch.device) -> None:
    """Free the models' memory: other processes on the device need it until the next version."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def evaluator_main(config: TrainConfig, run_dir: Path, local_rank: int) -> None:
    """Measure the run's versions as they come, until rank 0 ends this process."""
    lock = run_owner.join(run_dir)
    multiprocessing.current_process().daemon = False  # So that it may have workers, which end with it.
    process_status.publish_as(run_dir, ROLE)
    process_status.set_activity("loading models", config.startup_timeout)
    device = take_device(config.device, local_rank)
    if device.type == "cpu":
        os.nice(NICENESS)
        torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(lock.release)
        source, plays = plan(config, check_environment(config))
        player = VersionPlayer(config, source, plays, run_dir, device)
        stack.callback(player.close)
        checkpoints = RunCheckpoints(
            run_dir,
            player,
            every=config.evaluate_every,
            last=config.updates,
            simulator=source.name,
            temperature=config.algorithm.temperature,
        )
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
        report: Callable[[int, dict[Metric, float]], None],
        local_rank: int,
    ) -> None:
        self._config, self._run_dir, self._report = config, run_dir, report
        self._log_path = run_dir / "logs" / f"{ROLE}.log"
        self._child: Supervisor | None = None
        self._looked_at = -LOOK_EVERY
        self._lost = False
        if config.evaluate_every:
            run_checkpoints.cut_evaluations(run_dir, version)
            forget_best_after(run_dir, version)
            rows = read_json_lines(run_dir / "metrics.jsonl")
            measured = [row.get("step") for row in rows if m.EVAL_SUCCESS.name in row]
            self._known = {step for step in measured if type(step) is int}
            self._child = Supervisor(
                ROLE,
                "asyncrl.launch.evaluator:evaluator_main",
                (config, run_dir, local_rank),
                self._log_path,
                RESPAWNS,
            )

    def poll(self) -> list[str]:
        """Report new results, respawn the evaluator if it died; returns lines for the console."""
        if self._child is None or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        self._report_new()
        if not self._lost:
            try:
                self._child.poll()
            except RunError as error:
                self._lost = True
                return [f"true success is not measured any more, the training goes on: {error}"]
        return []

    def finish(self, version: int, poll: Callable[[], bool]) -> str:
        """Wait for the result of the last version; returns why it is missing, or empty if none is due."""
        due = is_due(version, self._config.evaluate_every, self._config.updates)
        if self._child is None or self._lost or not due:
            return ""
        allowed, since = self._config.hang_timeout, time.monotonic()
        with process_status.waiting(waits.EVALUATION, allowed):
            while version not in self._known:
                if poll() or self._lost:
                    return "" if self._lost else f"version {version} was not measured"
                mine = (p for p in process_status.read(self._run_dir) if p.role == ROLE and p.alive)
                doing = next((process.main for process in mine), None)
                if doing and doing.allowed and not doing.overdue:
                    since = time.monotonic()
                    process_status.progress()
                    process_status.describe(f"{waits.EVALUATION.name}: {doing.what}")
                if time.monotonic() - since > allowed:
                    return (
                        f"version {version} was not measured: nothing moved on for {allowed:g} s "
                        f"(--hang-timeout). See {self._log_path}"
                    )
                time.sleep(LOOK_EVERY / 5)
        return ""

    def close(self) -> None:
        """End the evaluator, report its last results, and remove the copies that it held."""
        if self._child is not None:
            self._child.stop(1.0)
            self._report_new()
            clean_up(self._run_dir)

    def _report_new(self) -> None:
        for row in run_checkpoints.read_evaluations(self._run_dir):
            if row.version not in self._known:
                self._known.add(row.version)
                values = {
                    m.EVAL_SUCCESS: row.success,
                    m.EVAL_LOW: row.low,
                    m.EVAL_HIGH: row.high,
                    m.EVAL_EPISODES: float(row.episodes),
                    m.EVAL_STEPS: row.steps,
                }
                self._report(row.version, values)
