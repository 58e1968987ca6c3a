"""Durable ingest from end to end: the replay against the same service that writes plain files.

    python benchmarks/replay_ingest.py

Two actor processes push groups as fast as they are granted; the clock stops when every episode has its
receipt. `raw` is the same service, wire, decoding and checks, but each complete group becomes one plain
file of the arrays' bytes, as durable as the replay's: synced, renamed, its folder synced. Rounds are
interleaved; MB/s and ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from replay_episodes import make_group, write_raw

from asyncrl.config.loading import overlay
from asyncrl.config.run import TrainConfig
from asyncrl.episode_layout import episode_arrays
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging.curve_keys import create_keys, load_client_keys, load_server_keys
from asyncrl.messaging.episode_codec import as_bytes
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.records import Episode
from asyncrl.replay import store
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.files.format import GroupFileParts
from asyncrl.replay.files.writer import write_group
from asyncrl.replay.server import serve_replay

GROUP_SIZE, ACTORS = 8, 2
SIZES = {"tabletop": (6, 64, False, 60), "large": (32, 224, False, 5), "video": (10, 224, True, 3)}
"""Decisions, pixels per side, whether all frames are kept, groups per actor."""
SETTINGS = {
    "algorithm": {"group_size": GROUP_SIZE, "groups_per_update": 1},
    "replay": {"max_lag": 100_000, "max_gigabytes": 1000.0},
}


class PlainFiles:
    """In the place of `write_group`: plain files of the arrays' bytes, described as the first group."""

    def __init__(self) -> None:
        self._said: GroupFileParts | None = None

    def __call__(self, path: Path, number: int, members: Sequence[Episode]) -> GroupFileParts:
        """Write the file."""
        if self._said is None:
            self._said = write_group(path, number, members)
            path.unlink()
        arrays = [episode_arrays(member) for member in members]
        write_raw(path, [as_bytes(member[name]) for name in arrays[0] for member in arrays])
        attributes = self._said.attributes | {"group_number": number}
        return replace(self._said, attributes=attributes, found=path.stat())


def serve(pipeline: str, folder: Path, endpoint: str, keys: Path | None) -> None:
    """Be the server process."""
    if pipeline == "raw":
        store.write_group = PlainFiles()  # pyright: ignore[reportPrivateImportUsage]
    replay = open_run_replay(folder, overlay(TrainConfig(), SETTINGS, "ingest"))
    serve_replay(replay, endpoint, security=load_server_keys(keys) if keys else None)


def act(number: int, size: str, endpoint: str, keys: Path | None, start: Barrier, done: Any) -> None:
    """Be an actor process; report when it began and ended (monotonic seconds), and the bytes."""
    decisions, image, video, groups = SIZES[size]
    name = f"actor-{number}"
    made = make_group(number, size=GROUP_SIZE, decisions=decisions, image=image, video=video)
    port = ZmqActorPort(endpoint, name, security=load_client_keys(keys, name) if keys else None)
    grants = port.acquire_groups(1, 60.0)
    start.wait(60.0)
    began = time.monotonic()
    for turn in range(groups):
        while not grants:
            grants = port.acquire_groups(1, 1.0)
        grant = grants.pop()
        for member, episode in enumerate(made):
            new_id = f"{number:08x}{turn:016x}{member:08x}"
            port.push(replace(episode, episode_id=new_id, group_id=grant.group_id, actor=name))
    port.close(300.0)
    done.put(
        (began, time.monotonic(), groups * sum(a.nbytes for e in made for a in episode_arrays(e).values()))
    )


def measure(pipeline: str, size: str, transport: str, folder: Path) -> float:
    """Run one pipeline once; return MB/s."""
    spawn, sockets = multiprocessing.get_context("spawn"), private_folder()
    endpoint = ipc_endpoint(sockets) if transport == "ipc" else "tcp://127.0.0.1:5711"
    keys = sockets / "keys" if transport == "tcp+CURVE" else None
    if keys:
        create_keys(keys, ["learner", *(f"actor-{n}" for n in range(ACTORS))])
    start, done = spawn.Barrier(ACTORS), spawn.Queue()
    server = spawn.Process(target=serve, args=(pipeline, folder, endpoint, keys))
    actors = [spawn.Process(target=act, args=(n, size, endpoint, keys, start, done)) for n in range(ACTORS)]
    for process in (server, *actors):
        process.start()
    learner = ZmqLearnerPort(endpoint, security=load_client_keys(keys, "learner") if keys else None)
    learner.report_version(0)
    while not learner._link.server_id:
        learner._link.exchange(0.1)
    reports = [done.get(timeout=400) for _ in actors]
    learner.stop()
    learner.close()
    for process in (server, *actors):
        process.join(30)
        assert process.exitcode == 0, process
    shutil.rmtree(sockets)
    begin, end = min(x[0] for x in reports), max(x[1] for x in reports)
    return sum(x[2] for x in reports) / (end - begin) / 1e6


def main() -> None:
    """Measure the pipelines in turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--transports", nargs="+", default=["ipc", "tcp", "tcp+CURVE"])
    arguments = parser.parse_args()
    print(
        "| size | transport | raw MB/s | replay MB/s | replay / raw | per round |\n|---|---|---|---|---|---|"
    )
    for size in arguments.sizes:
        for transport in arguments.transports:
            speeds = defaultdict[str, list[float]](list)
            for turn in range(arguments.rounds):
                for pipeline in ("raw", "replay") if turn % 2 else ("replay", "raw"):
                    with tempfile.TemporaryDirectory() as name:
                        speed = measure(pipeline, size, transport, Path(name) / "files")
                    speeds[pipeline].append(speed)
            raw, ours = (statistics.median(speeds[x]) for x in ("raw", "replay"))
            ratios = [b / a for a, b in zip(speeds["raw"], speeds["replay"], strict=True)]
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            line = f"| {raw:.0f} | {ours:.0f} | {statistics.median(ratios):.2f}x | {each} |"
            print(f"| {size} | {transport} {line}", flush=True)


if __name__ == "__main__":
    main()
