"""Reverb's insert and sample on the replay benchmarks' sizes, beside a raw write of the same bytes.

    python benchmarks/replay_reverb.py

In an environment of its own: dm-reverb 0.14.0, tensorflow 2.15.1, numpy<2. Reverb keeps everything in memory
and makes nothing durable. The raw write (one file per group, synced) is in the same rounds, so that ratios
can be compared with those of `replay_speed.py` and `replay_ingest.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import reverb  # type: ignore[import-not-found]

SIZES = {"tabletop": (6, 64, 40), "large": (32, 224, 6)}
"""Decisions, pixels per side, groups per round."""
GROUP_SIZE = 8


def make_episode(seed: int, decisions: int, image: int) -> dict[str, np.ndarray]:
    """The arrays of an episode without video, with the types and shapes of the replay's."""
    random = np.random.default_rng(seed)
    shape = (decisions, 8, 7)
    return {
        "frames": random.integers(0, 256, (decisions, image, image, 3), np.uint8),
        "tokens": random.integers(0, 256, shape, np.int32),
        "logprobs": -random.random(shape, np.float32),
        "values": np.zeros(decisions, np.float32),
        "actions": random.random(shape, np.float32),
        "rewards": np.zeros((decisions, 8), np.float32),
        "success_scores": random.random((decisions, 8), np.float32),
        "policy_versions": np.full(decisions, seed, np.int64),
        "noise_seeds": np.arange(decisions, dtype=np.int64),
        "final_frame": random.integers(0, 256, (image, image, 3), np.uint8),
    }


def write_raw(path: Path, group: list[dict[str, np.ndarray]]) -> None:
    """Write a group into one synced file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    for episode in group:
        for array in episode.values():
            os.write(handle, array.reshape(-1).view(np.uint8).data)
    os.fsync(handle)
    os.close(handle)


def insert(client: reverb.Client, group: list[dict[str, np.ndarray]]) -> None:
    """Insert every episode as one item, and wait until the server has them."""
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for episode in group:
            writer.append(episode)
            trajectory = {name: column[-1] for name, column in writer.history.items()}
            writer.create_item("episodes", 1.0, trajectory)
        writer.flush()


def measure(size: str, rounds: int) -> None:
    """Print the speeds of one size."""
    decisions, image, groups = SIZES[size]
    group = [make_episode(seed, decisions, image) for seed in range(GROUP_SIZE)]
    megabytes = groups * sum(array.nbytes for episode in group for array in episode.values()) / 1e6
    speeds = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        server = reverb.Server([reverb.Table.queue("episodes", max_size=groups * GROUP_SIZE)])
        client = reverb.Client(f"localhost:{server.port}")
        with tempfile.TemporaryDirectory() as name:
            began = time.perf_counter()
            for number in range(groups):
                write_raw(Path(name) / str(number), group)
            speeds["raw write"].append(megabytes / (time.perf_counter() - began))
        began = time.perf_counter()
        for _ in range(groups):
            insert(client, group)
        speeds["insert"].append(megabytes / (time.perf_counter() - began))
        began = time.perf_counter()
        taken = sum(1 for _ in client.sample("episodes", groups * GROUP_SIZE, emit_timesteps=False))
        speeds["sample"].append(megabytes / (time.perf_counter() - began))
        assert taken == groups * GROUP_SIZE
        server.stop()
    median = {way: statistics.median(found) for way, found in speeds.items()}
    print(f"{size}: MB/s: " + ", ".join(f"{way} {speed:.0f}" for way, speed in median.items()))
    for way in ("insert", "sample"):
        print(f"  {way} against raw write: {median[way] / median['raw write']:.2f}x")


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for size in SIZES:
        measure(size, arguments.rounds)


if __name__ == "__main__":
    main()
