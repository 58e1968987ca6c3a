"""The vocabulary of the system: the records that travel from start states to weights. numpy only, no torch.

Dimension letters:
    N  decisions in the episode      C  steps per decision          A  numbers per step
    H, W  image size in pixels       K  context frames (0 or 4)
    V  cameras beside the first      Q  numbers of the robot's state
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 8
"""Steps per decision: a policy call returns this many actions, and a world model draws this many frames."""
ACTION_DIM: Final = 7
"""(dx, dy, dz, droll, dpitch, dyaw, gripper)."""
POSE_DIM: Final = 8
"""(x, y, z, quaternion x, y, z, w, gripper) of a robot's hand."""

EndReason = Literal["success", "terminated", "truncated"]
"""The task was fulfilled; the episode cannot go on for another reason, like an object that fell; time ran
out, and it could have gone on."""
END_REASONS: Final[tuple[EndReason, ...]] = get_args(EndReason)
UNKNOWN_LENGTH: Final = -1
"""Sentinel of `Episode.steps_taken`: infer the length from the rewards."""

Uint8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

DUMMY_ACTION: Final[Float32] = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)
"""``[7]`` the action of a frame that nothing produced: no motion, gripper open. Read-only."""
DUMMY_ACTION.setflags(write=False)


def dummy_action(numbers: int) -> Float32:
    """Return the action of a frame that nothing produced, ``[A]``: `DUMMY_ACTION`, or zeros for other widths.

    Example:
        >>> dummy_action(2).tolist()
        [0.0, 0.0]
    """
    return DUMMY_ACTION if numbers == ACTION_DIM else np.zeros(numbers, np.float32)


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
    """Device memory that slots of a world take beside the weights, estimated. 0: not known."""

    kept: int = 0
    """Of each slot, as long as it has an episode."""
    scratch: int = 0
    """Of each slot, while its latents are drawn."""
    shared: int = 0
    """While frames are drawn from latents, however many slots there are."""

    def drawing(self, rows: int, *, graphs: bool) -> int:
        """Add up what a decision of so many slots takes for a while.

        Latents are drawn first and frames from them, so the larger of both counts; but what a CUDA graph
        works in stays its own.

        Args:
            rows: Slots drawn together.
            graphs: Whether the networks that draw latents are CUDA graphs (--imagination.compile).

        Example:
            >>> slot = SlotBytes(scratch=100, shared=1000)
            >>> slot.drawing(4, graphs=False), slot.drawing(4, graphs=True)
            (1000, 1400)
        """
        return rows * self.scratch + self.shared if graphs else max(rows * self.scratch, self.shared)


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
    """``[K, A]`` the action that produced each context frame."""
    ee_pose: Float32 | None = None
    """``[8]`` where the robot's hand is as the episode begins (at the last context frame, if there are any):
    x, y, z in metres, quaternion x, y, z, w, gripper. None: not recorded; some worlds need it."""
    elapsed: int = 0
    """Decisions that led here from `frame`: an episode that begins here has so many fewer."""

    @property
    def present_frame(self) -> Uint8:
        """Return what is seen when an episode begins, ``[H, W, 3]``: the last frame that leads there."""
        return self.context_frames[-1] if len(self.context_frames) else self.frame


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
    """`StartState.name`, or `SimStart.name`."""
    world_version: int
    """Version of the world model that imagined it; -1 for a simulator."""
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
    """``[N, C]`` any number per step, 0 behind the episode's last one. Where `steps_taken` does not say which
    that is, it is positive at the last step after a success."""
    success_scores: Float32
    """``[N, C]`` probability of success per step by the reward model, in [0, 1]; of a simulator 1 where the
    task was fulfilled, else 0."""
    policy_versions: Int64
    """``[N]`` version that sampled each decision."""
    noise_seeds: Int64
    """``[N]`` seed of the world model's noise for each decision."""
    final_frame: Uint8
    """``[H, W, 3]`` what was seen after the last step."""
    video: Uint8
    """``[M, H, W, 3]`` every frame drawn, for inspection; M = N * C, or `steps_taken` where that is said, or
    0 when they are not kept."""
    steps_taken: int = UNKNOWN_LENGTH
    """Steps carried out in a simulator, the last of them in the last decision. `UNKNOWN_LENGTH` for a world
    model, which draws whole decisions; `steps` counts those that matter."""
    more_frames: Uint8 | None = None
    """``[N, V, H, W, 3]`` what the other cameras saw when `frames` were seen; None: there is one camera."""
    states: Float32 | None = None
    """``[N, Q]`` the robot's state when `frames` were seen; None: it is not known."""
    final_more_frames: Uint8 | None = None
    """``[V, H, W, 3]`` with `more_frames`: what they saw after the last step."""
    final_state: Float32 | None = None
    """``[Q]`` with `states`: the state after the last step."""

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
        """Count the steps until the end: `steps_taken` where that is said.

        Else a success ends with the last step that has a positive reward. A decision chooses C actions at
        once: those behind that step were drawn but changed nothing.
        """
        if self.steps_taken != UNKNOWN_LENGTH:
            return self.steps_taken
        rewarded = np.flatnonzero(self.rewards.reshape(-1) > 0)
        return int(rewarded[-1]) + 1 if self.success and rewarded.size else self.rewards.size

    @property
    def total_reward(self) -> float:
        """Sum the rewards until the end: the undiscounted return."""
        return float(self.rewards.reshape(-1)[: self.steps].sum())
