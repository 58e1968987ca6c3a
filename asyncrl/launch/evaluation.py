"""Measures versions of a run's policy in a simulator, for --evaluate-every: chooses, plays, draws.

`evaluator` runs it beside the training.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import acting, check_fits, summarise
from asyncrl.evaluation.judged import JudgedEpisode, judge, unjudged
from asyncrl.evaluation.judged_pictures import write_judged_movie, write_judged_sheet
from asyncrl.evaluation.run_checkpoints import Measured, RunCheckpoints
from asyncrl.evaluation.simulator_of_tasks import refuse_foreign_tasks, simulator_of_tasks
from asyncrl.launch.environment import Environment, EnvironmentFiles, build_environment, check_environment
from asyncrl.launch.placement import pick_device
from asyncrl.launch.policies import load_policy_version
from asyncrl.launch.simulated import SimulatorFiles, simulator_named
from asyncrl.observability import process_status
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Play, SimulatedEpisode, rollout
from asyncrl.simulators.starts import evaluation_plays
from asyncrl.storage.movies import movie_suffix
from asyncrl.storage.regular_files import make_folder
from asyncrl.storage.version_pictures import SHEET, VIDEOS, picture_name

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
