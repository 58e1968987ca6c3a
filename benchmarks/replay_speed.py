"""The replay against the plain ways of doing the same, in interleaved rounds of one run.

    python benchmarks/replay_speed.py

Ratios are speeds relative to the plain way (above 1: the replay is quicker), from the medians of all rounds:

    seal            a group's file, durable, against a raw file of the same bytes, as durable
    fresh, reused   whole groups from the page cache against copies out of np.memmap; not verified
    verified        the same into fresh memory with every checksum checked, as on the first read of a file
    cold            whole groups that are not in the page cache, fresh, against cold copies out of np.memmap
    small           all but the images of a group, against h5py
    torchrl         seals and whole groups against LazyMemmapStorage, its writes flushed and synced, when
                    torchrl is installed
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from asyncrl.replay.files.format import GroupFileParts
from asyncrl.replay.files.reader import Buffers, GroupReader, read_layout
from replay_episodes import make_group, write_raw

from asyncrl.episode_layout import TOKENS, array_specs, episode_arrays
from asyncrl.records import Episode
from asyncrl.replay.store import EpisodeStore
from asyncrl.storage.atomic import flush

SIZES = {"tabletop": (6, 64), "large": (32, 224)}
"""Decisions and pixels per side of an episode."""
SMALL = tuple(name for name in array_specs(TOKENS) if name not in ("frames", "final_frame", "video"))


def by_memmap(path: Path, layout: GroupFileParts) -> Callable[[], Any]:
    """Return what copies every array out of a mapping of the file. Where they lie is known before."""
    mapped = np.memmap(path, np.uint8, "r")
    extents = [(p.offset, p.offset + p.nbytes) for p in layout.extents.values()]
    return lambda: [np.array(mapped[begin:end]) for begin, end in extents]


def by_h5py(path: Path) -> None:
    """Read the small arrays of a file."""
    with h5py.File(path, "r") as file:
        for name in SMALL:
            file[name][...]  # type: ignore[index]


def forget(path: Path) -> None:
    """Take a file, synced before, out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


class TorchRL:
    """A LazyMemmapStorage with one row per episode."""

    def __init__(self, groups: list[list[Episode]], folder: Path) -> None:
        """Make room and write the first group, which makes the files."""
        import torch
        from tensordict import TensorDict  # type: ignore[import-not-found]
        from torchrl.data import LazyMemmapStorage  # type: ignore[import-not-found]

        self._torch, self._dict, self._size, self._folder = torch, TensorDict, len(groups[0]), folder
        self._storage = LazyMemmapStorage(self._size * len(groups), scratch_dir=str(folder))
        self.write(0, groups[0])

    def write(self, index: int, group: list[Episode]) -> None:
        """Store a group durably: copy it into the mapping, write that back, sync the files."""
        arrays = [episode_arrays(episode) for episode in group]
        names = [name for name in arrays[0] if name != "video"]
        parts = {name: self._torch.from_numpy(np.stack([e[name] for e in arrays])) for name in names}
        self._storage.set(self._rows(index), self._dict(parts, [self._size]))
        for path in self._folder.rglob("*.memmap"):
            flush(path)

    def read(self, index: int) -> Any:
        """Copy a group out."""
        return self._storage.get(self._torch.tensor(self._rows(index)))

    def _rows(self, index: int) -> list[int]:
        return list(range(index * self._size, (index + 1) * self._size))


def torchrl_or_none(groups: list[list[Episode]], folder: Path) -> TorchRL | None:
    """The storage, when torchrl is installed."""
    try:
        return TorchRL(groups, folder)
    except ImportError:
        return None


def measure(decisions: int, image: int, groups: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds per round of every way, in interleaved rounds."""
    episodes = [make_group(number, size=8, decisions=decisions, image=image) for number in range(groups)]
    seconds, order = defaultdict[str, list[float]](list), random.Random(0)

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - began)

    raw = [
        [a.reshape(-1).view(np.uint8).data for e in g for a in episode_arrays(e).values()] for g in episodes
    ]
    peer = torchrl_or_none(episodes, folder / "torchrl")
    for turn in range(rounds):
        store = EpisodeStore(folder / f"seal-{turn}", group_size=8, max_bytes=1 << 60)
        for number, group in enumerate(episodes):
            ways = {
                "raw write": lambda: write_raw(folder / f"raw-{number}", raw[number]),  # noqa: B023
                "seal": lambda: store.store_group(number, group),  # noqa: B023
            }
            if peer is not None:
                ways["torchrl write"] = lambda: peer.write(number, group)  # noqa: B023
            for way in sorted(ways, key=lambda _: order.random()):
                timed(way, ways[way])
        for path in folder.glob("raw-*"):
            path.unlink()
        store.close()
        if turn:
            shutil.rmtree(folder / f"seal-{turn}")
    paths = sorted((folder / "seal-0").glob("group-*.h5"))
    reader, buffers = GroupReader(), Buffers()
    layouts = {path: read_layout(path) for path in paths}
    for path in paths:
        reader.read(path)
    for _ in range(rounds):
        for index, path in enumerate(paths):
            mapped = by_memmap(path, layouts[path])
            timed("memmap", mapped)
            timed("fresh", lambda: reader.read(path))  # noqa: B023
            timed("reused", lambda: reader.read(path, buffers=buffers))  # noqa: B023
            timed("verified", lambda: reader.read(path, verify=True))  # noqa: B023
            timed("h5py small", lambda: by_h5py(path))  # noqa: B023
            timed("small", lambda: reader.read(path, SMALL))  # noqa: B023
            if peer is not None:
                timed("torchrl", lambda: peer.read(index))  # noqa: B023
            del mapped  # What is mapped stays in the page cache.
            forget(path)
            timed("cold", lambda: reader.read(path))  # noqa: B023
            forget(path)
            timed("cold memmap", by_memmap(path, layouts[path]))
    return seconds


def report(name: str, seconds: dict[str, list[float]]) -> None:
    """Print the medians and ratios of one size."""
    median = {way: statistics.median(times) for way, times in seconds.items()}
    print(f"{name}: ms per group: " + ", ".join(f"{way} {1e3 * t:.2f}" for way, t in median.items()))
    pairs = [("raw write", "seal"), ("memmap", "fresh"), ("memmap", "reused"), ("memmap", "verified")]
    pairs += [("cold memmap", "cold"), ("h5py small", "small")]
    if "torchrl" in median:
        pairs += [("torchrl", "fresh"), ("torchrl", "reused"), ("torchrl write", "seal")]
    else:
        print("  torchrl is not installed")
    for plain, ours in pairs:
        print(f"  {ours} against {plain}: {median[plain] / median[ours]:.2f}x")


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for name, (decisions, image) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            report(name, measure(decisions, image, arguments.groups, arguments.rounds, Path(folder)))


if __name__ == "__main__":
    main()
