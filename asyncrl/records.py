"""The vocabulary of the system: the records that travel from start states to weights. numpy only, no torch.

Dimension letters:
    N  decisions in the episode      C  steps per decision          A  numbers per step
    H, W  image size in pixels       K  context frames (0 or 4)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 8
"""Steps per decision: a policy call returns this many actions, and a world model draws this many frames."""
ACTION_DIM: Final = 7
"""(dx, dy, dz, droll, dpitch, dyaw, gripper)."""
SCHEMA_VERSION: Final = 1
"""Version of messages, and of an `Episode` whose sample is action tokens, on the wire and on disk."""
SCHEMA_VERSIONS: Final = (SCHEMA_VERSION, 2)
"""Versions of an `Episode` that are read; 2: its sample is other arrays than the action tokens alone."""

EndReason = Literal["success", "truncated"]

Uint8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

DUMMY_ACTION: Final[Float32] = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)
"""``[7]`` the action of a frame that nothing produced: no motion, gripper open. Read-only."""
DUMMY_ACTION.setflags(write=False)


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """How many numbers a policy's decision has. The world it acts in must take as many."""

    chunk: int = CHUNK
    """``C``: steps per decision."""
    dim: int = ACTION_DIM
    """``A``: numbers per step."""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What is known of a model before its weights are loaded."""

    image_size: int
    """Height and width of its frames in pixels; 0: any."""
    nbytes: int
    """Bytes of the loaded weights."""
    action_spec: ActionSpec = ActionSpec()
    """What a world takes; without meaning for others."""
    version: int | None = None
    """Of a world, as in `Episode.world_version`; None: known only when it is loaded."""


@dataclass(frozen=True, kw_only=True)
class SlotBytes:
    """Device memory that one slot of a world takes beside the weights, estimated. 0: not known."""

    kept: int = 0
    """As long as the slot has an episode."""
    scratch: int = 0
    """While its frames are drawn."""


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


class Sampling(NamedTuple):
    """How actions are drawn from a policy's distribution."""

    temperature: float
    top_k: int
    """Both as in `Episode`."""


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
    """Temperature the decisions were sampled with; of action tokens that of their softmax."""
    top_k: int
    """Only the `top_k` most likely tokens could be sampled; 0 means all of them."""
    end_reason: EndReason
    frames: Uint8
    """``[N, H, W, 3]`` observation each decision was taken on."""
    sample: Mapping[str, NDArray[Any]]
    """Name -> ``[N, ...]``: what the policy must be shown again to give the log-probs of its decisions. A
    policy of action tokens: ``{"tokens": [N, C, A] int32}``, bins 0..255."""
    logprobs: Float32
    """``[N, C, A]`` log of the probability (or density) of each number of the action when it was sampled, in
    nats; of action tokens after temperature and top-k."""
    values: Float32
    """``[N]`` critic's estimate; NaN where the policy has no value head."""
    actions: Float32
    """``[N, C, A]`` what the world received."""
    rewards: Float32
    """``[N, C]`` any number per step; after a success positive at the episode's last step, 0 behind it."""
    success_scores: Float32
    """``[N, C]`` probability of success per step by the reward model, in [0, 1]."""
    policy_versions: Int64
    """``[N]`` version that sampled each decision."""
    noise_seeds: Int64
    """``[N]`` seed of the world model's noise for each decision."""
    final_frame: Uint8
    """``[H, W, 3]`` what was seen after the last step."""
    video: Uint8
    """``[M, H, W, 3]`` every frame drawn, for inspection; M = N * C, or 0 when they are not kept."""

    @property
    def success(self) -> bool:
        """Tell whether the episode ended in success."""
        return self.end_reason == "success"

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest decision: the one the lag bound is about."""
        return int(self.policy_versions.min())

    @property
    def steps(self) -> int:
        """Count the steps until the end. A success ends with the last step that has a positive reward.

        A decision chooses C actions at once: those behind that step were drawn but changed nothing.
        """
        rewarded = np.flatnonzero(self.rewards.reshape(-1) > 0)
        return int(rewarded[-1]) + 1 if self.success and rewarded.size else self.rewards.size

    @property
    def total_reward(self) -> float:
        """Sum the rewards until the end: the undiscounted return."""
        return float(self.rewards.reshape(-1)[: self.steps].sum())


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Type and shape of one array of an `Episode`. Letters are dimensions, numbers are fixed."""

    dtype: str
    shape: tuple[str | int, ...]


EPISODE_ARRAYS: Final[dict[str, ArraySpec]] = {
    "frames": ArraySpec(dtype="uint8", shape=("N", "H", "W", 3)),
    "logprobs": ArraySpec(dtype="float32", shape=("N", "C", "A")),
    "values": ArraySpec(dtype="float32", shape=("N",)),
    "actions": ArraySpec(dtype="float32", shape=("N", "C", "A")),
    "rewards": ArraySpec(dtype="float32", shape=("N", "C")),
    "success_scores": ArraySpec(dtype="float32", shape=("N", "C")),
    "policy_versions": ArraySpec(dtype="int64", shape=("N",)),
    "noise_seeds": ArraySpec(dtype="int64", shape=("N",)),
    "final_frame": ArraySpec(dtype="uint8", shape=("H", "W", 3)),
    "video": ArraySpec(dtype="uint8", shape=("M", "H", "W", 3)),
}
"""The arrays that every `Episode` has, in wire and file order; those of its sample come after the first."""

TOKENS: Final[Mapping[str, ArraySpec]] = MappingProxyType(
    {"tokens": ArraySpec(dtype="int32", shape=("N", "C", "A"))}
)
"""The sample of a policy of action tokens. An array called `tokens` always has this type and shape."""
SAMPLE_DTYPES: Final = ("uint8", "int32", "int64", "float32")
"""Types that the arrays of a sample may have."""
MAX_SAMPLE_ARRAYS: Final = 16
MAX_SAMPLE_DIMENSIONS: Final = 8

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

_FIELDS: Final = tuple(field.name for field in fields(Episode))
_IMAGES, *_OTHERS = EPISODE_ARRAYS
assert (*EPISODE_SCALARS, _IMAGES, "sample", *_OTHERS) == _FIELDS
RESERVED: Final = frozenset({*_FIELDS, "group", "episodes", "checksums"})
"""Names that no array of a sample can have: the fields of an `Episode` and the tables of its file."""


def schema_version(sample: Iterable[str]) -> int:
    """Return the schema version of an episode whose sample has arrays of these names."""
    return SCHEMA_VERSIONS[set(sample) != set(TOKENS)]


def sample_specs(found: Iterable[tuple[Any, Any, Any]]) -> dict[str, ArraySpec]:
    """Check what is said about a sample's arrays, by whomever; their sizes are not looked at.

    Args:
        found: Name, dtype and shape of each array, in order.

    Returns:
        Name -> type and shape, the first dimension ``N``.

    Raises:
        ValueError: A name, type or shape that no array of a sample can have, or too many arrays.
    """
    specs: dict[str, ArraySpec] = {}
    for name, dtype, shape in found:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", name):
            raise ValueError(
                f"{name!r:.80} is no name of a sample's array: an identifier, at most 64 letters"
            )
        if name in RESERVED or name in specs:
            raise ValueError(f"{name} cannot be the name of a sample's array: it is taken")
        if dtype not in SAMPLE_DTYPES:
            raise ValueError(
                f"{name} is {dtype!r:.80}, a sample's array is one of {', '.join(SAMPLE_DTYPES)}"
            )
        if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= MAX_SAMPLE_DIMENSIONS:
            raise ValueError(f"{name} does not have 1 to {MAX_SAMPLE_DIMENSIONS} dimensions")
        specs[name] = TOKENS.get(name) or ArraySpec(dtype=dtype, shape=("N", *shape[1:]))
    if len(specs) > MAX_SAMPLE_ARRAYS:
        raise ValueError(f"a sample of {len(specs)} arrays, at most {MAX_SAMPLE_ARRAYS} are allowed")
    return specs


def array_specs(sample: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Return the arrays of an episode with this sample, in wire and file order."""
    return {_IMAGES: EPISODE_ARRAYS[_IMAGES], **sample, **{name: EPISODE_ARRAYS[name] for name in _OTHERS}}


def episode_arrays(episode: Episode) -> dict[str, NDArray[Any]]:
    """Return all arrays of an episode by name, in wire and file order.

    Dtypes and shapes are those of `array_specs`, for example frames ``[N, H, W, 3]`` uint8.
    """
    others = {name: getattr(episode, name) for name in _OTHERS}
    return {_IMAGES: getattr(episode, _IMAGES), **episode.sample, **others}


def decision_layout(episode: Episode) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of one decision's log-probs and sample: the same throughout a group."""
    arrays = {"logprobs": episode.logprobs, **episode.sample}
    return {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}


def problem_with(episode: Episode) -> str | None:
    """Say what is inconsistent about an episode, or None when it is sound.

    Checks dtypes, ranks, that every letter stands for one size everywhere, 1 <= N, member < group_size,
    finite numbers, log-probs of tokens that are not positive (densities may be), versions that are not
    negative, sampling that can have been, and a reward where the task is said to be fulfilled.
    """
    sizes: dict[str, int] = {}
    try:
        sample = sample_specs((name, array.dtype.name, array.shape) for name, array in episode.sample.items())
    except ValueError as error:
        return str(error)
    for (name, array), spec in zip(
        episode_arrays(episode).items(), array_specs(sample).values(), strict=True
    ):
        if array.dtype != np.dtype(spec.dtype) or array.ndim != len(spec.shape):
            return (
                f"{name} is {array.dtype}{list(array.shape)}, expected {spec.dtype} with shape {spec.shape}"
            )
        for letter, size in zip(spec.shape, array.shape, strict=True):
            expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
            if size != expected:
                return f"{name} has shape {list(array.shape)}, expected {letter} = {expected}"
    if sizes["N"] < 1 or sizes["M"] not in (0, sizes["N"] * sizes["C"]):
        return f"{sizes['N']} decisions and {sizes['M']} video frames do not belong together"
    if not 0 <= episode.member < episode.group_size:
        return f"member {episode.member} of a group of {episode.group_size}"
    tokens = episode.sample.get("tokens")
    if not np.isfinite(episode.logprobs).all() or (tokens is not None and (episode.logprobs > 0).any()):
        return "behaviour log-probs must be finite, and those of tokens at most 0"
    if tokens is not None and ((tokens < 0).any() or (tokens > 255).any()):
        return "action tokens must lie in 0..255"
    if (episode.policy_versions < 0).any():
        return "policy versions must not be negative"
    for name in ("actions", "rewards", "success_scores"):
        if not np.isfinite(getattr(episode, name)).all():
            return f"{name} must be finite"
    if not (math.isfinite(episode.temperature) and episode.temperature >= 0) or episode.top_k < 0:
        return f"temperature {episode.temperature} and top_k {episode.top_k} cannot have been sampled with"
    if episode.success and not (episode.rewards[-1] > 0).any():
        return "end_reason is 'success', but no step of the last decision has a positive reward"
    if episode.rewards.reshape(-1)[episode.steps :].any():
        return "there are rewards behind the step with which the episode ended"
    if episode.end_reason not in ("success", "truncated"):
        return f"end_reason is {episode.end_reason!r}, expected 'success' or 'truncated'"
    return None
