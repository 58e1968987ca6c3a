"""Policy weights travel from the learner to actors that come, stall and die."""

import signal
import statistics
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.distributed import HashStore

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.messaging.sockets import WakeableSocket
from asyncrl.observability import metrics_system as m
from asyncrl.weights import packing
from asyncrl.weights import publisher as publishing
from asyncrl.weights.interface import ChannelClosed, Link, TransportSession, run_bounded
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.transports.gpu import CudaIpcTransport, divide
from asyncrl.weights.transports.in_process import build_in_process
from support.gloo_transport import GLOO
from support.weights import PATIENCE, Actor, policy, raw, source, timed_publish, wait_for_all


@pytest.fixture(params=["shared_memory", GLOO], ids=["shared_memory", "broadcast"])
def transport(request: pytest.FixtureRequest) -> str:
    """Copies out of the learner's memory; a broadcast, as between GPUs."""
    return request.param


@pytest.fixture
def carried(folder: Path, transport: str):
    """A channel of either carrier."""
    channel = BroadcastPublisher(transport, folder, deadline=1.0)
    yield channel
    channel.close()


# --- layout ---


def test_packing_puts_every_tensor_at_a_multiple_of_16_bytes() -> None:
    tensors = {
        "b": torch.tensor([1.0, 2.0, 3.0]),
        "a": torch.tensor([[4.0]]),
        "c": torch.tensor([1, 2], dtype=torch.int64),
    }
    manifest = packing.build_manifest(tensors)
    buffers = packing.allocate(manifest, torch.device("cpu"))
    packing.fill(packing.views_in(manifest, buffers), tensors)
    assert manifest.dtypes == ["float32", "int64"]
    assert buffers[0].numpy().tobytes() == struct.pack("<8f", 4, 0, 0, 0, 1, 2, 3, 0)
    assert buffers[1].numpy().tobytes() == struct.pack("<2q", 1, 2)
    assert sum(buffer.nbytes for buffer in buffers) == 48


def test_a_manifest_survives_json_and_does_not_depend_on_the_order_of_the_tensors() -> None:
    tensors = policy(0, elements=10)
    manifest = packing.build_manifest(tensors)
    assert packing.Manifest.from_json(manifest.to_json()) == manifest
    assert packing.build_manifest(dict(reversed(tensors.items()))) == manifest


@pytest.mark.parametrize(
    "words", [3, packing.FOLD, 2 * packing.FOLD + 5, (2 * packing.CACHED_ROWS + 3) * packing.FOLD + 1]
)
def test_the_sum_of_a_buffer_is_each_word_times_an_odd_number_of_its_own(words: int) -> None:
    """The factors follow from the sums of buffers with a single 1; any other sum must be made of them."""
    views = sorted({0, 1, words // 2, words - 1})
    buffer = torch.zeros(words, dtype=torch.int64)
    factors = []
    for place in views:
        buffer[place] = 1
        factors.append(int(packing.weighted_sum(buffer)))
        buffer[place] = 0
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == len(views)
    values = [-(2**63), 7, -1, 2**62 + 1][: len(views)]
    for place, value in zip(views, values, strict=True):
        buffer[place] = value
    expected = sum(f * v for f, v in zip(factors, values, strict=True)) % 2**64
    assert int(packing.weighted_sum(buffer.view(torch.bfloat16))) % 2**64 == expected


@pytest.mark.parametrize("rows_of_table", [6, 3 * packing.CACHED_ROWS + 1])
def test_the_checksum_sees_words_rows_columns_and_buffers_that_changed_places(rows_of_table: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-(2**63), 2**63 - 1, (rows_of_table, packing.FOLD), generator=generator)
    rows, columns, shifted = whole.roll(1, 0), whole.roll(1, 1), whole.flatten().roll(8)
    corners = whole.clone()
    corners[0, 0], corners[3, 9] = whole[3, 9], whole[0, 0]
    one, other = whole.flatten(), corners.flatten()
    assert packing.checksum([one, other]) != packing.checksum([other, one])
    sums = {int(packing.weighted_sum(t.flatten())) for t in (whole, rows, columns, shifted, corners)}
    assert len(sums) == 5


def test_copies_are_cast_whatever_their_size_and_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    source = [torch.randn(shape, generator=generator).t() for shape in ((2, 3), (1100, 2000), (1, 1))]
    into = [torch.zeros(tensor.shape, dtype=torch.bfloat16) for tensor in source]
    assert into[1].nbytes > packing.LARGE > into[0].nbytes
    packing.copy(into, source)
    for target, tensor in zip(into, source, strict=True):
        assert torch.equal(target, tensor.to(torch.bfloat16))


def test_a_mismatch_names_the_first_tensor_and_both_shapes_and_nothing_to_send_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="no trainable tensors"):
        packing.build_manifest({})
    learner = packing.build_manifest({"a": torch.zeros(2), "lora": torch.zeros(4, 8), "z": torch.zeros(1)})
    actor = packing.build_manifest({"a": torch.zeros(2), "lora": torch.zeros(4, 16)})
    with pytest.raises(
        WeightSyncError, match=r"'lora' is float32 \[4, 8\] on the learner but float32 \[4, 16\] on actor-1"
    ):
        packing.require_same(learner, actor, "actor-1")
    with pytest.raises(WeightSyncError, match=r"'z' is float32 \[1\] on the learner but absent on actor-1"):
        packing.require_same(
            learner, packing.build_manifest({"a": torch.zeros(2), "lora": torch.zeros(4, 8)}), "actor-1"
        )


# --- inline ---


def test_inline_hands_over_the_newest_version_once() -> None:
    publisher, receiver = build_in_process()
    tensors = policy(0, elements=10)
    assert receiver.swap_into(tensors) == -1
    publisher.publish(source(7, elements=10), 0)
    publisher.publish(source(8, elements=10), 1)
    publisher.wait_for_first(1, 0.0)
    assert receiver.wait_for_first(0.0) == 1
    assert receiver.swap_into(tensors) == 1
    assert raw(tensors) == raw(policy(8, elements=10))
    tensors["steps"].fill_(99)
    assert receiver.swap_into(tensors) == 1
    assert tensors["steps"].item() == 99  # nothing new, nothing copied
    with pytest.raises(WeightSyncError, match="Version 1 was published after version 1"):
        publisher.publish(source(8, elements=10), 1)


# --- wake-ups, bounded actions and transports ---


def test_a_socket_that_waits_is_woken_and_a_wake_up_before_is_not_lost() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    waiting = WakeableSocket(context.socket(zmq.ROUTER))
    waiting.wake()
    waiting.wake()
    began = time.monotonic()
    assert not waiting.wait(PATIENCE)
    waking = threading.Timer(0.05, waiting.wake)
    waking.start()
    assert not waiting.wait(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    waking.join()
    context.destroy(linger=0)


class Carrier:
    """Notes the links that are asked for: rank and size."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.links: set[tuple[int, int]] = set()

    def connect_root(self, store: object, size: int, buffers: object) -> Link:
        return self.connect_member(store, 0, size)

    def connect_member(self, store: object, rank: int, size: int) -> Link:
        self.links.add((rank, size))
        return Link()


@pytest.mark.parametrize(
    ("devices", "near", "far"),
    [
        ("abac", {(0, 2), (1, 2)}, {(0, 3), (1, 3), (2, 3)}),
        ("aa", {(0, 2), (1, 2)}, set()),
        ("abc", set(), {(0, 3), (1, 3), (2, 3)}),
    ],
)
def test_each_member_gets_its_weights_by_the_way_that_its_place_allows(devices, near, far) -> None:
    store, within, between = HashStore(), Carrier(), Carrier()
    transports: list[Any] = [CudaIpcTransport(within, between, gpu) for gpu in devices]  # type: ignore[arg-type]
    members = [
        threading.Thread(target=transports[rank].connect_member, args=[store, rank, len(devices)])
        for rank in range(1, len(devices))
    ]
    for member in members:
        member.start()
    transports[0].connect_root(store, len(devices), ([], []))
    for member in members:
        member.join(PATIENCE)
    assert (within.links, between.links) == (near, far)


def test_two_members_on_a_gpu_that_is_not_the_learners_are_refused() -> None:
    assert divide(["a", "b", "a", "c"]) == ([2], [1, 3])
    with pytest.raises(WeightSyncError, match=r"Two actors share GPU b.*--weights\.transport shared_memory"):
        divide(["a", "b", "a", "b"])


def test_an_action_that_blocks_fails_or_is_given_up_ends_with_an_error_that_names_it() -> None:
    never = threading.Event()
    with pytest.raises(WeightSyncError, match=r"broadcasting did not end within 0\.05 s"):
        run_bounded(never.wait, seconds=0.05, what="broadcasting", given_up=str)
    with pytest.raises(WeightSyncError, match=r"broadcasting was given up: a newer epoch\."):
        run_bounded(never.wait, seconds=PATIENCE, what="broadcasting", given_up=lambda: "a newer epoch")
    with pytest.raises(WeightSyncError, match=r"broadcasting failed: .* by zero"):
        run_bounded(lambda: 1 // 0, seconds=PATIENCE, what="broadcasting", given_up=str)
    assert run_bounded(lambda: 7, seconds=PATIENCE, what="counting", given_up=str) == 7
    never.set()


def test_a_link_is_freed_on_the_thread_that_may_be_left_behind() -> None:
    freed: list[int] = []

    class Slow:
        """A link whose destructor says where it ran."""

        def abort(self) -> None:
            assert not freed

        def __del__(self) -> None:
            freed.append(threading.get_ident())

    session = TransportSession(PATIENCE, str)
    session.form("forming", Slow)
    session.drop()
    assert len(freed) == 1
    assert freed[0] != threading.get_ident()
    assert not session.formed


# --- receivers in this process ---


def test_a_late_joiner_gets_the_newest_version_without_a_new_publish(carried, transport) -> None:
    carried.publish(source(0, elements=10), 0)
    carried.publish(source(1, elements=10), 1)  # replaces 0: nobody was there to take it
    late = WeightReceiver(transport, carried.endpoint, "late", policy(0, elements=10))
    assert late.wait_for_first(PATIENCE) == 1
    later = WeightReceiver(transport, carried.endpoint, "later", policy(0, elements=10))
    assert later.wait_for_first(PATIENCE) == 1
    tensors = policy(0, elements=10)
    assert later.swap_into(tensors) == 1
    assert raw(tensors) == raw(policy(1, elements=10))
    wait_for_all(carried, 1, 2)
    status = carried.status()
    assert status[m.WEIGHTS_VERSION] == 1
    assert status[m.WEIGHTS_MEMBERS] == 2
    assert (
        status[m.WEIGHTS_BYTES] == 48 + 80 + 16
    )  # 10 float32, 35 bfloat16, 1 int64, each padded to 16 bytes
    assert 0 < status[m.WEIGHTS_SECONDS] < PATIENCE
    later.close()
    late.close()


def test_an_actor_of_another_shape_is_told_so_and_named_to_the_learner(publisher: BroadcastPublisher) -> None:
    publisher.publish(source(0, elements=10), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "odd", policy(0, elements=12))
    shapes = r"'body' is float32 \[10\] on the learner but float32 \[12\] on odd"
    with pytest.raises(WeightSyncError, match=shapes):
        receiver.wait_for_first(PATIENCE)
    with pytest.raises(WeightSyncError, match=shapes):
        receiver.swap_into(policy(0, elements=12))
    with pytest.raises(WeightSyncError, match=rf"none has it within .*odd left: .*{shapes}"):
        publisher.wait_for_first(0, 0.1)
    receiver.close()


def test_a_first_version_that_does_not_arrive_names_what_is_waited_for_and_who_is_there(publisher) -> None:
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", policy(0, elements=10))
    with pytest.raises(WeightSyncError, match=r"actor-0 waited .* 0\.1 s.*to publish its first version"):
        receiver.wait_for_first(0.1)
    publisher.publish(source(0, elements=10), 0)
    receiver.wait_for_first(PATIENCE)
    publisher.wait_for_first(0, PATIENCE)
    with pytest.raises(WeightSyncError, match=r"none has it within 0\.1 s \(registered: actor-0; publisher"):
        publisher.wait_for_first(1, 0.1)
    receiver.close()


def test_an_actor_that_has_no_weights_yet_learns_at_once_that_the_learner_left(publisher) -> None:
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "late", policy(0, elements=10))
    ended: list[Exception] = []

    def wait() -> None:
        try:
            receiver.wait_for_first(10 * PATIENCE)
        except ChannelClosed as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until = time.monotonic() + PATIENCE
    while "late" not in publisher.versions_held() and time.monotonic() < until:
        time.sleep(0.01)
    publisher.close()
    waiting.join(PATIENCE)
    assert [str(error) for error in ended] == ["The learner ended the run before late had weights."]
    receiver.close()


def test_versions_must_grow_and_shapes_must_stay(publisher: BroadcastPublisher) -> None:
    publisher.publish(source(0, elements=10), 5)
    with pytest.raises(WeightSyncError, match="Version 5 was published after version 5"):
        publisher.publish(source(0, elements=10), 5)
    with pytest.raises(WeightSyncError, match=r"'body' is float32 \[11\] on the learner but float32 \[10\]"):
        publisher.publish(source(0, elements=11), 6)
    publisher.close()
    with pytest.raises(WeightSyncError, match="was closed"):
        publisher.publish(source(0, elements=10), 7)


def test_nothing_listens_on_the_network(folder: Path) -> None:
    before = listening()
    publisher = BroadcastPublisher("shared_memory", folder, deadline=1.0)
    publisher.publish(source(0, elements=10), 0)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", policy(0, elements=10))
    receiver.wait_for_first(PATIENCE)
    assert listening() <= before
    receiver.close()
    publisher.close()


def listening() -> set[str]:
    """Addresses at which this process listens."""
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        found |= {row[1] for row in rows if row[3] in ("0A", "07") and row[9] in mine}
    return found


def test_a_transport_that_needs_a_gpu_and_a_taken_socket_are_refused(folder, publisher) -> None:
    for name in ("nccl", "cuda_ipc"):
        with pytest.raises(ConfigError, match=rf"{name}.*between GPUs.*cpu"):
            BroadcastPublisher(name, folder)
    with pytest.raises(ConfigError, match="a process listens there already"):
        BroadcastPublisher("shared_memory", folder)
    publisher.publish(source(0, elements=10), 0)


def test_news_travels_at_once_and_an_idle_receiver_costs_next_to_nothing(carried, transport) -> None:
    """Ten versions in a row, each waited for at both ends, then a pause; looks alone would take a second."""
    carried.publish(source(0, elements=10), 0)
    receiver = WeightReceiver(transport, carried.endpoint, "actor-0", policy(0, elements=10))
    carried.wait_for_first(0, PATIENCE)
    took = []
    for version in range(1, 11):
        time.sleep(0.03)  # Both ends wait by now.
        began = time.monotonic()
        carried.publish(source(version, elements=10), version)
        carried.wait_for_first(version, PATIENCE)
        took.append(time.monotonic() - began)
    assert statistics.median(took) < publishing.IDLE_SECONDS / 4
    assert carried.status()[m.WEIGHTS_VERSION] == 10
    assert 0 < carried.status()[m.WEIGHTS_SECONDS] <= took[-1]
    clock = time.pthread_getcpuclockid(receiver._thread.ident or 0)
    spent = time.clock_gettime(clock)
    time.sleep(1.0)
    assert time.clock_gettime(clock) - spent < 0.05
    receiver.close()


# --- real actor processes ---


GPUS = torch.cuda.device_count()
ELSEWHERE = [f"cuda:{i}" for i in range(1, min(GPUS, 3))]
PLACES = {
    "shared memory": ("shared_memory", "cpu", ["cpu", "cpu"]),
    "broadcast": (GLOO, "cpu", ["cpu", "cpu"]),
    "one GPU": ("cuda_ipc", "cuda:0", ["cuda:0", "cuda:0"]),
    "a GPU each": ("nccl", "cuda:0", ELSEWHERE),
    "the learner's GPU and others": ("cuda_ipc", "cuda:0", ["cuda:0", *ELSEWHERE]),
}
"""Transport, device of the learner, devices of the actors."""


class Fleet:
    """A learner and its actors' processes, all of which have version 0."""

    def __init__(self, folder: Path, place: str, actors: list[Actor]) -> None:
        self.transport, self.device, self.devices = PLACES[place]
        self.deadline = 5.0 if self.device.startswith("cuda") else 1.0
        self.publisher = BroadcastPublisher(self.transport, folder, self.device, self.deadline)
        self.actors, self.version = actors, -1
        for number in range(len(actors)):
            self.join(number)
        self.publish()
        wait_for_all(self.publisher, 0, len(actors), 2 * PATIENCE)

    def join(self, number: int) -> None:
        """Let an actor join, in a new process if its last one ended."""
        if not self.actors[number].process.is_alive():
            self.actors[number].end()
            self.actors[number] = Actor()
        endpoint, name = self.publisher.endpoint, f"actor-{number}"
        self.actors[number].join(endpoint, name, self.transport, self.devices[number], self.deadline)

    def publish(self) -> None:
        """Publish one more version, for which the learner waits for nobody."""
        self.version += 1
        assert timed_publish(self.publisher, self.version, self.device) < 0.5

    @property
    def members(self) -> float:
        return self.publisher.status()[m.WEIGHTS_MEMBERS]

    def ends(self) -> None:
        """Publish once more; all actors get it and leave."""
        wait_for_all(self.publisher, self.version, len(self.actors))
        self.publish()
        for each in self.actors:
            assert each.has(self.version)
            assert each.ask("leave") == "left"
        self.publisher.close()


@pytest.fixture(
    scope="module", params=[pytest.param(x, marks=pytest.mark.gpu if "GPU" in x else []) for x in PLACES]
)
def place(request: pytest.FixtureRequest) -> str:
    if request.param in list(PLACES)[3:] and GPUS < 2:
        pytest.skip(f"{request.param} needs 2 GPUs, found {GPUS}")
    return request.param


@pytest.fixture(scope="module")
def actors(place: str):
    actors = [Actor() for _ in PLACES[place][2]]
    yield actors
    for each in actors:
        each.end()


@pytest.fixture
def fleet(folder: Path, place: str, actors: list[Actor]):
    fleet = Fleet(folder, place, actors)
    yield fleet
    fleet.publisher.close()


def test_a_killed_actor_stops_nobody_and_its_successor_joins(fleet: Fleet) -> None:
    *survivors, _ = fleet.actors
    for version in range(1, 60):
        fleet.publish()
        if version == 30:
            fleet.actors[-1].signal(signal.SIGKILL)
            fleet.actors[-1].process.join(PATIENCE)
    for survivor in survivors:
        assert survivor.has(59)
    if survivors:
        fleet.publisher.wait_for_first(59, PATIENCE)
        assert fleet.members == len(survivors)
    fleet.join(len(survivors))
    assert fleet.actors[-1].has(59)  # No new publish was needed.
    fleet.ends()


def test_a_stopped_actor_is_left_behind_and_comes_back(fleet: Fleet) -> None:
    *survivors, stopped = fleet.actors
    stopped.signal(signal.SIGSTOP)
    try:
        until = time.monotonic() + 4 * fleet.deadline
        while fleet.members == len(fleet.actors) and time.monotonic() < until:
            fleet.publish()
        assert fleet.members == max(1, len(survivors))
        for survivor in survivors:
            assert survivor.has(fleet.version)
    finally:
        stopped.signal(signal.SIGCONT)
    assert stopped.has(fleet.version)
    fleet.ends()


def test_an_actor_keeps_its_weights_after_the_learner_closed(publisher: BroadcastPublisher) -> None:
    tensors = policy(1, elements=10)
    receiver = WeightReceiver("shared_memory", publisher.endpoint, "actor-0", tensors, deadline=0.1)
    publisher.publish(source(0, elements=10), 0)
    receiver.wait_for_first(PATIENCE)
    publisher.close()
    receiver._thread.join(PATIENCE)
    assert not receiver._thread.is_alive()  # it read the goodbye
    assert receiver.swap_into(tensors) == 0
    assert raw(tensors) == raw(policy(0, elements=10))
