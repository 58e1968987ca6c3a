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
from asyncrl.weights.transports.shared_memory import SharedMemoryTransport
from asyncrl.weights.transports.shared_versions import SharedNotes
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
def linked() -> tuple[SharedNotes, packing.Manifest, tuple[list, list], HashStore]:
    """The learner's end, with buffers of a few kilobytes in the store."""
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest(policy(0, elements=1000))
    pair = (transport.allocate(manifest), transport.allocate(manifest))
    notes = transport.allocate_notes()
    transport.connect_root(store, 2, pair)
    return notes, manifest, pair, store


def test_a_member_reads_the_sets_as_they_are_now(linked) -> None:
    _, manifest, pair, store = linked
    versions = SharedMemoryTransport().connect_member(store, 1, 2).versions
    for index in (0, 1, 0):
        packing.fill(packing.views_in(manifest, pair[index]), policy(index + 5, elements=1000))
        assert all(
            torch.equal(found, packing.as_bytes(buffer))
            for found, buffer in zip(versions.buffers[index], pair[index], strict=True)
        )
    assert packing.checksum(pair[0]) != packing.checksum(pair[1])


def test_a_member_maps_what_it_has_mapped_no_second_time(linked) -> None:
    _, _, _, store = linked
    member = SharedMemoryTransport()
    link = member.connect_member(store, 1, 2)
    link.abort()
    assert member.connect_member(store, 1, 2).versions is link.versions


def test_what_is_mapped_can_neither_shrink_nor_be_written_by_an_actor(linked) -> None:
    _, _, _, store = linked
    path = store.get("shared/0/0").decode().split()[0]
    with pytest.raises(PermissionError):
        os.truncate(path, 16)
    versions = SharedMemoryTransport().connect_member(store, 1, 2).versions
    address = versions.buffers[0][0].data_ptr()
    spans = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = {tuple(int(end, 16) for end in span.split("-")): rights for span, rights in spans}
    assert [rights for (low, high), rights in ends.items() if low <= address < high] == ["r--s"]


def test_what_the_actor_maps_outlives_the_learners_buffers_and_then_nothing_is_left() -> None:
    gc.collect()
    before = open_files()
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest({"a": torch.zeros(64)})
    pair, notes = (transport.allocate(manifest), transport.allocate(manifest)), transport.allocate_notes()
    transport.connect_root(store, 2, pair)
    pair[1][0].fill_(3)
    notes.packed(1, 7)
    link = SharedMemoryTransport().connect_member(store, 1, 2)
    assert open_files() > before
    del pair, notes
    gc.collect()
    assert link.versions.buffers[1][0].view(torch.float32).tolist() == [3.0] * 64
    assert [link.versions.notes.note(index).version for index in (0, 1)] == [-1, 7]
    with pytest.raises(WeightSyncError, match="cannot be read"):
        SharedMemoryTransport().connect_member(store, 1, 2)
    del link
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
