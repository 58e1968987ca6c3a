"""Groups of random episodes for the benchmarks of the replay."""

from __future__ import annotations

import numpy as np

from asyncrl.records import Episode


def make_group(number: int, *, size: int, decisions: int, image: int) -> list[Episode]:
    """Make `size` sound episodes of `decisions` decisions on images of `image` x `image` pixels."""
    random = np.random.default_rng(number)
    shape = (decisions, 8, 7)
    return [
        Episode(
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
            end_reason="truncated",
            frames=random.integers(0, 256, (decisions, image, image, 3), np.uint8),
            tokens=random.integers(0, 256, shape, np.int32),
            logprobs=-random.random(shape, np.float32),
            values=np.zeros(decisions, np.float32),
            actions=random.random(shape, np.float32),
            rewards=np.zeros((decisions, 8), np.float32),
            success_scores=random.random((decisions, 8), np.float32),
            policy_versions=np.full(decisions, number, np.int64),
            noise_seeds=np.arange(decisions, dtype=np.int64),
            final_frame=random.integers(0, 256, (image, image, 3), np.uint8),
            video=np.empty((0, image, image, 3), np.uint8),
        )
        for member in range(size)
    ]
