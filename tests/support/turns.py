"""A replay whose actor and learner take turns, as with --inline; no models."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay.in_process import InProcessActorPort, InProcessLearnerPort
from asyncrl.replay.interface import GroupGrant
from asyncrl.replay.replay import Replay
from support.episodes import make_episode

Seen = dict[int, tuple[list[tuple[str, int, int, bool]], dict[str, float]]]
"""Version -> group, policy version, world and success of its batch's episodes; and the replay's metrics."""


class Killed(Exception):
    """The run ends here, wherever that is."""


class Dream:
    """An actor with one episode in each round.

    Outcomes follow from group, member, versions, and, unless its passes have a fixed shape, the place among
    the episodes of that version: as in a real actor, whose batches round differently with other neighbours.
    """

    def __init__(
        self,
        replay: Replay,
        rounds: int = 10**6,
        *,
        fixed_shape: bool = False,
    ) -> None:
        """Begin without episodes.

        Args:
            replay: In the same thread.
            rounds: After so many it is killed.
            fixed_shape: As --imagination.fixed-shape.
        """
        self.port, self.replay, self.left = InProcessActorPort(replay), replay, rounds
        self.pending: list[tuple[GroupGrant, int]] = []
        self.version, self.place = -1, 0
        self.fixed_shape = fixed_shape

    def round(self) -> bool:
        dropped = self.port.pop_dropped()
        self.pending = [one for one in self.pending if one[0].number not in dropped]
        for grant in [] if self.pending else self.port.acquire_groups(1, 0.0):
            self.pending = [(grant, 0), (grant, 1)]
        if not self.pending:
            return False
        if not self.left:
            raise Killed
        self.left -= 1
        grant, member = self.pending.pop(0)
        self.port.push(self.imagine(grant, member))
        return True

    def imagine(self, grant: GroupGrant, member: int) -> Episode:
        version = self.replay.state.limiter.version
        assert grant.min_version <= version
        self.version, self.place = version, self.place + 1 if version == self.version else 0
        place = 0 if self.fixed_shape else self.place
        won = zlib.crc32(f"{grant.number} {member} {version} {place}".encode()) % 3 == 0
        fresh = f"{np.random.default_rng().integers(2**63):032x}"  # Imagined again, it is another episode.
        return make_episode(
            grant.number, member, versions=(version,), success=won, image=1, episode_id=fresh, actor="inline"
        )


def learn(
    open_it: Callable[[], Replay],
    *,
    begin: int,
    end: int,
    rounds: int = 10**6,
    fixed_shape: bool = False,
) -> Seen:
    """Update from version `begin` to `end`, or until the actor made `rounds`; return what was seen."""
    replay, seen = open_it(), Seen()
    learner = InProcessLearnerPort(replay, version=begin, imagine=lambda: dream.round())
    dream = Dream(replay, rounds, fixed_shape=fixed_shape)
    per_update = replay.state.limiter.groups_per_update
    try:
        for version in range(begin, end):
            batch = learner.sample(groups=per_update, version=version, timeout=60.0)
            assert not replay.state.limiter.open, "nothing is in flight when an update begins"
            assert replay.state.limiter.credit == 0
            learner.report_version(version + 1)
            about = [
                (e.group_id, e.oldest_version, e.world_version, e.success) for group in batch for e in group
            ]
            counted = (m.EPISODES, m.DROPPED_RESUME, m.DROPPED_DECISIONS[m.DROPPED_RESUME], m.REPLAY_BYTES)
            status = {x.name: value for x, value in learner.status().items() if x not in counted}
            seen[version] = about, status
    except Killed:
        pass
    finally:
        learner.close()
    return seen
