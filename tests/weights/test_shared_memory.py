"""Weights travel between processes of a host through memory that both have, and no version is ever mixed."""

import gc
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights import packing
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.transports.shared_memory import SharedMemoryTransport
from support.ranks import FORKS
from support.weights import PATIENCE, policy, swap_until

NAME = "shared_memory"


@pytest.fixture
def publisher(folder: Path) -> Iterator[BroadcastPublisher]:
    channel = BroadcastPublisher(NAME, folder, deadline=5.0)
    yield channel
    channel.close()


# --- the mapped memory ---


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


@pytest.fixture
def linked() -> tuple[packing.Manifest, tuple[list, list], HashStore]:
    """The learner's end, with buffers of a few kilobytes in the store."""
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest(policy(0, elements=1000))
    pair = (transport.allocate(manifest), transport.allocate(manifest))
    transport.connect_root(store, 2, pair)
    return manifest, pair, store


def test_what_is_mapped_can_neither_shrink_nor_be_written_by_an_actor(linked) -> None:
    _, _, store = linked
    path = json.loads(store.get("files"))[0].split()[0]
    with pytest.raises(PermissionError):
        os.truncate(path, 16)
    member = SharedMemoryTransport()
    member.connect_member(store, 1, 2)
    assert not member._mapped[1][0].flags.writeable
    address = member._mapped[1][0].ctypes.data
    spans = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = {tuple(int(end, 16) for end in span.split("-")): rights for span, rights in spans}
    assert [rights for (low, high), rights in ends.items() if low <= address < high] == ["r--s"]


def test_what_the_actor_maps_outlives_the_learners_buffers_and_then_nothing_is_left() -> None:
    gc.collect()
    before = open_files()
    transport, store = SharedMemoryTransport(), HashStore()
    manifest = packing.build_manifest({"a": torch.zeros(64)})
    pair = (transport.allocate(manifest), transport.allocate(manifest))
    transport.connect_root(store, 2, pair)
    pair[1][0].fill_(3)
    member = SharedMemoryTransport()
    link = member.connect_member(store, 1, 2)
    assert open_files() > before
    del pair
    gc.collect()
    into = packing.allocate(manifest, torch.device("cpu"))
    link.receive(1, into)
    assert into[0].tolist() == [3.0] * 64
    with pytest.raises(WeightSyncError, match="cannot be read"):
        SharedMemoryTransport().connect_member(store, 1, 2)
    del link, member
    gc.collect()
    assert open_files() == before


# --- whole versions ---


def filled(number: int, megabytes: int = 1) -> dict[str, Tensor]:
    """Tensors of several dtypes and sizes, all of whose elements are the number."""
    return {
        "large": torch.full((megabytes, 2**18), float(number)),
        "half": torch.full((777, 33), number, dtype=torch.bfloat16),
        "bias": torch.full((5,), float(number)),
        "steps": torch.tensor(number),
    }


def number_in(tensors: Mapping[str, Tensor]) -> int:
    """The number with which all are filled; below 256, as far as bfloat16 counts one by one."""
    number = int(tensors["steps"])
    mixed = [name for name, tensor in tensors.items() if not bool((tensor == number).all())]
    assert not mixed, f"{mixed} hold something else than {number}"
    return number


def test_a_byte_that_changes_after_the_sum_was_made_is_noticed_and_the_actor_does_not_go_on(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = packing.checksum

    def changed_afterwards(buffers: packing.Buffers) -> int:
        found = genuine(buffers)
        if buffers is publisher._buffers.buffer_pair[0] or buffers is publisher._buffers.buffer_pair[1]:
            packing.as_bytes(buffers[1])[12345] ^= 1
        return found

    monkeypatch.setattr(packing, "checksum", changed_afterwards)
    publisher.publish(WholeTensors(filled(0)), 0)
    receiver = WeightReceiver(NAME, publisher.endpoint, "actor-0", filled(0), deadline=5.0)
    with pytest.raises(WeightSyncError, match=r"actor-0 received version 0 with checksum"):
        receiver.wait_for_first(PATIENCE)
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"actor-0 received version 0 with checksum"):
            receiver.swap_into(filled(0))
    receiver.close()


class HalfSource(WholeTensors):
    """Writes some of its tensors, tells, and goes on writing for ever."""

    def __init__(self, tensors: Mapping[str, Tensor], pipe: Connection) -> None:
        super().__init__(tensors)
        self._pipe = pipe

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Begin."""
        packing.fill({"bias": targets["bias"], "half": targets["half"]}, self._tensors)
        self._pipe.send("half")
        while True:
            targets["large"][0] += 1


def learner(pipe: Connection, folder: Path) -> None:
    """Publish versions 0 and 1, then begin to pack version 2."""
    channel = BroadcastPublisher(NAME, folder, deadline=5.0)
    channel.publish(WholeTensors(filled(0)), 0)
    pipe.send(channel.endpoint)
    channel.wait_for_first(0, PATIENCE)
    pipe.recv()
    channel.publish(WholeTensors(filled(1)), 1)
    channel.wait_for_first(1, PATIENCE)
    channel.publish(HalfSource(filled(2), pipe), 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("swapped", [True, False], ids=["held", "late"])
def test_an_actor_keeps_or_gets_a_whole_version_of_a_learner_killed_in_the_middle_of_the_next(
    folder: Path, swapped: bool
) -> None:
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=learner, args=(theirs, folder), daemon=True)
    process.start()
    assert pipe.poll(2 * PATIENCE)
    tensors = filled(99)
    receiver = WeightReceiver(NAME, pipe.recv(), "actor-0", tensors, deadline=5.0)
    assert swap_until(receiver, tensors, 0) == 0
    pipe.send("go on")
    if swapped:
        assert swap_until(receiver, tensors, 1) == 1
    assert pipe.poll(PATIENCE)
    assert pipe.recv() == "half"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(PATIENCE)
    assert receiver.swap_into(tensors) == 1
    assert number_in(tensors) == 1
    receiver._deadline = 0.5
    receiver._thread.join(PATIENCE)
    with pytest.raises(WeightSyncError, match=r"actor-0 had no answer from .* version 1"):
        receiver.swap_into(tensors)
    receiver.close()


def busy_actor(pipe: Connection, endpoint: str, seconds: float) -> None:
    """Swap, and look at each version; tell which were seen."""
    torch.set_num_threads(1)
    tensors = filled(0, megabytes=8)
    receiver = WeightReceiver(NAME, endpoint, "actor-0", tensors, deadline=10.0)
    receiver.wait_for_first(PATIENCE)
    pipe.send("ready")
    seen, until = [], time.monotonic() + seconds
    while time.monotonic() < until or len(set(seen)) <= 10:
        version = receiver.swap_into(tensors)
        assert number_in(tensors) == version % 256, version
        seen.append(version)
    pipe.send(seen)
    receiver.close()


@pytest.mark.multiprocess
def test_of_many_versions_in_a_row_none_is_ever_mixed_with_another(publisher: BroadcastPublisher) -> None:
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=busy_actor, args=(theirs, publisher.endpoint, 2.0), daemon=True)
    process.start()
    versions = [WholeTensors(filled(number, megabytes=8)) for number in range(64)]
    version = 0
    until = time.monotonic() + 2 * PATIENCE
    publisher.publish(versions[0], 0)
    assert pipe.poll(2 * PATIENCE)
    assert pipe.recv() == "ready"
    while not pipe.poll() and time.monotonic() < until:
        version += 256 - 63 if version % 256 == 63 else 1
        publisher.publish(versions[version % 256], version)
    assert pipe.poll(), "the actor saw ten versions in time"
    seen = pipe.recv()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert seen == sorted(seen), "never back to an earlier one"


@pytest.mark.gpu
def test_a_swap_onto_a_gpu_copies_a_whole_version(publisher: BroadcastPublisher) -> None:
    receiver = WeightReceiver(NAME, publisher.endpoint, "actor-0", filled(0, megabytes=40), deadline=5.0)
    tensors = {name: tensor.cuda() for name, tensor in filled(99, megabytes=40).items()}
    for version in range(4):
        publisher.publish(WholeTensors(filled(version, megabytes=40)), version)
        assert swap_until(receiver, tensors, version) == version
        assert number_in(tensors) == version
    receiver.close()
