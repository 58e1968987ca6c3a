"""Records of the system: start states, episodes and their parts. numpy only, no torch.

Dimension letters:
    N  decisions in the episode      C  steps per decision          A  numbers per step
    H, W  image size in pixels       K  context frames (0 or 4)
    V  cameras after the first      Q  numbers of the robot's state
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.facts import check_instruction
from asyncrl.storage.untrusted import Typed

CHUNK: Final = 8  # steps per decision: actions of a policy call, frames of a world model's call
ACTION_DIM: Final = 7  # (dx, dy, dz, droll, dpitch, dyaw, gripper)
POSE_DIM: Final = 8  # (x, y, z, quaternion x, y, z, w, gripper) of a robot's hand

EndReason = Literal["success", "terminated", "truncated"]
"""The task is done; the episode cannot continue, as an object fell; the time is over."""
END_REASONS: Final[tuple[EndReason, ...]] = get_args(EndReason)
UNKNOWN_LENGTH: Final = -1  # `Episode.steps_taken` if the rewards determine the length

Uint8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


def dummy_action(numbers: int = ACTION_DIM) -> Float32:
    """Return the action ``[A]`` of a frame without one: no motion; with 7 numbers, the gripper open."""
    gripper = -1 if numbers == ACTION_DIM else 0
    return np.array([*[0] * (numbers - 1), gripper], np.float32)


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """Size of a policy's decision, ``C`` x ``A``, the same for its world."""

    chunk: int = CHUNK
    dim: int = ACTION_DIM


@dataclass(frozen=True, kw_only=True)
class Bounds(Typed):
    """Range of numbers in a model's data (OpenVLA: BOUNDS_Q99); ValueError if inconsistent."""

    q01: tuple[float, ...]  # first percentile of each, in the environment's units
    q99: tuple[float, ...]  # 99th percentile of each
    mask: tuple[bool, ...]  # False: the number is not scaled (the gripper)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.q01) == len(self.q99) == len(self.mask):
            lengths = f"{len(self.q01)}, {len(self.q99)} and {len(self.mask)}"
            raise ValueError(f"q01, q99 and mask have {lengths} numbers")
        if len(above := np.flatnonzero(np.array(self.q01) > np.array(self.q99))):
            raise ValueError(f"q01 is above q99 in number {above[0]}")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Bounds:
        """Read one entry of a `dataset_statistics.json`; without a mask, everything is scaled."""
        low, high = (tuple(fields.get(name) or ()) for name in ("q01", "q99"))
        return cls(q01=low, q99=high, mask=tuple(fields.get("mask", [True] * len(low))))

    def problem(self, numbers: int) -> str:
        """Return why `numbers` values cannot be scaled by these bounds; empty if they can."""
        if len(self.q01) != numbers:
            return f"have {len(self.q01)} numbers, expected {numbers}"
        low, high = np.array(self.q01, np.float32), np.array(self.q99, np.float32)
        still = np.flatnonzero(np.array(self.mask) & (low == high))
        return f"have q01 equal to q99 in number {still[0]}, which is scaled" if len(still) else ""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Properties of a model that are known before its weights are loaded."""

    image_size: int  # height and width of its frames in pixels; 0: any
    nbytes: int  # of the loaded weights
    action_spec: ActionSpec = ActionSpec()
    version: int | None = None  # `Episode.world_version` of a world; None if known only when loaded


@dataclass(frozen=True, kw_only=True)
class SlotBytes:
    """Estimated device memory of a world's slots, excluding weights; 0 if unknown."""

    kept: int = 0  # per slot with an episode
    scratch: int = 0  # per slot while latents are sampled
    shared: int = 0  # for all slots while frames are decoded

    def drawing(self, rows: int, *, graphs: bool) -> int:
        """Return the peak memory of a decision of `rows` slots; CUDA graphs keep the memory of sampling."""
        return rows * self.scratch + self.shared if graphs else max(rows * self.scratch, self.shared)


@dataclass(frozen=True, kw_only=True)
class StartState:
    """Start of an imagined episode."""

    name: str
    """Unique within its collection."""
    task: str
    """Instruction, kept in its normal form (`facts.plain_task`)."""
    frame: Uint8
    """``[H, W, 3]`` first frame, which the world model uses in every decision."""
    context_frames: Uint8
    """``[K, H, W, 3]`` later frames, oldest first; K = 0: the episode starts at `frame`."""
    context_actions: Float32
    """``[K, A]`` action that produced each context frame."""
    ee_pose: Float32 | None = None
    """``[8]`` pose of the hand at the start, see `POSE_DIM`, in metres; None if not recorded."""
    elapsed: int = 0
    """Decisions already used; subtracted from the episode's limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", check_instruction(self.task, f"start state {self.name}"))

    @property
    def present_frame(self) -> Uint8:
        """``[H, W, 3]`` frame at the start of the episode."""
        return self.context_frames[-1] if len(self.context_frames) else self.frame


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of drawing actions from a policy's distribution; an episode's log-probs depend on them."""

    temperature: float
    """Divides the logits; 0: the most likely token, with its log-prob at temperature 1 without top-k."""
    top_k: int = 0
    """Only the `top_k` most likely tokens can be sampled; 0 means all of them."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"The sampling temperature is {self.temperature}, but it divides the logits: it must "
                "be finite and not negative. Use 1.0 for the policy as is, more to explore, "
                "0 for the most likely action."
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top_k is {self.top_k}, but it counts tokens and cannot be negative. Use 0 for all 256."
            )


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An imagined or simulated episode. `video[i]` follows step i; `frames[n]` is seen by decision n."""

    episode_id: str
    """Globally unique: 32 hexadecimal digits."""
    group_id: str
    member: int
    """Place within the group, ``0 <= member < group_size``."""
    group_size: int
    actor: str
    task: str
    start_state: str
    """`StartState.name`, or `SimStart.name`."""
    world_version: int
    """Version of the world model; -1 for a simulator."""
    seed: int
    temperature: float
    """Sampling temperature of the decisions; for action tokens, of their softmax."""
    top_k: int
    """Tokens were sampled among the `top_k` most likely ones; 0: among all."""
    end_reason: EndReason
    frames: Uint8
    """``[N, H, W, 3]`` observation of each decision."""
    sample: Mapping[str, NDArray[Any]]
    """Name -> ``[N, ...]`` to recompute the log-probs; for tokens ``{"tokens": [N, C, A] int32}``, 0..255."""
    logprobs: Float32
    """``[N, C, A]`` behaviour log-prob (or log-density) in nats; of tokens after temperature and top-k."""
    values: Float32
    """``[N]`` critic's estimate; NaN without a value head."""
    actions: Float32
    """``[N, C, A]`` input of the world."""
    rewards: Float32
    """``[N, C]`` per step, 0 after the last; without `steps_taken`, positive at a success's last step."""
    success_scores: Float32
    """``[N, C]`` probability of success per step by the reward model; of a simulator 0 or 1."""
    policy_versions: Int64
    """``[N]`` version that sampled each decision."""
    noise_seeds: Int64
    """``[N]`` seed of the world model's noise for each decision."""
    final_frame: Uint8
    """``[H, W, 3]`` frame after the last step."""
    video: Uint8
    """``[M, H, W, 3]`` all frames; M = N * C, or `steps_taken` if known, or 0 if they are not kept."""
    steps_taken: int = UNKNOWN_LENGTH
    """Steps that a simulator carried out; `UNKNOWN_LENGTH` for a world model, which draws whole decisions."""
    more_frames: Uint8 | None = None
    """``[N, V, H, W, 3]`` frames of the other cameras; None with one camera."""
    states: Float32 | None = None
    """``[N, Q]`` robot's state at `frames`; None if unknown."""
    final_more_frames: Uint8 | None = None
    """``[V, H, W, 3]`` with `more_frames`: after the last step."""
    final_state: Float32 | None = None
    """``[Q]`` with `states`: after the last step."""

    @property
    def success(self) -> bool:
        """True if the task was done."""
        return self.end_reason == "success"

    @property
    def oldest_version(self) -> int:
        """Version of the oldest decision, which the lag bound applies to."""
        return int(self.policy_versions.min())

    @property
    def steps(self) -> int:
        """`steps_taken` if known; else up to a success's last reward, or all steps."""
        if self.steps_taken != UNKNOWN_LENGTH:
            return self.steps_taken
        rewarded = np.flatnonzero(self.rewards.reshape(-1) > 0)
        return int(rewarded[-1]) + 1 if self.success and rewarded.size else self.rewards.size

    @property
    def total_reward(self) -> float:
        """Undiscounted return."""
        return float(self.rewards.reshape(-1)[: self.steps].sum())

    @property
    def reward_size(self) -> float:
        """Sum of the rewards' absolute values; see `returns_differ`."""
        return float(np.abs(self.rewards.reshape(-1)[: self.steps]).sum())


def returns_differ(lowest: Any, highest: Any, size: Any) -> Any:
    """Return True if returns differ by more than rounding; `size`: sum of the rewards' absolute values."""
    return highest - lowest > 1e-5 * size


# --- seeds ---
# Derived from an episode's own numbers only. Runs are reproduced by them: keep the formulas.

_POLICY_STREAM = 0x5EED


def _hash(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 2)


def episode_seed(run_seed: int, group: int, member: int) -> int:
    """Return the seed of one imagined episode, in ``[0, 2**62)``."""
    return _hash(run_seed, group, member)


def noise_seed(episode: int, decision: int) -> int:
    """Return the seed of the world model's noise at one decision, in ``[0, 2**62)``."""
    return _hash(episode, decision)


def sampling_seed(noise: int) -> int:
    """Return the seed of the policy's sampling at the decision with this `noise`, in ``[0, 2**62)``."""
    return _hash(noise, _POLICY_STREAM)
