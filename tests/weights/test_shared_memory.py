"""Weights travel between processes of a host through memory that both have."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights import packing
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher
from asyncrl.weights.transports.interface import Link
from asyncrl.weights.transports.shared_memory import SharedMemoryTransport
from support.weights import PATIENCE, Actor, channel_folder, policy, raw

NAME = "shared_memory"


@pytest.fixture
def publisher() -> Iterator[BroadcastPublisher]:
    with channel_folder() as folder:
        channel = build_publisher(NAME, folder, deadline=5.0)
        yield channel
        channel.close()


@pytest.fixture
def actors() -> Iterator[list[Actor]]:
    pair = [Actor(), Actor()]
    yield pair
    for each in pair:
        each.end()


def open_files() -> set[str]:
    """Shared memory that this process has open."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except FileNotFoundError:  # The listing's own.
            continue
        if "asyncrl-weights" in target:
            found.add(file.name)
    return found


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_versions_arrive_bit_for_bit_also_after_an_actor_was_killed_and_in_one_that_comes_later(
    publisher: BroadcastPublisher, actors: list[Actor]
) -> None:
    first, second = actors
    first.join(publisher, "actor-0", NAME, deadline=5.0)
    for version in range(3):
        publisher.publish(policy(version), version)
        assert first.ask(version) == (version, raw(policy(version)))
    second.join(publisher, "actor-1", NAME, deadline=5.0)
    assert second.ask(2) == (2, raw(policy(2))), "what lies there already"
    first.signal(signal.SIGKILL)
    for version in (3, 4):
        publisher.publish(policy(version), version)
        assert second.ask(version) == (version, raw(policy(version)))
    publisher.wait_for_first(4, PATIENCE, actors=1)


@pytest.fixture
def linked() -> tuple[SharedMemoryTransport, packing.Manifest, tuple[list, list], HashStore]:
    """The learner's end, with buffers of a few kilobytes in the store."""
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest(policy(0, elements=1000))
    pair = (transport.allocate(manifest), transport.allocate(manifest))
    transport.connect_root(store, 2, pair)
    return transport, manifest, pair, store


def received(link: Link, manifest: packing.Manifest, index: int) -> list[torch.Tensor]:
    into = packing.allocate(manifest, torch.device("cpu"))
    link.receive(index, into)
    return into


def test_a_member_gets_the_set_that_is_announced_as_it_is_now(linked) -> None:
    _, manifest, pair, store = linked
    link = SharedMemoryTransport().connect_member(store, 1, 2)
    for index in (0, 1, 0):
        packing.fill(packing.views_in(manifest, pair[index]), policy(index + 5, elements=1000))
        found = received(link, manifest, index)
        assert all(
            torch.equal(f.view(torch.uint8), b.view(torch.uint8))
            for f, b in zip(found, pair[index], strict=True)
        )
    assert packing.checksum(pair[0]) != packing.checksum(pair[1])
    link.abort()
    with pytest.raises(ValueError, match="zip"):
        received(link, manifest, 0)


def test_what_is_mapped_can_neither_shrink_nor_be_written_by_an_actor(linked) -> None:
    _, _, _, store = linked
    path = store.get("shared/0/0").decode().split()[0]
    with pytest.raises(PermissionError):
        os.truncate(path, 16)
    link = SharedMemoryTransport().connect_member(store, 1, 2)
    assert not link._mapped[0][0].flags.writeable  # type: ignore[attr-defined]


def test_what_the_actor_maps_outlives_the_learners_buffers_and_then_nothing_is_left() -> None:
    gc.collect()
    before = open_files()
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest({"a": torch.zeros(64)})
    pair = (transport.allocate(manifest), transport.allocate(manifest))
    transport.connect_root(store, 2, pair)
    pair[1][0].fill_(3)
    link = SharedMemoryTransport().connect_member(store, 1, 2)
    assert open_files() > before
    del pair
    gc.collect()
    assert received(link, manifest, 1)[0].tolist() == [3.0] * 64
    with pytest.raises(WeightSyncError, match="cannot be read"):
        SharedMemoryTransport().connect_member(store, 1, 2)
    link.abort()
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("/etc/passwd 100", "which is no shared memory"),
        ("/proc/1/fd/../../../etc/passwd 100", "which is no shared memory"),
        ("/proc/1/fd/3", "which is no shared memory"),
        ("SAME 16", "have 4000 bytes, expected 16"),
        ("/proc/999999999/fd/3 16", "cannot be read"),
    ],
)
def test_a_place_that_is_no_such_memory_is_refused(linked, said: str, problem: str) -> None:
    _, _, _, store = linked
    at = next(key for key in ("shared/0/0", "shared/0/1", "shared/0/2") if b" 4000" in store.get(key))
    store.set(at, said.replace("SAME", store.get(at).decode().split()[0]))
    with pytest.raises(WeightSyncError, match=problem):
        SharedMemoryTransport().connect_member(store, 1, 2)
