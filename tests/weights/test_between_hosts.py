"""Weights between hosts by broadcast: once to each host, whole, and nobody waits for a lost one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.weights import store_table
from asyncrl.weights.between_hosts import build_backend, build_host_receiver, host_broadcasts
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher
from asyncrl.weights.store_table import StoreTable, serve_table
from asyncrl.weights.table import TableError, TableGone
from support.processes import FORKS
from support.weights import PATIENCE, channel_folder, policy, raw

HERE = "127.0.0.1"
DEADLINE = 3.0
SILENCE = 1.5


def host(pipe: Connection, endpoint: str, name: str, device: str) -> None:
    """Another host's process: takes part, and answers an order (a version) with version and bytes it has."""
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "nccl"
    transport = build_backend(backend, HERE, device, DEADLINE)
    receiver = build_host_receiver(StoreTable(endpoint, "run", DEADLINE), transport, name, DEADLINE)
    held: list[tuple[int, dict[str, bytes]]] = [(-1, {})]
    while (order := pipe.recv()) is not None:
        until = time.monotonic() + PATIENCE
        while held[0][0] < order and time.monotonic() < until:
            receiver.wait_newer(held[0][0], 0.1)
            receiver.hand_on(
                held[0][0], lambda tensors, version: held.insert(0, (version, raw(dict(tensors))))
            )
        pipe.send(held[0])
    receiver.close()


class Host:
    """The test's handle of another host's process."""

    def __init__(self, endpoint: str, name: str, device: str = "cpu") -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=host, args=(theirs, endpoint, name, device), daemon=True)
        self.process.start()

    def has(self, version: int) -> tuple[int, dict[str, bytes]]:
        self.pipe.send(version)
        assert self.pipe.poll(2 * PATIENCE)
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


@contextlib.contextmanager
def opened(device: str = "cpu") -> Iterator[tuple[BroadcastPublisher, str]]:
    """A learner that broadcasts to other hosts; yields its publisher, and the endpoint of their table."""
    table = serve_table(HERE, "run", DEADLINE)
    backend = "gloo" if device == "cpu" else "nccl"
    more = host_broadcasts(table, build_backend(backend, HERE, device, DEADLINE), DEADLINE, SILENCE)
    with channel_folder() as folder:
        publisher = build_publisher("gloo", folder, deadline=DEADLINE, more=more)
        try:
            yield publisher, table.endpoint
        finally:
            publisher.close()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Hosts that a test started; they are ended."""
    started: list[Host] = []
    yield started
    for one in started:
        one.end()


def until(publisher: BroadcastPublisher, names: set[str], version: int) -> None:
    """Wait until these hosts, and no others, hold a version."""
    deadline = time.monotonic() + PATIENCE
    while {name for name, held in publisher.members_elsewhere().items() if held >= version} != names:
        assert time.monotonic() < deadline, publisher.members_elsewhere()
        time.sleep(0.01)


def check(found: tuple[int, dict[str, bytes]], version: int) -> None:
    assert found[0] == version
    assert found[1] == raw(policy(version))


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_every_host_gets_every_bit_and_one_that_is_killed_halted_or_comes_back_holds_nobody_up(
    hosts: list[Host],
) -> None:
    with opened() as (publisher, endpoint):
        publisher.publish(policy(0), 0)
        hosts += [Host(endpoint, f"node-{number}") for number in (2, 3)]
        for one in hosts:
            check(one.has(0), 0)
        publisher.wait_for_first(0, PATIENCE, actors=2)
        hosts[0].signal(signal.SIGSTOP)  # As one whose network is cut: its connections stay, nothing comes.
        begun = time.monotonic()
        publisher.publish(policy(1), 1)
        assert time.monotonic() - begun < 0.5, "the learner waits for nobody"
        check(hosts[1].has(1), 1)
        assert time.monotonic() - begun < DEADLINE + SILENCE + 2.0
        until(publisher, {"node-3"}, 1)
        assert any("node-2 was left behind" in line for line in publisher.pop_events())
        hosts[0].signal(signal.SIGCONT)
        check(hosts[0].has(1), 1)
        until(publisher, {"node-2", "node-3"}, 1)
        hosts[1].end()
        publisher.publish(policy(2), 2)
        check(hosts[0].has(2), 2)
        hosts[1] = Host(endpoint, "node-3")
        check(hosts[1].has(2), 2)
        publisher.publish(policy(3), 3)
        for one in hosts:
            check(one.has(3), 3)
        until(publisher, {"node-2", "node-3"}, 3)
        assert publisher.status()[m.WEIGHTS_HOSTS] == 2
        assert publisher.status()[m.WEIGHTS_MEMBERS] == 2


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_a_host_is_told_that_the_run_is_over_and_notices_a_learner_that_is_gone() -> None:
    with opened() as (publisher, endpoint):
        publisher.publish(policy(0), 0)
        table = StoreTable(endpoint, "run", 1.0)
        receiver = build_host_receiver(table, build_backend("gloo", HERE, "cpu", 1.0), "node-2", 1.0)
        receiver.wait_for_first(PATIENCE)
        with pytest.raises(WeightSyncError, match="No learner publishes weights in tcp://127"):
            build_host_receiver(StoreTable(endpoint, "other run", 1.0), receiver._transport, "node-2", 1.0)
    while not receiver.ended:
        receiver.wait_newer(0, 0.1)
    receiver.close()


def ask_again_and_again(table: StoreTable) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(TableError):
            table.check("e1.form")


@pytest.mark.timeout(60)
def test_a_store_that_ended_is_tried_again_and_is_gone_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_table, "CONNECT_SECONDS", 0.3)
    server = serve_table(HERE, "run", 1.0)
    table = StoreTable(server.endpoint, "run", 1.0)
    table.set("e1.form", b"1")
    assert (server.get("e1.form"), server.get("e2.form"), server.check("e1.form")) == (b"1", None, True)
    first = table.append("joins", b'{"a": 1}')
    assert server.read_lines("joins", 0).lines == (b'{"a": 1}',)
    assert table.append("joins", b'{"b": 2}') > first
    assert server.read_lines("joins", first).lines == (b'{"b": 2}',)
    assert server.get("joins", limit=3) is None, "too long"
    assert sorted(table.list_keys()) == ["e1.form", "joins"]
    assert StoreTable(server.endpoint, "other run", 1.0).list_keys() == []
    table.delete("e1.form")
    assert not server.check("e1.form")
    server.close()
    with pytest.raises(TableError, match="it is tried again"):
        table.check("e1.form")
    with pytest.raises(TableGone):
        ask_again_and_again(table)


def test_nccl_between_hosts_needs_a_gpu_and_a_port_that_is_taken_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--weights\.between-hosts is nccl.*but the device is cpu"):
        build_backend("nccl", HERE, "cpu", 1.0)
    server = serve_table(HERE, "run", 1.0)
    port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"the learner cannot listen at {HERE}:{port}"):
        serve_table(HERE, "run", 1.0, port)


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_nccl_carries_every_bit_between_gpus_and_goes_on_without_one_that_is_killed(
    hosts: list[Host],
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one process per GPU, and there is one GPU.")
    with opened("cuda:0") as (publisher, endpoint):
        publisher.publish(policy(0, device="cuda:0"), 0)
        hosts.append(Host(endpoint, "node-2", "cuda:1"))
        check(hosts[0].has(0), 0)
        hosts[0].end()
        publisher.publish(policy(1, device="cuda:0"), 1)
        hosts[0] = Host(endpoint, "node-2", "cuda:1")
        check(hosts[0].has(1), 1)
        publisher.publish(policy(2, device="cuda:0"), 2)
        check(hosts[0].has(2), 2)
