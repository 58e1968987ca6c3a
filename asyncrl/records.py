"""The vocabulary of the system: the records that travel from start states to weights. numpy only, no torch.

Dimension letters:
    N  decisions in the episode      C  steps per decision (8)      A  action dimensions (7)
    H, W  image size in pixels       K  context frames (0 or 4)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 8
"""Steps per decision: a policy call returns this many actions, and a world model draws this many frames."""
ACTION_DIM: Final = 7
"""(dx, dy, dz, droll, dpitch, dyaw, gripper)."""
SCHEMA_VERSION: Final = 1
"""Version of `Episode` on the wire and on disk. Raise it when a field changes meaning, name or shape."""

EndReason = Literal["success", "truncated"]

Uint8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

DUMMY_ACTION: Final[Float32] = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)
"""``[7]`` the action of a frame that nothing produced: no motion, gripper open. Read-only."""
DUMMY_ACTION.setflags(write=False)


@dataclass(frozen=True, kw_only=True)
class StartState:
    """Where an imagined episode begins."""

    name: str
    """Unique within its collection; for example the file it came from."""
    task: str
    """The instruction, lower case, without a full stop."""
    frame: Uint8
    """``[H, W, 3]`` the first frame; the world model keeps it as an anchor for the whole episode."""
    context_frames: Uint8
    """``[K, H, W, 3]`` frames that lead to the present, oldest first; K = 0: it starts at `frame`."""
    context_actions: Float32
    """``[K, 7]`` the action that produced each context frame."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One imagined or simulated episode. Action i made frame i; `frames[n]` was seen before `actions[n]`."""

    episode_id: str
    """Unique for ever: 32 hexadecimal digits."""
    group_id: str
    """Shared by the episodes imagined from one start state."""
    member: int
    """Place within the group, ``0 <= member < group_size``."""
    group_size: int
    actor: str
    """Name of the process that made it."""
    task: str
    start_state: str
    """`StartState.name`."""
    world_version: int
    """Which world model imagined it; -1 for a simulator."""
    seed: int
    """Seed of the episode; the noise of decision n is drawn from ``noise_seeds[n]``."""
    temperature: float
    """Softmax temperature the action tokens were sampled with."""
    top_k: int
    """Only the `top_k` most likely tokens could be sampled; 0 means all of them."""
    end_reason: EndReason
    frames: Uint8
    """``[N, H, W, 3]`` observation each decision was taken on."""
    tokens: NDArray[np.int32]
    """``[N, 8, 7]`` action bins, 0..255."""
    logprobs: Float32
    """``[N, 8, 7]`` log of the probability each token was sampled with, after temperature and top-k."""
    values: Float32
    """``[N]`` critic's estimate; NaN where the policy has no value head."""
    actions: Float32
    """``[N, 8, 7]`` what the world received."""
    rewards: Float32
    """``[N, 8]`` 1 at the first successful step, 0 elsewhere."""
    success_scores: Float32
    """``[N, 8]`` probability of success per step by the reward model, in [0, 1]."""
    policy_versions: Int64
    """``[N]`` version that sampled each decision."""
    noise_seeds: Int64
    """``[N]`` seed of the world model's noise for each decision."""
    final_frame: Uint8
    """``[H, W, 3]`` what was seen after the last step."""
    video: Uint8
    """``[M, H, W, 3]`` every frame drawn, for inspection; M = N * 8, or 0 when they are not kept."""

    @property
    def success(self) -> bool:
        """Whether the episode ended in success."""
        return self.end_reason == "success"

    @property
    def oldest_version(self) -> int:
        """Version of the oldest decision: the one the lag bound is about."""
        return int(self.policy_versions.min())

    @property
    def first_success_step(self) -> int:
        """Index of the first successful step, or -1."""
        hits = np.flatnonzero(self.rewards.reshape(-1) > 0)
        return int(hits[0]) if hits.size else -1


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Type and shape of one array of an `Episode`. Letters are dimensions, numbers are fixed."""

    dtype: str
    shape: tuple[str | int, ...]


EPISODE_ARRAYS: Final[dict[str, ArraySpec]] = {
    "frames": ArraySpec(dtype="uint8", shape=("N", "H", "W", 3)),
    "tokens": ArraySpec(dtype="int32", shape=("N", CHUNK, ACTION_DIM)),
    "logprobs": ArraySpec(dtype="float32", shape=("N", CHUNK, ACTION_DIM)),
    "values": ArraySpec(dtype="float32", shape=("N",)),
    "actions": ArraySpec(dtype="float32", shape=("N", CHUNK, ACTION_DIM)),
    "rewards": ArraySpec(dtype="float32", shape=("N", CHUNK)),
    "success_scores": ArraySpec(dtype="float32", shape=("N", CHUNK)),
    "policy_versions": ArraySpec(dtype="int64", shape=("N",)),
    "noise_seeds": ArraySpec(dtype="int64", shape=("N",)),
    "final_frame": ArraySpec(dtype="uint8", shape=("H", "W", 3)),
    "video": ArraySpec(dtype="uint8", shape=("M", "H", "W", 3)),
}
"""The arrays of an `Episode`, in wire and file order."""

EPISODE_SCALARS: Final[dict[str, type]] = {
    "episode_id": str,
    "group_id": str,
    "member": int,
    "group_size": int,
    "actor": str,
    "task": str,
    "start_state": str,
    "world_version": int,
    "seed": int,
    "temperature": float,
    "top_k": int,
    "end_reason": str,
}
"""The scalars of an `Episode` with their types, in wire and file order."""

assert [f.name for f in fields(Episode)] == [*EPISODE_SCALARS, *EPISODE_ARRAYS]


def problem_with(episode: Episode) -> str | None:
    """Say what is inconsistent about an episode, or None when it is sound.

    Checks dtypes, ranks, that every letter stands for one size everywhere, 1 <= N, member < group_size,
    finite log-probs that are not positive, versions that are not negative.
    """
    sizes: dict[str, int] = {}
    for name, spec in EPISODE_ARRAYS.items():
        array: NDArray[Any] = getattr(episode, name)
        if array.dtype != np.dtype(spec.dtype) or array.ndim != len(spec.shape):
            return (
                f"{name} is {array.dtype}{list(array.shape)}, expected {spec.dtype} with shape {spec.shape}"
            )
        for letter, size in zip(spec.shape, array.shape, strict=True):
            expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
            if size != expected:
                return f"{name} has shape {list(array.shape)}, expected {letter} = {expected}"
    if sizes["N"] < 1 or sizes["M"] not in (0, sizes["N"] * CHUNK):
        return f"{sizes['N']} decisions and {sizes['M']} video frames do not belong together"
    if not 0 <= episode.member < episode.group_size:
        return f"member {episode.member} of a group of {episode.group_size}"
    if not np.isfinite(episode.logprobs).all() or (episode.logprobs > 0).any():
        return "behaviour log-probs must be finite and at most 0"
    if (episode.tokens < 0).any() or (episode.tokens > 255).any():
        return "action tokens must lie in 0..255"
    if (episode.policy_versions < 0).any():
        return "policy versions must not be negative"
    if episode.end_reason not in ("success", "truncated"):
        return f"end_reason is {episode.end_reason!r}, expected 'success' or 'truncated'"
    return None
