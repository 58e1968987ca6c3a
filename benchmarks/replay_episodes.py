"""Random episodes and plain files for the benchmarks of the replay. Group and member decide an episode."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from asyncrl.records import Episode
from asyncrl.storage.atomic import flush


def write_raw(path: Path, parts: list[memoryview]) -> None:
    """Write bytes into a new file without a format, and make it as durable as a group of the replay."""
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
    """Make the `size` episodes of a group, imagined by version `number`; see `make_episode`."""
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
