"""One round: true episodes of the newest policy, a refit, and an audit that decides.

    policy ─► true episodes ─► part fitted ─► candidate world ─┐
                           ├─► part held out ─► verdicts of both ─► accepted, if fewer are wrong
                           └─► key frames, where groups begin on the way (--keyframe-share)

A new version of the world is the refitted one, or the one before with new key frames. It is a folder below
the run's before the round's line says so; nobody reads it earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.evaluation.evaluate import SuccessRate
from asyncrl.observability import process_status
from asyncrl.pace import rounds
from asyncrl.pace.new_keyframes import new_keyframes
from asyncrl.pace.refit import Refit, RoundData, load_round, refit
from asyncrl.pace.rounds import Round
from asyncrl.pace.side_by_side import parts_at_once, side_by_side
from asyncrl.pace.true_episodes import TrueEpisodes
from asyncrl.pace.verdicts import Verdicts, verdicts
from asyncrl.pace.version_folder import copy_world
from asyncrl.policies.interface import Policy
from asyncrl.records import StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.storage.regular_files import make_folder, remove
from asyncrl.worlds import mined_keyframes
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
        *,
        mines: bool = False,
    ) -> None:
        """Go on behind the rounds that the run has.

        Args:
            config: Of the run.
            run_dir: Its folder.
            source: Of true episodes.
            first: World of the run's beginning.
            load: Loads a world to be judged.
            device: Where models are fitted.
            mines: Whether key frames are taken from the true episodes.
        """
        self._config, self._run_dir, self._source = config, run_dir, source
        self._first, self._load, self._device, self._mines = first, load, device, mines

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
        began = time.monotonic()
        folder = self._collect(version, policy)
        collected = time.monotonic()
        present, seed = self.present, self._config.seed + version
        data = load_round([*self._folders_before(), folder], self._config.pace, seed)
        candidate = self._refitted(present, data, seed)
        before, after = self._verdicts((present, candidate), data)
        accepted = after.wrong < before.wrong
        found = self._new_keyframes(folder, policy, candidate if accepted else present, seed)
        if published := accepted or bool(found):
            keyframes = self._put_into_place(candidate, present, found, accepted=accepted)
        else:
            keyframes = 0
            remove(candidate.folder)
        row = Round(
            **_of_episodes(version, folder, self._source.name),
            **_of_verdicts(before, after),
            time=time.time(),
            world=candidate.version if published else present.version,
            published=published,
            accepted=accepted,
            keyframes=keyframes,
            collect_seconds=collected - began,
            fit_seconds=time.monotonic() - collected,
        )
        rounds.append(self._run_dir, row)
        return row

    def _collect(self, version: int, policy: Policy) -> Path:
        """Collect the true episodes of a policy version in a folder made anew; return it."""
        spent = sum(row.episodes for row in rounds.read(self._run_dir))
        folder = rounds.round_folder(self._run_dir, version)
        make_folder(folder.parent)
        remove(folder)
        with process_status.activity(f"playing true episodes of version {version}", self._patience):
            self._source.collect(folder, policy, self._config.pace.episodes, spent)
        return folder

    def _folders_before(self) -> list[Path]:
        """Return the folders of the rounds that the run has, the newest last."""
        return [rounds.round_folder(self._run_dir, row.version) for row in rounds.read(self._run_dir)]

    def _put_into_place(
        self, candidate: WorldAt, present: WorldAt, found: list[StartState], *, accepted: bool
    ) -> int:
        """Make the folder of the next version; return how many key frames it has.

        Where no new ones were found, those of the version before go on.
        """
        if not accepted:
            copy_world(present.folder, present.reward, candidate.folder, candidate.version)
        keyframes = found or mined_keyframes.load(present.folder)
        mined_keyframes.save(candidate.folder, candidate.version, keyframes)
        target = rounds.world_folder(self._run_dir, candidate.version)
        remove(target)
        candidate.folder.rename(target)
        return len(keyframes)

    @property
    def _patience(self) -> float:
        return self._config.hang_timeout

    @property
    def _at_once(self) -> bool:
        return parts_at_once(self._config, self._device)

    def _refitted(self, present: WorldAt, data: RoundData, seed: int) -> WorldAt:
        version = present.version + 1
        out = rounds.world_folder(self._run_dir, version).with_suffix(".tmp")
        make_folder(out.parent)
        with process_status.activity(f"refitting world {present.version}", self._patience):
            made = Refit(
                present=present.folder,
                reward=present.reward,
                out=out,
                version=version,
                device=self._device,
                seed=seed,
                patience=self._patience,
                at_once=self._at_once,
            )
            refit(made, data.fitted, self._config.pace)
        return WorldAt(folder=out, reward=out, version=version)

    def _new_keyframes(self, folder: Path, policy: Policy, at: WorldAt, seed: int) -> list[StartState]:
        if not self._mines:
            return []
        with process_status.activity("choosing key frames", self._patience):
            return new_keyframes(self._config, folder, policy, *self._load(at), seed=seed)

    def _verdicts(self, worlds: Sequence[WorldAt], data: RoundData) -> list[Verdicts]:
        def judge(at: WorldAt) -> Verdicts:
            world, reward = self._load(at)
            return verdicts(
                world,
                reward,
                data.audited,
                threshold=self._config.actor.success_threshold,
                success_frames=self._config.success_frames,
            )

        parts = {f"judging world {at.version}": partial(judge, at) for at in worlds}
        with process_status.activity("judging worlds", self._patience):
            return side_by_side(parts, patience=self._patience, at_once=self._at_once)


def _of_episodes(version: int, folder: Path, source: str) -> dict[str, Any]:
    """Return what `Round` says of the true episodes."""
    solved = solved_in(folder)
    rate = SuccessRate.of(sum(solved), len(solved))
    return {
        "version": version,
        "source": source,
        "episodes": rate.episodes,
        "successes": rate.successes,
        "success": rate.rate,
        "low": rate.low,
        "high": rate.high,
    }


def _of_verdicts(before: Verdicts, after: Verdicts) -> dict[str, Any]:
    """Return what `Round` says of the audits of both worlds."""
    return {
        "audited": len(before.solved),
        "solved": int(before.solved.sum()),
        "judged": int(before.judged.sum()),
        "wrong": before.wrong,
        "false": before.false,
        "wrong_after": after.wrong,
        "false_after": after.false,
    }


def solved_in(folder: Path) -> list[bool]:
    """Tell of each recorded episode of a folder whether it was solved."""
    from asyncrl.fitting.recordings import read_part, recording_files

    return [bool(one) for file in recording_files(folder) for one in read_part(file).solved()]
