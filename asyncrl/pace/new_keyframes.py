"""Take the key frames of a round from its true episodes: those from which the policy's outcome is open.

true episodes ─► candidates, by the rule ─► imagined from each ─► some succeed, some do not ─► key frames
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.evaluation.audit import Models
from asyncrl.evaluation.open_outcomes import open_starts
from asyncrl.fitting.keyframes import balanced, keyframe_states
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import recording_files
from asyncrl.observability import process_status
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.worlds.interface import World

CANDIDATES: Final = 2
"""As many as this for each key frame that is wanted: of most, the siblings end alike."""
ROWS: Final = 32
"""Episodes imagined together."""
_log = logging.getLogger(__name__)


def new_keyframes(
    config: TrainConfig, folder: Path, policy: Policy, world: World, reward: RewardModel, *, seed: int
) -> list[StartState]:
    """Choose the key frames of a round.

    Args:
        config: Of the run, with the world's defaults put in.
        folder: True episodes of the round.
        policy: That made them.
        world: In which the run goes on.
        reward: Its judge.
        seed: Of the episodes that are imagined.

    Returns:
        At most `PaceSettings.keyframes`, as many of each task as there are; perhaps none.
    """
    settings, longest = config.pace, config.actor.max_decisions
    try:
        found = keyframe_states(load_recordings(recording_files(folder)), CANDIDATES * settings.keyframes)
    except ConfigError as error:
        _log.warning("no key frames in this round: %s", error)
        return []
    candidates = [state for state in found if state.elapsed < longest]
    if not settings.siblings:
        return balanced(candidates, settings.keyframes)
    models = Models(
        policy=policy,
        world=world,
        reward=reward,
        sampling=SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k),
        max_decisions=longest,
        threshold=config.actor.success_threshold,
        success_frames=config.success_frames,
    )
    chosen = open_starts(
        models,
        candidates,
        siblings=settings.siblings,
        rows=ROWS,
        seed=seed,
        progress=lambda _: process_status.progress(),
    )
    _log.info("key frames: %d of %d candidates have an open outcome", len(chosen), len(candidates))
    return balanced(chosen, settings.keyframes)
