"""One round: true episodes of the newest policy, a refit, and an audit that decides.

    policy ─► true episodes ─► part fitted ─► candidate world ─┐
                           └─► part held out ─► verdicts of both ─► accepted, if fewer are wrong

An accepted world is a folder below the run's before the round's line says so; nobody reads it earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.evaluation.evaluate import SuccessRate
from asyncrl.observability import process_status
from asyncrl.pace import rounds
from asyncrl.pace.refit import RoundData, load_round, refit
from asyncrl.pace.rounds import Round
from asyncrl.pace.true_episodes import TrueEpisodes
from asyncrl.pace.verdicts import Verdicts, verdicts
from asyncrl.policies.interface import Policy
from asyncrl.rewards.interface import RewardModel
from asyncrl.storage.regular_files import make_folder, remove
from asyncrl.worlds.interface import World


@dataclass(frozen=True, kw_only=True)
class WorldAt:
    """A world of the run and the reward model that judges it."""

    folder: Path
    reward: Path
    version: int


Load = Callable[[WorldAt], tuple[World[Any], RewardModel]]
"""Loads both as an actor does."""


class Fitter:
    """Makes the rounds of one run. Used by one thread of one process."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        source: TrueEpisodes,
        first: WorldAt,
        load: Load,
        device: torch.device,
    ) -> None:
        """Go on behind the rounds that the run has.

        Args:
            config: Of the run.
            run_dir: Its folder.
            source: Of true episodes.
            first: World of the run's beginning.
            load: Loads a world to be judged.
            device: Where models are fitted.
        """
        self._config, self._run_dir, self._source = config, run_dir, source
        self._first, self._load, self._device = first, load, device

    @property
    def present(self) -> WorldAt:
        """Return the world that the run goes on with."""
        version = rounds.newest_world(self._run_dir)
        if version is None:
            return self._first
        folder = rounds.world_folder(self._run_dir, version)
        return WorldAt(folder=folder, reward=folder, version=version)

    def due(self, version: int) -> bool:
        """Tell whether a round begins with this policy version."""
        settings, made = self._config.pace, rounds.read(self._run_dir)
        spent = sum(row.episodes for row in made)
        return (
            version > 0
            and version % settings.every == 0
            and version > max((row.version for row in made), default=0)
            and (not settings.budget or spent + settings.episodes <= settings.budget)
            and self._source.ready(settings.episodes)
        )

    def round(self, version: int, policy: Policy) -> Round:
        """Make one round, and write its line.

        Args:
            version: Of the policy.
            policy: In evaluation; not changed.

        Raises:
            AsyncRLError: True episodes cannot be had or fitted.
            OSError: Something cannot be written.
        """
        settings, began = self._config.pace, time.monotonic()
        spent = sum(row.episodes for row in rounds.read(self._run_dir))
        folder = rounds.round_folder(self._run_dir, version)
        make_folder(folder.parent)
        remove(folder)
        with process_status.activity(f"playing true episodes of version {version}", self._patience):
            self._source.collect(folder, policy, settings.episodes, spent)
        collected = time.monotonic()
        present, seed = self.present, self._config.seed + version
        folders = [
            *(rounds.round_folder(self._run_dir, row.version) for row in rounds.read(self._run_dir)),
            folder,
        ]
        data = load_round(folders, settings, seed)
        with process_status.activity(f"judging world {present.version}", self._patience):
            before = self._verdicts(present, data)
        candidate = self._refitted(present, data, seed)
        with process_status.activity(f"judging world {candidate.version}", self._patience):
            after = self._verdicts(candidate, data)
        row = self._row(version, folder, before, after, (began, collected), candidate)
        if row.accepted:
            target = rounds.world_folder(self._run_dir, candidate.version)
            remove(target)
            candidate.folder.rename(target)
        else:
            remove(candidate.folder)
        rounds.append(self._run_dir, row)
        return row

    @property
    def _patience(self) -> float:
        return self._config.hang_timeout

    def _refitted(self, present: WorldAt, data: RoundData, seed: int) -> WorldAt:
        version = present.version + 1
        out = rounds.world_folder(self._run_dir, version).with_suffix(".tmp")
        make_folder(out.parent)
        with process_status.activity(f"refitting world {present.version}", self._patience):
            refit(
                present.folder,
                present.reward,
                out,
                data.fitted,
                self._config.pace,
                version=version,
                device=self._device,
                seed=seed,
            )
        return WorldAt(folder=out, reward=out, version=version)

    def _verdicts(self, at: WorldAt, data: RoundData) -> Verdicts:
        world, reward = self._load(at)
        return verdicts(
            world,
            reward,
            data.audited,
            threshold=self._config.actor.success_threshold,
            success_frames=self._config.success_frames,
        )

    def _row(
        self,
        version: int,
        folder: Path,
        before: Verdicts,
        after: Verdicts,
        times: tuple[float, float],
        candidate: WorldAt,
    ) -> Round:
        solved = solved_in(folder)
        rate = SuccessRate.of(sum(solved), len(solved))
        accepted = after.wrong < before.wrong
        began, collected = times
        return Round(
            version=version,
            time=time.time(),
            world=candidate.version if accepted else candidate.version - 1,
            accepted=accepted,
            source=self._source.name,
            episodes=rate.episodes,
            successes=rate.successes,
            success=rate.rate,
            low=rate.low,
            high=rate.high,
            audited=len(before.solved),
            solved=int(before.solved.sum()),
            judged=int(before.judged.sum()),
            wrong=before.wrong,
            false=before.false,
            wrong_after=after.wrong,
            false_after=after.false,
            collect_seconds=collected - began,
            fit_seconds=time.monotonic() - collected,
        )


def solved_in(folder: Path) -> list[bool]:
    """Tell of each recorded episode of a folder whether it was solved."""
    from asyncrl.fitting.recordings import read_part, recording_files

    return [bool(one) for file in recording_files(folder) for one in read_part(file).solved()]
