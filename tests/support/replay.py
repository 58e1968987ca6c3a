"""A replay and its limiter with a clock that is set by hand."""

from pathlib import Path

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.sections import ReplaySettings
from asyncrl.records import Episode, SamplingParams
from asyncrl.replay.buffer import Replay
from asyncrl.replay.group_file import GroupFile, read_group
from asyncrl.replay.interface import GroupGrant, LearnerPort
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.store import EpisodeStore
from support.episodes import make_episode


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fill(replay: Replay, number: int, versions: tuple[int, ...], *, actor: str = "actor-0") -> list[str]:
    """Push all members of a group; return what became of them."""
    size = replay.state.limiter.group_size
    return [
        replay.admit(make_episode(number, member, group_size=size, versions=versions, actor=actor)).status
        for member in range(size)
    ]


def ready(oldest: int, newest: int, size: int = 2) -> GroupFile:
    """A complete group, for a limiter alone."""
    return GroupFile(
        path=Path(),
        number=0,
        oldest_version=oldest,
        newest_version=newest,
        size=0,
        decisions=size,
        sampling=SamplingParams(temperature=1.0),
        world_version=0,
        episode_ids=(),
        group_size=size,
        task="",
        successes=0,
    )


def make_limiter(
    *,
    group_size: int = 2,
    per_update: int = 2,
    max_lag: int = 1,
    temperature: float = 1.0,
    clock: Clock | None = None,
) -> Limiter:
    return Limiter(
        ReplaySettings(max_lag=max_lag, group_timeout=30.0, keep_video_every=3),
        AlgorithmSettings(group_size=group_size, groups_per_update=per_update, temperature=temperature),
        clock=clock or Clock(),
    )


def grant_group(limiter: Limiter, actor: str, request_number: int = -1) -> GroupGrant | None:
    """Grant a group as the replay does, but without a ledger."""
    if (known := limiter.find_grant(actor, request_number)) is not None:
        return known
    if (event := limiter.new_grant(actor, request_number)) is None:
        return None
    limiter.apply_grant(event)
    return limiter.open[event.grant].grant


def make_replay(folder: Path, limiter: Limiter) -> Replay:
    store = EpisodeStore(folder, group_size=limiter.group_size, max_bytes=10**9)
    return Replay(store, limiter)


def open_replay(
    folder: Path,
    *,
    per_update: int = 2,
    max_lag: int = 1,
    max_bytes: int = 10**9,
    filtering: bool = False,
    horizon: int = 20,
) -> Replay:
    """A replay of groups of two; no group is too late for it."""
    limiter = Limiter(
        ReplaySettings(max_lag=max_lag, group_timeout=1e6),
        AlgorithmSettings(group_size=2, groups_per_update=per_update, filter_groups=filtering),
        resume_window=horizon,
        clock=Clock(),
    )
    return Replay(EpisodeStore(folder, group_size=2, max_bytes=max_bytes), limiter)


def group_of(number: int, image: int = 4) -> list:
    """Members with different lengths; one keeps its video."""
    return [
        make_episode(number, 0, versions=(number,), image=image),
        make_episode(number, 1, versions=(number, number + 1), image=image, video=True, success=True),
    ]


def open_store(folder: Path, warnings: list[str] | None = None, max_bytes: int = 10**9) -> EpisodeStore:
    lines = [] if warnings is None else warnings
    return EpisodeStore(folder, group_size=2, max_bytes=max_bytes, warn=lines.append)


def load(store: EpisodeStore, number: int) -> list[Episode]:
    return read_group(store.group_files[number].path)


def read_batch(replay: Replay, groups: int, version: int, request: str = "") -> list[list[Episode]] | None:
    """Choose a batch and read it; None if there are too few groups."""
    numbers = replay.choose(groups, version, request)
    return None if numbers is None else replay.batches.pop(numbers)


def next_batch(learner: LearnerPort, *, groups: int, version: int, timeout: float) -> list[list[Episode]]:
    """Wait for a batch and fetch all of it."""
    batch = learner.choose(groups=groups, version=version, timeout=timeout)
    return learner.fetch(batch, timeout=timeout, while_waiting=lambda: None)
