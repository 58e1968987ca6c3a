"""Actors copy versions straight out of the learner's memory, and never act with parts of two of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.weights import mapped_receiver, packing
from asyncrl.weights.interface import WholeTensors
from asyncrl.weights.mapped_receiver import MappedReceiver
from asyncrl.weights.membership import connect
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher
from asyncrl.weights.receiver import build_receiver
from asyncrl.weights.transports.shared_memory import SharedMemoryTransport
from asyncrl.weights.transports.shared_versions import Note
from support.processes import FORKS
from support.weights import PATIENCE, Actor, channel_folder, policy, raw, swap_until

NAME = "shared_memory"
CPU = torch.device("cpu")


@pytest.fixture
def folder() -> Iterator[Path]:
    with channel_folder() as folder:
        yield folder


@pytest.fixture
def publisher(folder: Path) -> Iterator[BroadcastPublisher]:
    channel = build_publisher(NAME, folder, deadline=5.0)
    yield channel
    channel.close()


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


# --- copying and summing in one pass ---


@pytest.mark.parametrize("end", [0, 5, 8 * packing.FOLD, 3 * packing.CACHED_BYTES + 9, 2**30])
def test_a_running_sum_is_that_of_the_buffer_wherever_it_stops_in_between(end: int) -> None:
    generator = torch.Generator().manual_seed(0)
    words = (4 * packing.CACHED_ROWS + 3) * packing.FOLD + 7
    buffer = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator)
    running = packing.RunningSum(buffer)
    running.add_until(end)
    running.add_until(end // 2)
    assert int(running.total()) == int(by_rows_and_columns(buffer))


def by_rows_and_columns(buffer: Tensor) -> Tensor:
    """The sum in torch's own words, over the whole table at once."""
    table = buffer[: len(buffer) // packing.FOLD * packing.FOLD].view(-1, packing.FOLD)
    rest = buffer[table.numel() :]
    factors = packing._scattered(len(table) + packing.FOLD + len(rest), CPU)
    of_rows, of_columns, of_rest = factors.split([len(table), packing.FOLD, len(rest)])
    weights = (2 * of_rows + 1)[:, None] + 2 * of_columns[None, :]
    return (table * weights).sum() + (rest * (2 * of_rest + 1)).sum()


def test_a_summed_copy_is_a_copy_and_its_sum_that_of_the_buffers() -> None:
    source = filled(3, megabytes=3) | {"strided": torch.randn(300, 200), "none": torch.zeros(0, 4)}
    manifest = packing.build_manifest(source)
    buffers = packing.allocate(manifest, CPU)
    views = packing.views_in(manifest, buffers)
    packing.fill(views, source)
    into = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    into["strided"] = torch.zeros(200, 300).t()
    into["bias"] = torch.nn.Parameter(into["bias"])
    assert packing.copy_and_sum(into, manifest, buffers, views) == packing.checksum(buffers)
    into["bias"] = into["bias"].detach()
    assert raw(into) == raw(source)


def test_what_is_in_the_sum_was_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a word that another process writes between the two is taken, and the sum does not tell."""
    source = {"a small one": torch.zeros(16), "large": torch.zeros(2 * packing.CACHED_BYTES // 4)}
    manifest = packing.build_manifest(source)
    buffers = packing.allocate(manifest, CPU)
    views, expected = packing.views_in(manifest, buffers), packing.checksum(buffers)
    copied = packing._copy_by_blocks

    def written_after(*arguments: Any) -> None:
        copied(*arguments)
        views["a small one"][3] = 1

    monkeypatch.setattr(packing, "_copy_by_blocks", written_after)
    into = {name: torch.ones_like(tensor) for name, tensor in source.items()}
    assert packing.copy_and_sum(into, manifest, buffers, views) == expected
    assert raw(into) == raw(source)


# --- receivers in this process ---


class Interrupted(MappedReceiver):
    """Calls `meanwhile`, once, in the middle of a copy, as if another process ran on."""

    copies = 0

    def meanwhile(self) -> None:
        """Nothing, unless a test says otherwise."""

    def _copy(self, note: Note, tensors: Mapping[str, Tensor]) -> int:
        self.copies += 1
        some = {"bias", "large"}
        packing.fill({name: tensors[name] for name in some}, self._sets[note.buffer_index].views)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super()._copy(note, tensors)


def interrupted(publisher: BroadcastPublisher, name: str = "actor-0") -> Interrupted:
    manifest = packing.build_manifest(filled(0))
    return Interrupted(SharedMemoryTransport(), *connect(Path(publisher.endpoint)), name, manifest, 5.0)


def wait_until_sent(publisher: BroadcastPublisher, version: int) -> None:
    """Wait until a version is the one to send: then the set of the version before it may be packed."""
    until = time.monotonic() + PATIENCE
    while publisher._buffers.sending != version:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_set_that_is_packed_anew_while_it_is_copied_is_given_up_for_the_other(
    publisher: BroadcastPublisher,
) -> None:
    receiver, tensors = interrupted(publisher), filled(99)

    def overtake() -> None:
        publisher.publish(filled(1), 1)
        wait_until_sent(publisher, 1)
        publisher.publish(filled(2), 2)  # Over version 0.

    receiver.meanwhile = overtake
    publisher.publish(filled(0), 0)
    receiver.wait_for_first(PATIENCE)
    assert receiver.swap_into(tensors) == 1
    assert number_in(tensors) == 1
    assert receiver.copies == 2
    assert swap_until(receiver, tensors, 2) == 2
    assert number_in(tensors) == 2
    receiver.close()


def test_while_an_actor_swaps_the_learner_gets_no_receipt_and_keeps_the_announced_version(
    publisher: BroadcastPublisher,
) -> None:
    receiver, tensors = interrupted(publisher), filled(99)
    sending = []

    def publish_many() -> None:
        publisher.publish(filled(1), 1)
        wait_until_sent(publisher, 1)
        for version in range(2, 20):
            publisher.publish(filled(version), version)
            time.sleep(0.005)
            sending.append(publisher._buffers.sending)

    receiver.meanwhile = publish_many
    publisher.publish(filled(0), 0)
    receiver.wait_for_first(PATIENCE)
    assert receiver.swap_into(tensors) == 1
    assert number_in(tensors) == 1
    assert set(sending) == {1}
    assert swap_until(receiver, tensors, 19) == 19
    receiver.close()


def test_a_flipped_byte_is_noticed_and_the_actor_does_not_go_on(publisher: BroadcastPublisher) -> None:
    receiver, tensors = interrupted(publisher), filled(99)
    publisher.publish(filled(0), 0)
    receiver.wait_for_first(PATIENCE)
    packing.as_bytes(publisher._buffers.buffer_pair[0][1])[12345] ^= 1
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"actor-0 cannot copy.*version 0 there has checksum"):
            receiver.swap_into(tensors)
    receiver.close()


def test_a_version_whose_sum_does_not_come_waits_until_it_is_there(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_receiver, "SUM_SECONDS", 0.05)
    receiver, tensors = interrupted(publisher), filled(99)
    publisher.publish(filled(0), 0)
    receiver.wait_for_first(PATIENCE)
    assert receiver.swap_into(tensors) == 0
    unsummed = pack_without_sum(publisher, 1)
    publisher.wait_for_first(1, PATIENCE)
    for _ in range(2):
        assert receiver.swap_into(tensors) == 0
        assert number_in(tensors) == 0
    assert receiver.copies == 3, "version 0, version 1 without its sum, version 0 again"
    publisher._buffers.sum_up(unsummed)
    assert receiver.swap_into(tensors) == 1
    assert number_in(tensors) == 1
    receiver.close()


def pack_without_sum(publisher: BroadcastPublisher, version: int) -> int:
    """Do what `publish` does, but for the sum."""
    buffer_index = publisher._buffers.pack(WholeTensors(filled(version)), version)
    publisher._wake_up.wake(publisher._wake_up.name)
    return buffer_index


# --- other processes ---


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


def learner(pipe: Connection, folder: Path, packs: bool) -> None:
    """Publish versions 0 and 1, then begin with version 2: to pack it, or to sum it up."""
    channel = build_publisher(NAME, folder, deadline=5.0)
    channel.publish(filled(0), 0)
    pipe.send(channel.endpoint)
    channel.wait_for_first(0, PATIENCE)
    pipe.recv()
    channel.publish(filled(1), 1)
    channel.wait_for_first(1, PATIENCE)
    if packs:
        channel.publish(HalfSource(filled(2), pipe), 2)
    pack_without_sum(channel, 2)
    channel.wait_for_first(2, PATIENCE)
    pipe.send("unsummed")
    pipe.recv()


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize("swapped", [True, False], ids=["held", "late"])
@pytest.mark.parametrize("packs", [True, False], ids=["packing", "summing"])
def test_an_actor_keeps_or_gets_a_whole_version_of_a_learner_killed_in_the_middle_of_the_next(
    folder: Path, packs: bool, swapped: bool
) -> None:
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=learner, args=(theirs, folder, packs), daemon=True)
    process.start()
    assert pipe.poll(2 * PATIENCE)
    tensors = filled(99)
    receiver = build_receiver(NAME, pipe.recv(), "actor-0", tensors, deadline=5.0)
    assert isinstance(receiver, MappedReceiver)
    assert swap_until(receiver, tensors, 0) == 0
    pipe.send("go on")
    if swapped:
        assert swap_until(receiver, tensors, 1) == 1
    assert pipe.poll(PATIENCE)
    assert pipe.recv() == ("half" if packs else "unsummed")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(PATIENCE)
    receiver._thread.join(PATIENCE)
    assert receiver.swap_into(tensors) == 1
    assert number_in(tensors) == 1
    receiver._deadline = 0.0
    with pytest.raises(WeightSyncError, match="actor-0 lost the learner"):
        receiver.swap_into(tensors)
    receiver.close()


def slow_actor(pipe: Connection, endpoint: str, seconds: float) -> None:
    """Swap, and look at each version; tell which were seen, and how many copies that took."""
    torch.set_num_threads(1)
    tensors = filled(0, megabytes=8)
    manifest = packing.build_manifest(tensors)
    receiver = Interrupted(SharedMemoryTransport(), *connect(Path(endpoint)), "actor-0", manifest, 10.0)
    receiver.wait_for_first(PATIENCE)
    pipe.send("ready")
    seen, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        version = receiver.swap_into(tensors)
        assert number_in(tensors) == version % 256, version
        seen.append(version)
    pipe.send((seen, receiver.copies))
    receiver.close()


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_of_many_versions_in_a_row_none_is_ever_mixed_with_another(publisher: BroadcastPublisher) -> None:
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=slow_actor, args=(theirs, publisher.endpoint, 4.0), daemon=True)
    process.start()
    versions = [filled(number, megabytes=8) for number in range(64)]
    version = 0
    until = time.monotonic() + 2 * PATIENCE
    publisher.publish(versions[0], 0)
    assert pipe.poll(2 * PATIENCE)
    assert pipe.recv() == "ready"
    while not pipe.poll() and time.monotonic() < until:
        version += 256 - 63 if version % 256 == 63 else 1
        publisher.publish(versions[version % 256], version)
    seen, copies = pipe.recv()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert seen == sorted(seen), "never back to an earlier one"
    assert len(set(seen)) > 10
    assert copies > len(set(seen)), "no copy was overtaken"


def heavy_actor(pipe: Connection, endpoint: str) -> None:
    """Tell how much memory of its own the process has, before it joins and after its second swap."""
    torch.set_num_threads(1)
    tensors = filled(0, megabytes=96)
    before = anonymous_bytes()
    receiver = build_receiver(NAME, endpoint, "actor-0", tensors, deadline=10.0)
    assert swap_until(receiver, tensors, 0) == 0
    pipe.send("first")
    assert swap_until(receiver, tensors, 1) == 1
    pipe.send(anonymous_bytes() - before)
    receiver.close()


def anonymous_bytes() -> int:
    """Memory of this process that it shares with nobody."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith("Anonymous:"))


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_an_actor_needs_no_room_for_a_version_beside_its_own_tensors(publisher: BroadcastPublisher) -> None:
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=heavy_actor, args=(theirs, publisher.endpoint), daemon=True)
    process.start()
    publisher.publish(filled(0, megabytes=96), 0)
    assert pipe.poll(2 * PATIENCE)
    assert pipe.recv() == "first"
    publisher.publish(filled(1, megabytes=96), 1)
    assert pipe.poll(2 * PATIENCE)
    assert pipe.recv() < 24 << 20
    process.join(PATIENCE)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_stopped_actor_is_left_behind_and_copies_the_newest_version_when_it_goes_on(
    publisher: BroadcastPublisher,
) -> None:
    actors = [Actor(), Actor()]
    for i, each in enumerate(actors):
        each.join(publisher, f"actor-{i}", NAME, deadline=5.0)
    publisher.publish(policy(0), 0)
    publisher.wait_for_first(0, PATIENCE, actors=2)
    actors[1].signal(signal.SIGSTOP)
    newest, until = 0, time.monotonic() + PATIENCE
    try:
        while publisher.status()[m.WEIGHTS_MEMBERS] == 2 and time.monotonic() < until:
            newest += 1
            publisher.publish(policy(newest), newest)
        assert publisher.status()[m.WEIGHTS_MEMBERS] == 1
        assert actors[0].ask(newest) == (newest, raw(policy(newest)))
    finally:
        actors[1].signal(signal.SIGCONT)
    assert actors[1].ask(newest) == (newest, raw(policy(newest)))
    publisher.wait_for_first(newest, PATIENCE, actors=2)
    for each in actors:
        assert each.ask("leave") == "left"
        each.end()


@pytest.mark.gpu
def test_worlds_on_a_gpu_are_copied_whole_out_of_memory_that_is_only_read(
    publisher: BroadcastPublisher,
) -> None:
    receiver = build_receiver(NAME, publisher.endpoint, "actor-0", filled(0, megabytes=40), deadline=5.0)
    tensors = {name: tensor.cuda() for name, tensor in filled(99, megabytes=40).items()}
    for version in range(4):
        publisher.publish(filled(version, megabytes=40), version)
        assert swap_until(receiver, tensors, version) == version
        assert number_in(tensors) == version
    receiver.close()
