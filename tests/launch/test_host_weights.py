"""Weights on another host: fetched once, handed on to the actors there, and ended as the learner ends."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WeightSettings
from asyncrl.errors import RunError
from asyncrl.launch import endpoints
from asyncrl.launch.followers import NOTE, relay_weights, wait_for_relay
from asyncrl.launch.job import Hosts, Job, RunInfo, Stopped
from asyncrl.launch.placement import RELAYED
from asyncrl.messaging.keys import create_keys
from asyncrl.observability import metrics_system as m
from asyncrl.storage import run_owner
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import ServerSettings
from support.weights import PATIENCE, channel_folder, policy, raw, source, swap_until

HOSTS = Hosts(names=("node-1", "node-2"), first_ranks=(0, 1), size=3, addresses=("", ""))
JOB = Job(rank=1, size=3, local_rank=0, local_size=2)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[tuple[BroadcastPublisher, RunInfo]]:
    """A learner of a run in `tmp_path`, seen by rank 1, the lowest one of the second host."""
    identity = run_owner.next_attempt(tmp_path)
    create_keys(tmp_path / "keys", ["learner", "actor-1", "actor-2"])
    JOB.status_folder(tmp_path).mkdir(parents=True)
    settings = ServerSettings(
        listen="tcp://127.0.0.1:0",
        security=endpoints.server_keys(str(tmp_path / "keys")),
        silence=30.0,
        identity=identity,
    )
    with channel_folder() as folder:
        publisher = BroadcastPublisher("shared_memory", folder, deadline=5.0, settings=settings)
        yield (
            publisher,
            RunInfo(
                run_dir=str(tmp_path),
                replay_endpoint="",
                weights_endpoint="",
                pull_endpoint=publisher.pull_endpoint,
                keys=str(tmp_path / "keys"),
                attempt=identity.attempt,
                mark=identity.mark,
            ),
        )
        publisher.close()


def test_one_of_a_host_fetches_and_all_its_actors_get_every_bit(learner) -> None:
    publisher, info = learner
    config = TrainConfig(weights=WeightSettings(timeout=20.0))
    ending = ExitStack()
    endpoint = relay_weights(config, info, HOSTS, JOB, ending)
    where = wait_for_relay(info, JOB, PATIENCE, lambda: False)
    assert where == endpoint
    private = Path(where.removeprefix("ipc://")).parent
    assert private.stat().st_mode & 0o077 == 0
    identity = info.identity
    receivers = [
        WeightReceiver(RELAYED, where, name, policy(0), identity=identity) for name in ("actor-1", "actor-2")
    ]
    for version in range(3):
        publisher.publish(source(version + 10), version)
        for receiver in receivers:
            tensors = policy(0)
            assert swap_until(receiver, tensors, version) == version
            assert raw(tensors) == raw(policy(version + 10))
    assert publisher.joined == 1
    sent = publisher.status()[m.WEIGHTS_PULLED_BYTES]
    assert sent == 3 * publisher.status()[m.WEIGHTS_BYTES], "each version went to the host once"
    assert publisher.server.pop_events() == ["node-2 joined (1 joined actor now)"]
    publisher.close()
    for receiver in receivers:
        while not receiver.ended:
            receiver.wait_newer(2, 1.0)
        receiver.close()
    ending.close()
    assert not private.exists()


@pytest.mark.timeout(60)
def test_what_an_earlier_start_left_is_not_believed_and_the_rank_that_does_not_come_is_named(
    learner: tuple[BroadcastPublisher, RunInfo], tmp_path: Path
) -> None:
    _, info = learner
    note = JOB.status_folder(tmp_path) / NOTE
    for content in ("", "[]", '{"mark": "earlier", "endpoint": "ipc:///tmp/elsewhere"}'):
        note.write_text(content)
        with pytest.raises(RunError, match=r"Rank 1 waited 0 s \(--startup-timeout\) for the first actor"):
            wait_for_relay(info, JOB, 0.0, lambda: False)
    with pytest.raises(Stopped):
        wait_for_relay(info, JOB, PATIENCE, lambda: True)
