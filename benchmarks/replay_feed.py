"""What it takes to feed learner ranks from 64 actors: ingest, choice and hand-over of whole batches.

    python benchmarks/replay_feed.py --groups 128 --ranks 1 2 4

A replay, a process that plays all actors, and one process per learner rank (gloo, CPU), over private sockets.
Episodes have the recipes' size: 32 decisions of 224 x 224 pixels, groups of 8. Every batch is complete when
it is asked for, as where the actors are ahead, and `--update-seconds` pass before. In turns the actors rest
while the ranks fetch, and push the groups of a batch to come. Seconds are medians over the rounds:

    ingest     until the actors have the receipts of all groups of a batch, with nothing beside it
    choose     until rank 0 knows which groups the batch has
    hand-over  from there until every rank has its part, decoded
    silence    longest time in which the replay did not answer a peer, also while the actors push
    processor  seconds that the replay and the ranks computed for choice and hand-over, nothing beside it
    copy       processor seconds to copy the batch's bytes in one process: into memory that is used again, and
               into fresh memory, as whatever arrives in another process has to be; behind it how many times
               as much `processor` is

`share` is choose and hand-over as part of an update, which takes `--decision-seconds` for each decision of a
rank's part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
from replay_episodes import make_group

from asyncrl.config.loading import overlay
from asyncrl.config.run import TrainConfig
from asyncrl.episode_layout import episode_arrays
from asyncrl.errors import ReplayError
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay.interface import LearnerPort

SPAWN = multiprocessing.get_context("spawn")
ACTORS, GROUP_SIZE, RECORDED = 64, 8, 3
"""`RECORDED` groups are drawn; every group that is pushed has the pictures of one of them."""
PROBE_EVERY = 0.02
"""Seconds between two questions of the peer that measures how long the replay says nothing."""
DEADLINE = 600.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured."""

    groups: int
    ranks: int
    decisions: int
    image: int
    rounds: int
    read_ahead: float
    """Gigabytes."""
    update_seconds: float

    def config(self) -> TrainConfig:
        """Settings of the replay: two batches may be ahead."""
        settings = {
            "algorithm": {"group_size": GROUP_SIZE, "groups_per_update": self.groups},
            "replay": {
                "max_lag": 1,
                "max_gigabytes": 1e-2,
                "keep_video_every": 0,
                "read_ahead_gigabytes": self.read_ahead,
            },
        }
        return overlay(TrainConfig(), settings, "the benchmark's settings")


def serve(setup: Setup, folder: str, endpoint: str) -> None:
    """Be the replay."""
    from asyncrl.launch.roles import open_run_replay
    from asyncrl.replay.server import serve_replay

    serve_replay(open_run_replay(Path(folder), setup.config()), endpoint)


def act(setup: Setup, endpoint: str, pushed: Queue[Any]) -> None:
    """Be all actors: push what is granted; of each batch or two say the begin, the end and how many groups.

    `time.perf_counter` is one clock for all processes of a host.
    """
    from asyncrl.replay.client import ZmqActorPort
    from asyncrl.replay.interface import RunStopped

    recorded = [
        make_group(n, size=GROUP_SIZE, decisions=setup.decisions, image=setup.image) for n in range(RECORDED)
    ]
    ports = [ZmqActorPort(endpoint, f"actor-{n}") for n in range(ACTORS)]
    began, taken = 0.0, 0
    try:
        while True:
            for name, port in enumerate(ports):
                for grant in port.acquire_groups(1, 0.0):
                    began = began or time.perf_counter()
                    taken += 1
                    for episode in recorded[grant.number % RECORDED]:
                        port.push(relabelled(episode, grant.number, f"actor-{name}", grant.min_version))
            if taken >= setup.groups and not any(port.unacknowledged for port in ports):
                pushed.put((began, time.perf_counter(), taken))
                began, taken = 0.0, 0
            time.sleep(0.001)
    except RunStopped:
        for port in ports:
            port.close(1.0)


def relabelled(episode: Episode, number: int, actor: str, version: int) -> Episode:
    """Return a recorded episode as one of another group; its pictures are not copied."""
    return replace(
        episode,
        episode_id=f"{number:030x}{episode.member:02x}",
        group_id=f"{number:08d}",
        actor=actor,
        policy_versions=np.full_like(episode.policy_versions, version),
    )


class Probe:
    """A peer that asks the replay all the time whether it is there."""

    def __init__(self, endpoint: str) -> None:
        """Begin to ask."""
        self._endpoint, self._over = endpoint, threading.Event()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        import zmq

        from asyncrl.messaging.wire import encode

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(self._endpoint)
        about = {"role": "actor", "name": "probe", "session": "probe", "version": 0}
        socket.send_multipart(encode("hello", **about, secret="", attempt=0))
        socket.recv_multipart()
        while not self._over.wait(PROBE_EVERY):
            asked = time.perf_counter()
            socket.send_multipart(encode("ping"))
            socket.recv_multipart()
            self.longest = max(self.longest, time.perf_counter() - asked)
        context.destroy(linger=0)

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()


def processor_seconds(pid: int) -> float:
    """Return what a process has computed since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def learn(setup: Setup, rank: int, store: str, endpoint: str, found: Queue[Any], others: list[int]) -> None:
    """Be a learner rank; rank 0 leads, and says how long each step took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=setup.ranks)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(setup.ranks)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank:
        follow(endpoint)
    else:
        lead(setup, endpoint, found, [*others, *(int(pid) for pid in pids)])
    dist.destroy_process_group()


def follow(endpoint: str) -> None:
    """Fetch this rank's part of every batch."""
    import torch.distributed as dist

    from asyncrl.learner.distributed_ranks import DistributedRanks
    from asyncrl.learner.parts import fetch_part
    from asyncrl.replay.client import ZmqRankPort

    ranks = DistributedRanks(DEADLINE)
    port = ZmqRankPort(endpoint, f"learner-{dist.get_rank()}")
    while (mine := ranks.deal(None)) is not None:
        fetch_part(port, ranks, mine, DEADLINE, lambda: None)
    port.close()


def ready_groups(port: LearnerPort) -> float:
    """Return how many complete groups the replay has; 0 while it does not answer, as before it listens."""
    with suppress(ReplayError):
        return port.status()[m.GROUPS_READY]
    return 0.0


def lead(setup: Setup, endpoint: str, found: Queue[Any], processes: list[int]) -> None:
    """Take one batch after another; every second one while the actors push. `processes`: see `processor`."""
    from asyncrl.learner.distributed_ranks import DistributedRanks
    from asyncrl.learner.parts import fetch_part
    from asyncrl.learner.ranks import SingleRank
    from asyncrl.replay.client import ZmqLearnerPort

    ranks = DistributedRanks(DEADLINE) if setup.ranks > 1 else SingleRank()
    port = ZmqLearnerPort(endpoint)
    for version in range(2 * setup.rounds):
        while ready_groups(port) < 2 * setup.groups:
            time.sleep(0.05)
        time.sleep(setup.update_seconds)
        beside = version % 2 == 1
        probe = Probe(endpoint)
        computed = -sum(map(processor_seconds, processes))
        began = time.perf_counter()
        batch = port.choose(groups=setup.groups, version=version, timeout=DEADLINE)
        chosen = time.perf_counter()
        if beside:
            port.report_version(version + 1)  # The actors get credit for the next batch.
        mine = ranks.deal(batch)
        assert mine is not None
        part = fetch_part(port, ranks, mine, DEADLINE, lambda: None)
        ended = time.perf_counter()
        assert part.groups is not None, part.failure
        computed += sum(map(processor_seconds, processes))
        probe.close()
        found.put((beside, began, chosen, ended, probe.longest, computed))
        port.report_version(version + 1)
    ranks.deal(None)
    port.stop()
    port.close()


@contextmanager
def running(*processes: Any) -> Iterator[None]:
    """Let processes run; end those that are left."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def next_of(found: Queue[Any], processes: list[Any]) -> Any:
    """Return what comes next; raise RuntimeError when one of the processes failed."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        try:
            return found.get(timeout=1.0)
        except Empty:
            if any(process.exitcode for process in processes):
                break
    raise RuntimeError("a learner rank failed or took too long; see above")


def measure(setup: Setup, folder: Path) -> dict[str, float]:
    """Return the medians of all rounds, in seconds."""
    sockets = private_folder()
    endpoint, store = ipc_endpoint(sockets), str(folder / "store")
    pushed, found = SPAWN.Queue(), SPAWN.Queue()
    actors = SPAWN.Process(target=act, args=(setup, endpoint, pushed))
    replay = SPAWN.Process(target=serve, args=(setup, str(folder / "replay"), endpoint))
    with running(replay, actors):
        about = (store, endpoint, found, [replay.pid])
        ranks = [SPAWN.Process(target=learn, args=(setup, rank, *about)) for rank in range(setup.ranks)]
        with running(*ranks):
            taken = [next_of(found, ranks) for _ in range(2 * setup.rounds)]
    seconds = defaultdict[str, list[float]](list)
    for beside, began, chosen, ended, silence, computed in taken:
        where = " beside" if beside else ""
        seconds["choose" + where].append(chosen - began)
        seconds["hand-over" + where].append(ended - chosen)
        seconds["silence" + where].append(silence)
        seconds["processor" + where].append(computed)
    while not pushed.empty():
        began, ended, groups = pushed.get()
        alone = all(ended < start or end < began for _, start, _, end, *_ in taken)
        seconds["ingest" + ("" if alone else " beside")].append((ended - began) / groups * setup.groups)
    sockets.joinpath("replay").unlink(missing_ok=True)
    sockets.rmdir()
    return {name: statistics.median(values) for name, values in seconds.items()}


def copies(setup: Setup) -> tuple[float, float, float]:
    """Return the bytes of a batch, and processor seconds to copy them into used and into fresh memory."""
    group = make_group(0, size=GROUP_SIZE, decisions=setup.decisions, image=setup.image)
    arrays = [array for episode in group for array in episode_arrays(episode).values() if array.size]
    used = [array.copy() for array in arrays]
    began = time.process_time()
    for _ in range(setup.groups):
        for array, there in zip(arrays, used, strict=True):
            there[...] = array
    warm = time.process_time() - began
    kept = list[Any]()
    began = time.process_time()
    for _ in range(setup.groups):
        kept.append([array.copy() for array in arrays])
    return setup.groups * sum(a.nbytes for a in arrays), warm, time.process_time() - began


def print_hand_over(setup: Setup, numbers_of_ranks: list[int], decision_seconds: float) -> None:
    """Print a row for each number of ranks; see the module's text."""
    columns = (
        "ingest",
        "choose",
        "hand-over",
        "beside ingest",
        "silence",
        "processor",
        "copy",
        "fresh copy",
        "share",
    )
    print(f"| ranks | GB | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}", flush=True)
    for ranks in numbers_of_ranks:
        setup = replace(setup, ranks=ranks)
        nbytes, warm, fresh = copies(setup)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(setup, Path(folder))
        update = decision_seconds * setup.groups * GROUP_SIZE * setup.decisions / ranks
        spent = found["choose"] + found["hand-over"]
        silence = max(found["silence"], found["silence beside"])
        cells = [
            *(f"{found[name]:.3g} s" for name in ("ingest", "choose", "hand-over", "hand-over beside")),
            f"{silence:.3g} s",
            f"{found['processor']:.3g} s",
            *(f"{each:.3g} s, {found['processor'] / each:.1f}x" for each in (warm, fresh)),
            f"{100 * spent / update:.2f} %",
        ]
        print(f"| {ranks} | {nbytes / 1e9:.2f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--decisions", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-ahead", type=float, default=8.0, help="gigabytes")
    parser.add_argument("--update-seconds", type=float, default=2.0, help="pass before a batch is asked for")
    parser.add_argument("--decision-seconds", type=float, default=0.040, help="of an update, for a decision")
    arguments = parser.parse_args()
    given = {field.name: getattr(arguments, field.name) for field in fields(Setup)}
    setup = Setup(**given | {"ranks": 1})
    print_hand_over(setup, arguments.ranks, arguments.decision_seconds)


if __name__ == "__main__":
    main()
