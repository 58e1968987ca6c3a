"""Whether the replay's memory stays flat when actors are far faster than the learner.

    python benchmarks/replay_pressure.py --seconds 600

Two actor processes offer episodes as fast as they are let; the learner takes a batch only every so often. The
replay process is watched: its anonymous memory, and what it holds. The bound: actors are granted at most
``(max_lag + 1) * groups_per_update`` groups that are not yet used; those that are complete lie on the disk,
so no more than that many incomplete groups are in memory, one batch on its way to the learner, the shards of
the files that exist, and the books of the groups that a resume may have to undo.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import tyro
from replay_episodes import make_episode

from asyncrl.config.loading import overlay
from asyncrl.config.run import TrainConfig
from asyncrl.errors import SampleTimeout
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay.interface import GroupGrant


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Press on a replay."""

    seconds: float = 600.0
    actors: int = 2
    group_size: int = 8
    groups_per_update: int = 4
    max_lag: int = 2
    decisions: int = 6
    image: int = 64
    update_seconds: float = 2.0
    """The learner takes a batch this often."""
    max_gigabytes: float = 0.2
    """Of used groups that stay on the disk."""


def episode(settings: Settings, grant: GroupGrant, member: int) -> Episode:
    """An episode of the right size, by the oldest policy that the grant allows."""
    return make_episode(
        grant.number,
        member,
        size=settings.group_size,
        decisions=settings.decisions,
        image=settings.image,
        version=grant.min_version,
    )


def act(
    settings: Settings, endpoint: str, index: int, made: multiprocessing.Queue[tuple[int, float]]
) -> None:
    """An actor without models: offers groups until the learner ends the run."""
    from asyncrl.replay.client import ZmqActorPort
    from asyncrl.replay.interface import RunStopped

    port, offered, busy = ZmqActorPort(endpoint, f"actor-{index}"), 0, 0.0
    try:
        while True:
            for grant in port.acquire_groups(1, 0.2):
                began = time.monotonic()
                for member in range(settings.group_size):
                    port.push(episode(settings, grant, member))
                offered += settings.group_size
                busy += time.monotonic() - began
    except RunStopped:
        made.put((offered, busy))


def keep(settings: Settings, endpoint: str, folder: str) -> None:
    """The replay process."""
    from asyncrl.launch.roles import open_run_replay
    from asyncrl.replay.server import serve_replay

    table = {
        "algorithm": {"group_size": settings.group_size, "groups_per_update": settings.groups_per_update},
        "replay": {"max_lag": settings.max_lag, "max_gigabytes": settings.max_gigabytes},
    }
    serve_replay(open_run_replay(Path(folder), overlay(TrainConfig(), table, "pressure")), endpoint)


def resident(process: BaseProcess) -> float:
    """Anonymous resident memory in MB: without files that are merely mapped."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def main() -> None:
    """Run everything, print memory by time."""
    settings = tyro.cli(Settings, description=__doc__)
    context, folder = multiprocessing.get_context("spawn"), private_folder()
    endpoint, made = ipc_endpoint(folder), context.Queue()
    print(f"{' '.join(sys.argv)}   {dataclasses.asdict(settings)}\n")
    with tempfile.TemporaryDirectory() as store:
        replay = context.Process(target=keep, args=(settings, endpoint, store), daemon=True)
        replay.start()
        actors = [
            context.Process(target=act, args=(settings, endpoint, index, made), daemon=True)
            for index in range(settings.actors)
        ]
        for actor in actors:
            actor.start()
        learn(settings, endpoint, replay)
        counts = [made.get(timeout=30) for _ in actors]
        pace = sum(number / max(busy, 1e-9) for number, busy in counts)
        used = settings.groups_per_update * settings.group_size / settings.update_seconds
        print(f"{sum(n for n, _ in counts)} episodes; actors that never waited would offer {pace:.0f} per")
        print(f"second, {pace / used:.1f} times what the learner can use")
        for process in (*actors, replay):
            process.join(10)
            process.kill()
    folder.joinpath("replay").unlink(missing_ok=True)
    folder.rmdir()


def learn(settings: Settings, endpoint: str, replay: BaseProcess) -> None:
    """Take a batch every so often; print a row per tenth of the time."""
    from asyncrl.replay.client import ZmqLearnerPort

    port, version = ZmqLearnerPort(endpoint), 0
    began, rows, due = time.monotonic(), list[tuple[float, float]](), 0.0
    print("| s | replay MB | versions | groups ready | in flight | disk MB |\n" + "|---" * 6 + "|")
    while (now := time.monotonic() - began) < settings.seconds:
        try:
            port.sample(groups=settings.groups_per_update, version=version, timeout=5.0)
        except SampleTimeout:
            continue
        version += 1
        port.report_version(version)
        rows.append((now, resident(replay)))
        if now >= due:
            due += settings.seconds / 10
            read = port.status()
            print(
                f"| {now:.0f} | {rows[-1][1]:.1f} | {version} | {read[m.GROUPS_READY]:.0f} | "
                f"{read[m.GROUPS_IN_FLIGHT]:.0f} | {read[m.REPLAY_BYTES] / 1e6:.1f} |",
                flush=True,
            )
        time.sleep(settings.update_seconds)
    port.stop()
    port.close()
    third = len(rows) // 3
    early, late = (max(mb for _, mb in part) for part in (rows[third : 2 * third], rows[2 * third :]))
    print(
        f"\nlargest in the second third {early:.1f} MB, in the last {late:.1f} MB, ratio {late / early:.2f}"
    )


if __name__ == "__main__":
    main()
