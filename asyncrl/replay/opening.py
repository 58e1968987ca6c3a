"""The settings of a run in, its replay out, with what was in the folder recovered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.config.run import TrainConfig
from asyncrl.replay.core import ReplayCore
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.store import EpisodeStore


def open_core(folder: Path, config: TrainConfig, warn: Callable[[str], None] = print) -> ReplayCore:
    """Open the replay of a run with its settings, recovering what is in `folder`.

    Raises:
        ReplayError: See `EpisodeStore`.
    """
    store = EpisodeStore(
        folder,
        group_size=config.algorithm.group_size,
        max_bytes=int(config.replay.max_gigabytes * 1e9),
        warn=warn,
    )
    limiter = Limiter(
        group_size=config.algorithm.group_size,
        groups_per_update=config.algorithm.groups_per_update,
        max_lag=config.max_lag,
        group_deadline=config.replay.group_deadline,
        silence=config.replay.silence,
        keep_video_every=config.replay.keep_video_every,
        filter_groups=config.algorithm.filter_groups,
        uses=config.replay.uses,
        order=config.replay.order,
        seed=config.seed,
        # The oldest checkpoint that is kept, while the next one is being written.
        horizon=config.checkpoint_every * (config.keep_checkpoints + 1),
    )
    return ReplayCore(
        store,
        limiter,
        quarantine_after=config.replay.quarantine_after,
        max_age=config.replay.max_age_versions,
        warn=warn,
    )
