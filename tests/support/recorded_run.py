"""A replay folder with one group of every outcome, for the tests of `asyncrl replay`."""

import dataclasses
from pathlib import Path

import numpy as np

from asyncrl.records import Episode
from asyncrl.replay.store import EpisodeStore
from support.episodes import make_episode

IMAGE = 16
"""Height and width in pixels."""
IDS = [["0123" + "0" * 28, "0124" + "1" * 28], *([32 * one, 32 * other] for one, other in ("ab", "cd", "ef"))]
VERSIONS = [(0, 1), (1, 2), (2, 2), (0, 0)]
WON = {(0, 0), (2, 1)}
TASKS = 2 * ["put the red cube into the bowl"] + 2 * ["open the drawer"]


def episode_of(number: int, member: int) -> Episode:
    """The episode that `make_run` stores; both of group 0 have a video that fits their observations."""
    made = make_episode(
        number,
        member,
        versions=VERSIONS[number],
        success=(number, member) in WON,
        video=number == 0,
        episode_id=IDS[number][member],
        image=IMAGE,
    )
    if number == 0:
        made.video[7], made.video[15] = made.frames[1], made.final_frame
    scores = np.linspace(0, 0.75, 16, dtype=np.float32).reshape(2, 8)
    return dataclasses.replace(made, task=TASKS[number], success_scores=scores)


def open_store(run: Path) -> EpisodeStore:
    """Open the run's replay as its writer does."""
    return EpisodeStore(run / "replay", group_size=2, max_bytes=10**9)


def make_run(run: Path) -> Path:
    """Four groups: 0 was used at version 2, 1 was filtered, 2 waits, 3 was dropped as too old."""
    store = open_store(run)
    for number in range(4):
        store.ledger.append(grant=number, actor="actor-0", turn=number, min_version=0)
        store.enter(store.write(number, [episode_of(number, member) for member in range(2)]))
    store.ledger.append(used=[0], request="", version=2)
    store.ledger.append(filtered=1, newest_version=2, successes=0)
    store.ledger.append(
        dropped=3, status="dropped_lag", episodes=2, stored=True, task="put the blue cube away"
    )
    store.close()
    return run


def remove_after_listing(run: Path) -> Path:
    """Put a name into the folder that leads nowhere: what a reader meets when a live run deletes a group."""
    gone = run / "replay" / "group-00000009.h5"
    gone.symlink_to(run / "nowhere.h5")
    return gone
