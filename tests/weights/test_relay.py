"""Weights on other hosts: once to each, whole, handed on there, and a lost host holds nobody up for long."""

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_system as m
from asyncrl.weights.interface import PULL
from asyncrl.weights.publisher import BroadcastPublisher, Relay
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import ServerSettings
from support.gloo_transport import GLOO
from support.weights import PATIENCE, Actor, channel_folder, policy, raw, source, swap_until, wait_for_all

HERE = "127.0.0.1"
DEADLINE = 2.0
SILENCE = 1.5


def host(endpoint: str, name: str, transport: str = GLOO, device: str = "cpu") -> Actor:
    """Another host's process, which takes part."""
    process = Actor()
    process.join(endpoint, name, transport, device, DEADLINE, tensors=False)
    return process


@contextlib.contextmanager
def opened(transport: str = GLOO, device: str = "cpu") -> Iterator[BroadcastPublisher]:
    """A learner whose weight group spans hosts."""
    settings = ServerSettings(listen=f"tcp://{HERE}:0", silence=SILENCE, store_address=HERE)
    with channel_folder() as folder:
        publisher = BroadcastPublisher(transport, folder, device, DEADLINE, settings)
        try:
            yield publisher
        finally:
            publisher.close()


@pytest.fixture
def hosts() -> Iterator[list[Actor]]:
    """Hosts that a test started; they are ended."""
    started: list[Actor] = []
    yield started
    for one in started:
        one.end()


def until(publisher: BroadcastPublisher, names: set[str], version: int) -> None:
    """Wait until these receivers, and no others, hold a version."""
    deadline = time.monotonic() + PATIENCE
    while {name for name, held in publisher.versions_held().items() if held >= version} != names:
        assert time.monotonic() < deadline, publisher.versions_held()
        time.sleep(0.01)


@pytest.mark.multiprocess
def test_every_host_gets_every_bit_and_one_that_is_killed_halted_or_comes_back_holds_nobody_up(hosts) -> None:
    with opened() as publisher:
        publisher.publish(source(0), 0)
        near = WeightReceiver(GLOO, publisher.endpoint, "actor-0", policy(0), deadline=DEADLINE)
        hosts += [host(publisher.pull_endpoint, f"node-{number}") for number in (2, 3)]
        for one in hosts:
            assert one.has(0)
        wait_for_all(publisher, 0, 3)
        hosts[0].signal(signal.SIGSTOP)  # As one whose network is cut: its connections stay, nothing comes.
        begun = time.monotonic()
        publisher.publish(source(1), 1)
        assert time.monotonic() - begun < 0.5, "the learner waits for nobody"
        assert hosts[1].has(1)
        assert swap_until(near, policy(0), 1) == 1
        assert time.monotonic() - begun < DEADLINE + SILENCE + 2.0
        until(publisher, {"actor-0", "node-3"}, 1)
        assert any("node-2 was left behind" in line for line in publisher.server.pop_events())
        hosts[0].signal(signal.SIGCONT)
        assert hosts[0].has(1)
        until(publisher, {"actor-0", "node-2", "node-3"}, 1)
        hosts[1].end()
        publisher.publish(source(2), 2)
        assert hosts[0].has(2)
        hosts[1] = host(publisher.pull_endpoint, "node-3")
        assert hosts[1].has(2)
        publisher.publish(source(3), 3)
        for one in hosts:
            assert one.has(3)
        until(publisher, {"actor-0", "node-2", "node-3"}, 3)
        assert publisher.status()[m.WEIGHTS_HOSTS] == 2
        assert publisher.status()[m.WEIGHTS_MEMBERS] == 3
        near.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", [GLOO, PULL], ids=["broadcast", "pull"])
def test_a_relay_hands_every_bit_on_and_ends_its_actors_with_the_run(transport: str) -> None:
    with channel_folder() as folder, opened() as publisher:
        receiver = WeightReceiver(transport, publisher.pull_endpoint, "node-2", None, deadline=DEADLINE)
        inside = BroadcastPublisher("shared_memory", folder, deadline=DEADLINE)
        relay = Relay(receiver, inside)
        actors = [WeightReceiver("shared_memory", inside.endpoint, n, policy(0)) for n in ("a", "b")]
        for version in range(3):
            publisher.publish(source(version + 10), version)
            for actor in actors:
                tensors = policy(0)
                assert swap_until(actor, tensors, version) == version
                assert raw(tensors) == raw(policy(version + 10))
        publisher.close()
        for actor in actors:
            while not actor.ended:
                actor.wait_newer(2, 1.0)
            actor.close()
        relay.close()
        relay.close()


def test_an_address_that_is_not_this_hosts_is_named() -> None:
    settings = ServerSettings(store_address="192.0.2.1")
    why = r"--weights\.between-hosts: the learner cannot listen at 192\.0\.2\.1"
    with channel_folder() as folder, pytest.raises(ConfigError, match=why):
        BroadcastPublisher("shared_memory", folder, settings=settings)


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_nccl_carries_every_bit_between_hosts_and_goes_on_without_one_that_is_killed(hosts) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one process per GPU, and there is one GPU.")
    with opened("nccl", "cuda:0") as publisher:
        publisher.publish(source(0, device="cuda:0"), 0)
        hosts.append(host(publisher.pull_endpoint, "node-2", "nccl", "cuda:1"))
        assert hosts[0].has(0)
        hosts[0].end()
        publisher.publish(source(1, device="cuda:0"), 1)
        hosts[0] = host(publisher.pull_endpoint, "node-2", "nccl", "cuda:1")
        assert hosts[0].has(1)
        publisher.publish(source(2, device="cuda:0"), 2)
        assert hosts[0].has(2)
