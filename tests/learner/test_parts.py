"""Each learner rank fetches its part: together they hold the batch; what fails on one concerns all."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ReplayError, RunError
from asyncrl.learner.batches import batch_metrics, build_batch, group_outcome
from asyncrl.learner.ranks import DistributedRanks, Groups, fetch_shard
from asyncrl.records import Episode
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.interface import GroupLost
from asyncrl.storage.assets import latest
from support.episodes import make_episode
from support.memory_learner import Run
from support.ranks import run_ranks
from support.replay import next_batch
from support.replay_server import acquire, kill, start_server, until

GROUPS = 4


def imagined(number: int) -> list[Episode]:
    """Episodes of several lengths, half of which succeed."""
    return [
        make_episode(number, member, versions=(0,) * (1 + number % 3), success=(number + member) % 2 == 0)
        for member in range(2)
    ]


def content(groups: Groups) -> dict[str, Any]:
    """Everything that an update sees of groups, bit for bit."""
    found = vars(build_batch(groups, version=0)).copy()
    found |= {f"sample {name}": tensor for name, tensor in found.pop("sample").items()}
    return {
        name: np.asarray(value).tobytes() if isinstance(value, torch.Tensor | np.ndarray) else value
        for name, value in found.items()
    }


def fetched(endpoint: str) -> tuple[dict[str, Any], dict[str, float]]:
    """What this rank's update sees, and on rank 0 the metrics of the batch."""
    ranks = DistributedRanks(20.0)
    learner = ZmqLearnerPort(endpoint) if ranks.rank == 0 else None
    port = learner or ZmqLearnerPort(endpoint, rank=ranks.rank)
    batch = learner.choose(groups=GROUPS, version=0, timeout=15.0) if learner else None
    mine = ranks.share_batch(batch)
    assert mine is not None
    part = fetch_shard(port, ranks, mine, 15.0, lambda: None)
    assert not isinstance(part, Exception)
    assert part is not None
    found = ranks.gather_outcomes([group_outcome(group) for group in part])
    values = batch_metrics(found, 0)
    port.close()
    return content(part), {metric.name: value for metric, value in values.items()}


def serve_groups(folder: Path, endpoint: str) -> tuple[subprocess.Popen[bytes], ZmqActorPort]:
    """A replay in a process of its own with `GROUPS` complete groups."""
    server = start_server(folder, endpoint)
    learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
    learner.status()
    for number in range(GROUPS):
        assert acquire(actor).number == number
        for episode in imagined(number):
            actor.push(episode)
    until(actor, 0)
    learner.close()
    return server, actor


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_hold_the_batch_and_rank_0_says_of_it_what_one_rank_would(ranks, tmp_path, endpoint) -> None:
    server, actor = serve_groups(tmp_path, endpoint)
    try:
        parts = run_ranks(fetched, endpoint, ranks=ranks)
    finally:
        actor.close(1.0)
        kill(server)
    groups = [imagined(number) for number in range(GROUPS)]
    for rank, (held, _) in enumerate(parts):
        assert held == content(groups[rank::ranks]), "as it was dealt by one who held them all"
    values = batch_metrics([group_outcome(group) for group in groups], 0)
    assert parts[0][1] == {metric.name: value for metric, value in values.items()}
    assert all(said == {} for _, said in parts[1:])


def one_dies_before_it_fetches(endpoint: str) -> str:
    ranks = DistributedRanks(20.0)
    if ranks.rank == 1:
        ranks.share_batch(None)
        return ""  # Its process ends.
    port = ZmqLearnerPort(endpoint)
    mine = ranks.share_batch(port.choose(groups=2, version=0, timeout=15.0))
    assert mine is not None
    try:
        with pytest.raises(RunError) as caught:
            fetch_shard(port, ranks, mine, 15.0, lambda: None)
    finally:
        port.close()
    return str(caught.value)


def test_when_a_rank_dies_before_it_fetches_the_others_say_so_and_a_resume_uses_its_groups(
    tmp_path: Path, endpoint: str
) -> None:
    server, actor = serve_groups(tmp_path, endpoint)
    try:
        said, _ = run_ranks(one_dies_before_it_fetches, endpoint)
        assert said.startswith("Waited in vain for the parts of 2 learner ranks, at rank 0: another rank is")
        learner = ZmqLearnerPort(endpoint)
        first = next_batch(learner, groups=2, version=0, timeout=15.0)
        second = next_batch(learner, groups=2, version=0, timeout=15.0)
        held = [episode.frames.tobytes() for group in first + second for episode in group]
        assert held == [e.frames.tobytes() for number in range(GROUPS) for e in imagined(number)]
        learner.close()
    finally:
        actor.close(1.0)
        kill(server)


def fails_on_rank_1(folder: str, failure: Exception) -> tuple[str, list[str]]:
    """A learner on two ranks; the second one cannot fetch its part of the third batch, once."""
    ranks = DistributedRanks(20.0)
    run = Run(Path(folder), updates=4, every=1000, ranks=ranks)
    fetch, failures = run.replay.fetch, [failure]

    def failing(wanted: Any, **about: Any) -> Any:
        if ranks.rank == 1 and wanted.request == "2" and failures:
            raise failures.pop()
        return fetch(wanted, **about)

    run.replay.fetch = failing  # type: ignore[method-assign]
    try:
        run.learner.run()
    except (ReplayError, RunError) as error:
        return str(error), run.events
    return "", run.events


@pytest.mark.timeout(60)
def test_when_one_rank_cannot_fetch_all_save_and_each_says_who(tmp_path: Path) -> None:
    (first, events), (second, others) = run_ranks(
        fails_on_rank_1, str(tmp_path), ReplayError("the replay is silent")
    )
    assert second == "the replay is silent"
    assert first.startswith("Learner rank 1 of 2 did not get its part of a batch.")
    assert "stop" not in events, "the run did not end well: a resume goes on with its actors' episodes"
    assert "save 2" in events
    assert "save 2" in others
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "update_000002"


@pytest.mark.timeout(60)
def test_when_a_group_of_one_rank_is_lost_all_learn_from_another_batch(tmp_path: Path) -> None:
    (first, events), (second, _) = run_ranks(fails_on_rank_1, str(tmp_path), GroupLost("group 7"))
    assert (first, second) == ("", "")
    assert [event for event in events if event.startswith("sample")] == [
        *("sample at 0", "sample at 1", "sample at 2", "sample at 2", "sample at 3")
    ]
