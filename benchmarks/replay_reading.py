"""How many threads the replay needs to make groups ready to be sent: read, checked, written as messages.

    python benchmarks/replay_reading.py --threads 1 2 4

Against one loop that reads the same files and checks the same checksums. All groups are kept in memory, as
what is read ahead is; the files are in the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from replay_episodes import make_group

from asyncrl.replay.loading import GroupLoader
from asyncrl.replay.store import EpisodeStore

GROUP_SIZE = 8


def measure(groups: int, decisions: int, image: int, threads: int, folder: Path) -> tuple[float, float]:
    """Return the seconds of the threads and of the loop."""
    store = EpisodeStore(folder, group_size=GROUP_SIZE, max_bytes=1 << 60)
    for number in range(groups):
        store.store_group(number, make_group(number, size=GROUP_SIZE, decisions=decisions, image=image))
    loader = GroupLoader(store)
    loader.read_in_background(1 << 60, threads)
    began = time.perf_counter()
    for number in range(groups):
        loader.begin(number, lambda group: None)
    while loader.busy:
        time.sleep(0.001)
    ready = time.perf_counter() - began
    found = [loader.look(number) for number in range(groups)]
    assert all(group is not None and len(group.messages) == GROUP_SIZE for group in found)
    del found
    loader.close()
    began = time.perf_counter()
    for number in range(groups):
        store.load(number, verify=True)
    store.close()
    return ready, time.perf_counter() - began


def main() -> None:
    """Print a row for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--decisions", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    print("| threads | read, checked, written as messages | read and checked in a loop |\n|---|---|---|")
    size = (arguments.groups, arguments.decisions, arguments.image)
    for threads in arguments.threads:
        with tempfile.TemporaryDirectory() as folder:
            ready, loop = measure(*size, threads, Path(folder))
        print(f"| {threads} | {ready:.2f} s | {loop:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
