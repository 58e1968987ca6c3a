"""Learner ranks fetch their parts of a batch: together they hold what was chosen, whatever dies meanwhile."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ReplayError, SampleTimeout
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay import batch_chooser
from asyncrl.replay.client import FETCH_WINDOW as WINDOW
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.group_file import read_group
from asyncrl.replay.interface import BatchDescription, GroupLost
from asyncrl.replay.store import file_name
from support.episodes import assert_same, make_episode
from support.replay_server import CONFIG, Served, acquire, kill, push_group, start_server, until

GROUPS = 2 * WINDOW + 3
"""More than a rank asks for at once."""


Ports = tuple[ZmqLearnerPort, ZmqActorPort]


@pytest.fixture
def served(tmp_path: Path, endpoint: str) -> Iterator[Ports]:
    with Served(tmp_path, endpoint):
        learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
        learner.status()
        yield learner, actor
        actor.close(1.0)
        learner.close()


def config_of(groups: int, **replay: Any) -> TrainConfig:
    algorithm = AlgorithmSettings(group_size=2, groups_per_update=groups)
    return replace(
        CONFIG, algorithm=algorithm, replay=ReplaySettings(max_lag=1, group_timeout=60.0, **replay)
    )


def fill(actor: ZmqActorPort, groups: int, version: int = 0) -> None:
    for _ in range(groups):
        push_group(actor, acquire(actor), "actor-0", version)
    until(actor, 0)


def assert_as_imagined(group: list[Episode], number: int, version: int = 0) -> None:
    assert [episode.member for episode in group] == [0, 1]
    for episode in group:
        assert_same(episode, make_episode(number, episode.member, versions=(version,)))


@pytest.mark.parametrize("read_ahead", [8 * 10**9, 0])
def test_what_the_ranks_hold_together_is_the_batch(tmp_path, endpoint, read_ahead, monkeypatch) -> None:
    """With room for what is read ahead, and without any: then it is read again."""
    monkeypatch.setattr("asyncrl.replay.batch_chooser.READ_AHEAD_BYTES", read_ahead)
    with Served(tmp_path, endpoint, config_of(GROUPS)):
        learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
        ranks = [learner, *(ZmqLearnerPort(endpoint, rank=rank) for rank in (1, 2))]
        learner.status()
        for version in range(2):
            fill(actor, GROUPS, version)
            batch = learner.choose(groups=GROUPS, version=version, timeout=15.0)
            assert batch.numbers == tuple(range(GROUPS * version, GROUPS * (version + 1)))
            parts = [batch.part(rank, len(ranks)) for rank in range(len(ranks))]
            with ThreadPoolExecutor(len(ranks)) as threads:
                held = list(threads.map(lambda r, part: r.fetch(part, timeout=15.0), ranks, parts))
            for place, number in enumerate(batch.numbers):
                assert_as_imagined(held[place % 3][place // 3], number, version)
            assert sum(map(len, held)) == GROUPS
            learner.report_version(version + 1)
        for port in ranks:
            port.close()
        actor.close(1.0)


def test_a_killed_replay_gives_the_chosen_batch_to_every_rank_and_to_no_other_update(
    tmp_path: Path, endpoint: str
) -> None:
    """Killed between description and fetch, and again with a half of it fetched."""
    server = start_server(tmp_path, endpoint)
    learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
    rank = ZmqLearnerPort(endpoint, rank=1)
    try:
        learner.status()
        fill(actor, 4)
        first = learner.choose(groups=2, version=0, timeout=15.0)
        kill(server)
        server = start_server(tmp_path, endpoint)
        held = learner.fetch(first.part(0, 2), timeout=15.0)
        kill(server)
        server = start_server(tmp_path, endpoint)
        held += rank.fetch(first.part(1, 2), timeout=15.0)
        second = learner.choose(groups=2, version=0, timeout=15.0)
        held += learner.fetch(second.part(0, 2), timeout=15.0) + rank.fetch(second.part(1, 2), timeout=15.0)
        assert (first.numbers, second.numbers) == ((0, 1), (2, 3))
        for number, group in enumerate(held):
            assert_as_imagined(group, number)
        with pytest.raises(GroupLost, match="not of the batch that was chosen last"):
            rank.fetch(first.part(1, 2), timeout=15.0)
        with pytest.raises(SampleTimeout, match="0 groups ready"):
            learner.choose(groups=1, version=0, timeout=0.3)
    finally:
        for port in (learner, rank):
            port.close()
        actor.close(1.0)
        kill(server)


class Gate:
    """Holds up the reading of files; the number of reads that came is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.came = threading.Event(), threading.Semaphore(0)
        read = batch_chooser.read_group

        def held_up(path: Path, **about: Any) -> list[Episode]:
            self.came.release()
            assert self.open.wait(30)
            return read(path, **about)

        monkeypatch.setattr(batch_chooser, "read_group", held_up)


def test_ingest_goes_on_while_a_batch_is_read(monkeypatch: pytest.MonkeyPatch, served: Ports) -> None:
    gate = Gate(monkeypatch)
    learner, actor = served
    fill(actor, 2)
    with pytest.raises(SampleTimeout):
        learner.choose(groups=2, version=0, timeout=0.5)
    assert gate.came.acquire(timeout=10), "it is being read"
    fill(actor, 2)  # Each gets its receipts: they are stored meanwhile.
    assert learner.status()[m.GROUPS_READY] == 4, "none counts as used before it was read"
    gate.open.set()
    batch = learner.choose(groups=2, version=0, timeout=15.0)
    for number, group in enumerate(learner.fetch(batch, timeout=15.0)):
        assert_as_imagined(group, number)


def test_groups_are_read_before_they_are_asked_for_and_none_too_old_is_given(monkeypatch, served) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    learner, actor = served
    fill(actor, 4)
    for _ in range(4):
        assert gate.came.acquire(timeout=10), "all are read, and nobody has asked"
    learner.report_version(2)  # The bound is 1: what was read is too old.
    learner.status()
    again = dict[int, list[Episode]]()
    for number in (acquire(actor).number for _ in range(2)):  # Granted again: other episodes.
        ids = [f"{number:031d}{member}" for member in range(2)]
        again[number] = [make_episode(number, k, versions=(2,), episode_id=ids[k]) for k in range(2)]
        for episode in again[number]:
            actor.push(episode)
    until(actor, 0)
    batch = learner.choose(groups=2, version=2, timeout=15.0)
    assert set(batch.numbers) == set(again)
    for number, group in zip(batch.numbers, learner.fetch(batch, timeout=15.0), strict=True):
        for episode, imagined in zip(group, again[number], strict=True):
            assert_same(episode, imagined)
    status = learner.status()
    assert status[m.DROPPED_LAG] == 8, "four groups of two"


def test_a_group_whose_file_is_damaged_after_it_was_chosen_is_lost_and_another_batch_is_chosen(
    tmp_path: Path, endpoint: str
) -> None:
    server = start_server(tmp_path, endpoint)
    learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
    try:
        learner.status()
        fill(actor, 4)
        batch = learner.choose(groups=2, version=0, timeout=15.0)
        kill(server)  # What it had read is gone.
        path = tmp_path / file_name(batch.numbers[1])
        content, frames = path.read_bytes(), read_group(path)[0].frames.tobytes()
        path.write_bytes(content.replace(frames, bytes(len(frames))))
        server = start_server(tmp_path, endpoint)
        with pytest.raises(GroupLost, match=r"Group 1 of the batch is lost: .*damaged"):
            learner.fetch(batch, timeout=15.0)
        assert (tmp_path / "quarantine" / path.name).exists()
        other = learner.choose(groups=2, version=0, timeout=15.0)
        assert other.numbers == (2, 3)
        for number, group in zip(other.numbers, learner.fetch(other, timeout=15.0), strict=True):
            assert_as_imagined(group, number)
    finally:
        learner.close()
        actor.close(1.0)
        kill(server)


def test_a_rank_whose_replay_says_nothing_ends_at_its_deadline(endpoint: str) -> None:
    rank, looks = ZmqLearnerPort(endpoint, rank=1), list[float]()
    with pytest.raises(ReplayError, match=r"sent nothing of a chosen batch for 0.3 s \(--batch-timeout\)"):
        rank.fetch(
            BatchDescription(request="r", numbers=(0,)),
            timeout=0.3,
            while_waiting=lambda: looks.append(time.monotonic()),
        )
    assert looks, "it looks after what else it has to"
    rank.close()


def test_an_actor_gets_no_group_of_a_batch(served: Ports) -> None:
    learner, actor = served
    fill(actor, 2)
    batch = learner.choose(groups=2, version=0, timeout=15.0)
    link = actor._link  # pyright: ignore[reportPrivateUsage]
    link.send_now("fetch", request=batch.request, number=0)
    heard = [message.kind for _ in range(10) for message in link.exchange(0.05)]
    assert not {"batch", "lost"} & set(heard)
    assert len(learner.fetch(batch, timeout=15.0)) == 2
