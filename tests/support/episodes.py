"""Episodes of random numbers, their messages, and a comparison that looks at every field."""

import dataclasses
import json
import struct
import zlib
from typing import Any

import numpy as np

from asyncrl.episode_layout import episode_arrays, scalar_types, version_of
from asyncrl.messaging.framing import LongText
from asyncrl.records import EndReason, Episode

SAMPLES: dict[type, Any] = {
    **{str: "é x", LongText: 9_000 * "x", int: -7, float: 0.1, bool: True},
    **{dict: {"wire/bytes": 1.5}, list: [3, 70_000_000]},
}


def unpack(frames: list[Any]) -> tuple[dict[str, Any], list[bytes]]:
    return json.loads(bytes(frames[0])[8:]), [bytes(frame) for frame in frames[1:]]


def pack(header: Any, frames: list[bytes] | None = None) -> list[bytes]:
    """A message with a valid checksum around any header."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return [b"ARL1" + struct.pack("<I", zlib.crc32(body)) + body, *(frames or [])]


def make_episode(
    number: int = 0,
    member: int = 0,
    *,
    group_size: int = 2,
    versions: tuple[int, ...] = (0, 1),
    actor: str = "actor-0",
    image: int = 4,
    video: bool = False,
    success: bool = False,
    episode_id: str | None = None,
) -> Episode:
    """A sound episode whose content follows from its arguments."""
    n = len(versions)
    random = np.random.default_rng([number, member])
    drawn_id = random.bytes(16).hex()
    rewards = np.zeros((n, 8), np.float32)
    rewards[-1, 3] = float(success)
    return Episode(
        episode_id=episode_id or drawn_id,
        group_id=f"{number:08d}",
        member=member,
        group_size=group_size,
        actor=actor,
        task="put the red cube into the bowl",
        start_state="tabletop-7",
        world_version=3,
        seed=-(2**62) + number,
        temperature=1.0,
        top_k=0,
        end_reason="success" if success else "truncated",
        frames=random.integers(0, 256, (n, image, image, 3)).astype(np.uint8),
        sample={"tokens": random.integers(0, 256, (n, 8, 7)).astype(np.int32)},
        logprobs=-random.random((n, 8, 7)).astype(np.float32),
        values=np.full(n, np.nan, np.float32),
        actions=random.standard_normal((n, 8, 7)).astype(np.float32),
        rewards=rewards,
        success_scores=random.random((n, 8)).astype(np.float32),
        policy_versions=np.array(versions, np.int64),
        noise_seeds=random.integers(-(2**63), 2**63 - 1, n),
        final_frame=random.integers(0, 256, (image, image, 3)).astype(np.uint8),
        video=random.integers(0, 256, (n * 8 if video else 0, image, image, 3)).astype(np.uint8),
    )


def with_chain(episode: Episode) -> Episode:
    """The same episode by a policy that samples a chain of denoising steps, 4 steps of 6 numbers at once."""
    n, random = len(episode.frames), np.random.default_rng(0)
    rewards = np.zeros((n, 4), np.float32)
    rewards[-1, 3] = float(episode.success)
    return dataclasses.replace(
        episode,
        sample={
            "denoising_chain": random.standard_normal((n, 3, 4, 6)).astype(np.float32),
            "noise_steps": np.arange(n, dtype=np.int64),
            "kept": random.integers(0, 256, (n, 2)).astype(np.uint8),
        },
        logprobs=-random.random((n, 4, 6)).astype(np.float32),
        actions=random.standard_normal((n, 4, 6)).astype(np.float32),
        rewards=rewards,
        success_scores=random.random((n, 4)).astype(np.float32),
        video=episode.video[: n * 4],
    )


def assert_same(one: Episode, other: Episode) -> None:
    assert version_of(one) == version_of(other)
    for name in scalar_types(version_of(one)):
        assert getattr(one, name) == getattr(other, name), name
        assert type(getattr(one, name)) is type(getattr(other, name)), name
    ours, theirs = episode_arrays(one), episode_arrays(other)
    assert list(ours) == list(theirs)
    for name, a in ours.items():
        b = theirs[name]
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def simulated(
    episode: Episode, *, steps: int = 12, end: EndReason = "truncated", cameras: int = 2, state: int = 3
) -> Episode:
    """The same episode as a simulator's: `steps` carried out, dense rewards, cameras and states."""
    n, chunk, image = *episode.rewards.shape, episode.final_frame.shape[0]
    random = np.random.default_rng([7, episode.member])
    counted = np.arange(n * chunk) < steps
    rewards = np.where(counted, random.standard_normal(n * chunk), 0).astype(np.float32).reshape(n, chunk)
    scores = np.zeros(n * chunk, np.float32)
    scores[steps - 1] = float(end == "success")
    pictures = random.integers(0, 256, (n + 1, cameras - 1, image, image, 3)).astype(np.uint8)
    states = random.standard_normal((n + 1, state)).astype(np.float32)
    return dataclasses.replace(
        episode,
        task="put the red cube into the bowl",
        start_state="table/3/seed-12",
        world_version=-1,
        end_reason=end,
        steps_taken=steps,
        rewards=rewards,
        success_scores=scores.reshape(n, chunk),
        video=episode.video[:steps],
        more_frames=pictures[:-1] if cameras > 1 else None,
        final_more_frames=pictures[-1] if cameras > 1 else None,
        states=states[:-1] if state else None,
        final_state=states[-1] if state else None,
    )
