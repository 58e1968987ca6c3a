"""Recordings of scenes that a program draws: a coloured square that moves on a background of its task."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.fitting.recording_files import Recordings, write_part
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from support import child_environment
from support.simulated import simulated_episode

KITCHEN: Final = ("open the middle drawer", "push the plate", "turn on the stove")


def recorded_spec(
    image_size: int,
    *,
    simulator: str = "kitchen",
    tasks: tuple[str, ...] = KITCHEN,
    trials: int = 50,
    poses: bool = False,
    idle: tuple[float, ...] = tuple(dummy_action().tolist()),
) -> SimulatorSpec:
    """Of a simulator with numbered tasks, whose actions have as many numbers as `idle`."""
    return SimulatorSpec(
        name=simulator,
        tasks=tasks,
        trials=trials,
        max_steps=400,
        image_size=image_size,
        poses=poses,
        idle=idle,
    )


def recorded_poses(seed: int, frames: int) -> np.ndarray:
    """Of a hand that moves at random, ``[F, 8]``."""
    poses = np.random.default_rng(2000 + seed).normal(size=(frames, 8))
    poses[:, 3:7] /= np.linalg.norm(poses[:, 3:7], axis=1, keepdims=True)
    poses[:, 7] = np.clip(poses[:, 7], -1, 1)
    return poses.astype(np.float32)


def recorded_episode(seed: int, spec: SimulatorSpec, frames: int) -> SimulatedEpisode:
    """An episode of task ``seed mod tasks``; every second one is solved in its last five frames."""
    rng, size, task_id = np.random.default_rng(seed), spec.image_size, seed % len(spec.tasks)
    coarse = np.random.default_rng(1000 + task_id).integers(60, 196, (8, 8, 3))
    background = coarse.repeat(size // 8, 0).repeat(size // 8, 1)
    pictures = np.broadcast_to(background, (frames, size, size, 3)).astype(np.uint8)
    edge = size // 8
    for number, at in enumerate(rng.integers(0, size - edge, (frames, 2))):
        pictures[number, at[0] : at[0] + edge, at[1] : at[1] + edge] = rng.integers(0, 256, 3)
    numbers = spec.action_dim
    actions = (rng.uniform(-0.3, 0.5, (frames, numbers)) * np.arange(1, numbers + 1) / 7).astype(np.float32)
    actions[:, -1] = np.where(np.arange(frames) > frames // 2, 1, -1)
    actions[0] = spec.idle
    success = (np.arange(frames) >= frames - 5) & (seed % 2 == 1)
    return simulated_episode(
        seed,
        pictures,
        actions,
        success,
        spec.tasks[task_id],
        recorded_poses(seed, frames) if spec.poses else None,
        spec.name,
        task_id if spec.trials else -1,
    )


def write_recorded(
    folder: Path, spec: SimulatorSpec, lengths: tuple[int, ...], *, part: int = 0
) -> list[SimulatedEpisode]:
    """Write one file of episodes of so many frames each; their seeds count from 0."""
    episodes = [recorded_episode(seed, spec, frames) for seed, frames in enumerate(lengths)]
    write_part(folder / f"part-{part:05d}.h5", episodes, spec.name, spec.cameras, {})
    return episodes


def recordings_of(lengths: Sequence[int], *, size: int = 32, **changes: Any) -> Recordings:
    """Episodes of so many frames: black pictures, actions of zeros, no success, unless arrays are given."""
    count = sum(lengths)
    arrays: dict[str, Any] = {
        "frames": np.zeros((count, size, size, 3), np.uint8),
        "actions": np.zeros((count, 7), np.float32),
        "success": np.zeros(count, bool),
        "offsets": np.cumsum([0, *lengths]),
        "tasks": ["x"] * len(lengths),
        "seeds": np.arange(len(lengths)),
    }
    return Recordings(**arrays | changes)


PEAK: Final = """
import sys
from pathlib import Path

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

read(sys.argv[1])
before = peak()
print(read(sys.argv[2]), peak() - before)
"""


def grown_peak(read: str, first: Path, second: Path) -> tuple[int, int]:
    """Bytes that the function `read` of a program returns of the second folder, and the growth of the peak.

    One arena and a fixed mmap threshold: else glibc keeps freed pages by chance of the threads, up to 45 MB.
    """
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", read + PEAK, str(first), str(second)],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env=child_environment() | fixed,
    )
    pictures, grown = map(int, done.stdout.split())
    return pictures, grown
