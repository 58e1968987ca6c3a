"""How long opening a replay folder takes, with and without its index.

    python benchmarks/replay_open.py --episodes 100000

The groups are tiny, for opening never reads arrays; their folder is not synced, which it does not see.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from replay_episodes import make_group

from asyncrl.replay.files.writer import write_group
from asyncrl.replay.store import EpisodeStore

GROUP_SIZE = 8


def open_seconds(folder: Path, groups: int) -> float:
    """Open and close the folder."""
    began = time.perf_counter()
    store = EpisodeStore(folder, group_size=GROUP_SIZE, max_bytes=1 << 60)
    seconds = time.perf_counter() - began
    assert len(store.group_files) == groups
    assert (
        sum(len(group_file.episode_ids) for group_file in store.group_files.values()) == groups * GROUP_SIZE
    )
    store.close()
    return seconds


def main() -> None:
    """Write the groups, open the folder in turns, print seconds and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    groups = arguments.episodes // GROUP_SIZE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        EpisodeStore(folder, group_size=GROUP_SIZE, max_bytes=1 << 60).close()
        for number in range(groups):
            episodes = make_group(number, size=GROUP_SIZE, decisions=1, image=1)
            write_group(folder / f"group-{number:08d}.h5", number, episodes)
        without, with_index = list[float](), list[float]()
        for _ in range(arguments.rounds):
            (folder / "index.log").unlink(missing_ok=True)
            without.append(open_seconds(folder, groups))
            with_index.append(open_seconds(folder, groups))
        slow, quick = statistics.median(without), statistics.median(with_index)
        print(f"{groups} groups, {groups * GROUP_SIZE} episodes, median of {arguments.rounds} rounds")
        print(f"without index {slow:.2f} s, with index {quick:.2f} s, ratio {slow / quick:.1f}")


if __name__ == "__main__":
    main()
