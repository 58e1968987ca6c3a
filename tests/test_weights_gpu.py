"""The GPU transports of the weight channel, with real actor processes."""

import signal
import time

import pytest
import torch
from test_weights import PATIENCE, Actor, policy, raw, timed_publish

from asyncrl import metrics as m
from asyncrl.weights.publisher import StorePublisher, build_publisher

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
DEADLINE = 5.0


@pytest.fixture(scope="module", params=["cuda_ipc", "nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    needed = {"cuda_ipc": 1, "nccl": 2}[request.param]
    if needed > GPUS:
        pytest.skip(f"{request.param} needs {needed} GPUs, found {GPUS}")
    return request.param


def devices(transport: str) -> list[str]:
    """Where the actors live; the learner has cuda:0."""
    return ["cuda:0", "cuda:0"] if transport == "cuda_ipc" else [f"cuda:{i}" for i in range(1, min(GPUS, 3))]


@pytest.fixture(scope="module")
def crew(transport: str):
    crew = [Actor() for _ in devices(transport)]
    yield crew
    for each in crew:
        each.end()


@pytest.fixture
def publisher(transport: str):
    channel = build_publisher(transport, device="cuda:0", deadline=DEADLINE)
    yield channel
    channel.close()


def join_all(crew: list[Actor], publisher: StorePublisher, transport: str) -> None:
    for i, (each, device) in enumerate(zip(crew, devices(transport), strict=True)):
        each.join(publisher, f"actor-{i}", transport, device, DEADLINE)
    timed_publish(publisher, 0, "cuda:0")
    publisher.wait_for_first(0, 2 * PATIENCE, actors=len(crew))


def test_versions_arrive_bit_exact_on_every_gpu(
    publisher: StorePublisher, crew: list[Actor], transport: str
) -> None:
    join_all(crew, publisher, transport)
    for version in range(1, 20):
        assert timed_publish(publisher, version, "cuda:0") < 0.5
    for each in crew:
        assert each.ask(19) == (19, raw(policy(19)))
    assert publisher.status()[m.WEIGHTS_MEMBERS] == len(crew)
    for each in crew:
        assert each.ask("leave") == "left"


def test_a_killed_gpu_actor_stops_nobody_and_its_successor_joins(
    publisher: StorePublisher, crew: list[Actor], transport: str
) -> None:
    join_all(crew, publisher, transport)
    slowest = 0.0
    for version in range(1, 60):
        slowest = max(slowest, timed_publish(publisher, version, "cuda:0"))
        if version == 30:
            crew[-1].signal(signal.SIGKILL)
    assert slowest < 0.5
    for survivor in crew[:-1]:
        assert survivor.ask(59) == (59, raw(policy(59)))
    crew[-1].end()
    crew[-1] = Actor()
    crew[-1].join(publisher, f"actor-{len(crew) - 1}", transport, devices(transport)[-1], DEADLINE)
    assert crew[-1].ask(59) == (59, raw(policy(59)))
    for each in crew:
        assert each.ask("leave") == "left"


def test_a_stopped_gpu_actor_is_left_behind_and_comes_back(
    publisher: StorePublisher, crew: list[Actor], transport: str
) -> None:
    join_all(crew, publisher, transport)
    crew[-1].signal(signal.SIGSTOP)
    try:
        newest, until = 0, time.monotonic() + 4 * DEADLINE
        while time.monotonic() < until:  # all of: the broadcast hangs, is aborted, the actor is left behind
            newest += 1
            assert timed_publish(publisher, newest, "cuda:0") < 0.5
        for survivor in crew[:-1]:
            assert survivor.ask(newest) == (newest, raw(policy(newest)))
    finally:
        crew[-1].signal(signal.SIGCONT)
    for each in crew:
        assert each.ask(newest) == (newest, raw(policy(newest)))
    publisher.wait_for_first(newest, PATIENCE, actors=len(crew))
    for each in crew:
        assert each.ask("leave") == "left"
