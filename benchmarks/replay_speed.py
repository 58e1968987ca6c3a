"""Writing and reading of the replay at 64 actors: how far it is from what GPUs produce.

    python benchmarks/replay_speed.py

    write        a group's durable file (checksums, HDF5 in memory, fsync, rename)
    raw          the same bytes into a file without a format, as durable
    read         all of a group from the page cache, checksums verified
    to learn     the same without the video, as the learner gets it
    ingest       64 actors (one process plays them) push a group each, at most 500 MB in all, to a replay
                 process until every receipt came
    hand over    the learner fetches all these groups

All in MB/s, medians of the rounds. Two H100 produce 3 MB/s of episodes, 25 MB/s if every drawn frame is kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.config.run import TrainConfig, overlay
from asyncrl.episode_layout import episode_arrays
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.messaging.wire import as_bytes
from asyncrl.records import Episode
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.group_file import read_group
from asyncrl.replay.server import serve_replay
from asyncrl.replay.store import EpisodeStore
from asyncrl.storage.atomic import flush

ACTORS, GROUP_SIZE, MOST_BYTES = 64, 8, 500_000_000
SIZES = {"64 x 64": (6, 64, False), "224 x 224": (32, 224, False), "224 x 224 with video": (10, 224, True)}
"""Decisions, pixels per side, whether all frames are kept."""


def write_raw(path: Path, parts: list[memoryview]) -> None:
    temporary = path.with_suffix(".tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    parts, offset = [part for part in parts if len(part)], 0
    while parts:
        written = os.pwritev(handle, parts, offset)
        offset += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]
    os.fsync(handle)
    os.close(handle)
    temporary.rename(path)
    flush(path.parent)


def make_group(number: int, *, size: int, decisions: int, image: int, video: bool = False) -> list[Episode]:
    return [
        make_episode(number, member, size=size, decisions=decisions, image=image, version=number, video=video)
        for member in range(size)
    ]


def make_episode(
    number: int,
    member: int,
    *,
    size: int,
    decisions: int,
    image: int,
    version: int = 0,
    success: bool = False,
    video: bool = False,
) -> Episode:
    """Make a sound episode.

    Args:
        number: Of its group.
        member: Its place in the group.
        size: Episodes of the group.
        decisions: Its length.
        image: Its pictures have `image` x `image` pixels.
        version: Policy version of all decisions.
        success: Whether it ended with one, in the last decision.
        video: Whether all frames that were drawn are kept too.
    """
    random = np.random.default_rng([number, member])
    shape, rewards = (decisions, 8, 7), np.zeros((decisions, 8), np.float32)
    rewards[-1, 3] = success
    return Episode(
        episode_id=random.bytes(16).hex(),
        group_id=f"{number:08d}",
        member=member,
        group_size=size,
        actor="actor-0",
        task="put the red cube into the bowl",
        start_state="state-0",
        world_version=0,
        seed=number,
        temperature=1.0,
        top_k=0,
        end_reason="success" if success else "truncated",
        frames=random.integers(0, 256, (decisions, image, image, 3), np.uint8),
        sample={"tokens": random.integers(0, 256, shape, np.int32)},
        logprobs=-random.random(shape, np.float32),
        values=np.zeros(decisions, np.float32),
        actions=random.random(shape, np.float32),
        rewards=rewards,
        success_scores=random.random((decisions, 8), np.float32),
        policy_versions=np.full(decisions, version, np.int64),
        noise_seeds=np.arange(decisions, dtype=np.int64),
        final_frame=random.integers(0, 256, (image, image, 3), np.uint8),
        video=random.integers(0, 256, (8 * decisions * video, image, image, 3), np.uint8),
    )


def files(group: list[Episode], groups: int, folder: Path) -> dict[str, list[float]]:
    seconds = defaultdict[str, list[float]](list)

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - begin)

    arrays = [as_bytes(array) for episode in group for array in episode_arrays(episode).values()]
    store = EpisodeStore(folder / "replay", group_size=GROUP_SIZE, max_bytes=1 << 60)
    for number in range(groups):
        timed("raw", lambda: write_raw(folder / f"raw-{number}", list(arrays)))  # noqa: B023
        timed("write", lambda: store.enter(store.write(number, group)))  # noqa: B023
    for group_file in store.group_files.values():
        timed("read", lambda: read_group(group_file.path))  # noqa: B023
        timed("to learn", lambda: read_group(group_file.path, without=("video",)))  # noqa: B023
    store.close()
    return seconds


def serve(folder: Path, endpoint: str) -> None:
    settings = {
        "algorithm": {"group_size": GROUP_SIZE, "groups_per_update": ACTORS},
        "replay": {"max_lag": 100_000, "max_gigabytes": 1000.0},
    }
    serve_replay(open_run_replay(folder, overlay(TrainConfig(), settings, "speed")), endpoint)


def service(group: list[Episode], groups: int, folder: Path) -> dict[str, float]:
    sockets = private_folder()
    endpoint = ipc_endpoint(sockets)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, endpoint))
    process.start()
    learner = ZmqLearnerPort(endpoint)
    learner.status()
    actors = [ZmqActorPort(endpoint, f"actor-{number}") for number in range(ACTORS)]
    grants = [actor.acquire_groups(1, 60.0)[0] for actor in actors[:groups]]
    begin = time.perf_counter()
    for number, (actor, grant) in enumerate(zip(actors, grants, strict=False)):
        for member, episode in enumerate(group):
            own = {"episode_id": f"{number:024x}{member:08x}", "group_id": grant.group_id}
            actor.push(replace(episode, **own, actor=f"actor-{number}"))
    while any(actor.unacknowledged for actor in actors):
        for actor in actors:
            actor.serve()
    ingested = time.perf_counter()
    batch = learner.choose(groups=groups, version=0, timeout=300.0)
    learner.fetch(batch, timeout=300.0)
    done = time.perf_counter()
    for actor in actors:
        actor.close(5.0)
    learner.stop()
    learner.close()
    process.join(30)
    shutil.rmtree(sockets)
    return {"ingest": ingested - begin, "hand over": done - ingested}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    arguments = parser.parse_args()
    for size in arguments.sizes:
        decisions, image, video = SIZES[size]
        group = make_group(0, size=GROUP_SIZE, decisions=decisions, image=image, video=video)
        nbytes = sum(array.nbytes for episode in group for array in episode_arrays(episode).values())
        speeds = defaultdict[str, list[float]](list)
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as name:
                for way, seconds in files(group, arguments.groups, Path(name)).items():
                    speeds[way].append(nbytes / statistics.median(seconds) / 1e6)
            with tempfile.TemporaryDirectory() as name:
                groups = min(ACTORS, MOST_BYTES // nbytes)
                for way, took in service(group, groups, Path(name) / "replay").items():
                    speeds[way].append(groups * nbytes / took / 1e6)
        shown = ", ".join(f"{way} {statistics.median(found):.0f}" for way, found in speeds.items())
        print(f"{size}, {nbytes / 1e6:.1f} MB per group: {shown} MB/s", flush=True)


if __name__ == "__main__":
    main()
