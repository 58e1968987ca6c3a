"""Decisions that nobody made, of exactly the shapes and types that those of a run have.

Only shapes matter of them: pictures are black, samples are zeros.

Dimension letters used in this file:
    D  decisions      C  steps per decision      A  numbers per step      H, W  image size in pixels
    V  cameras beside the first                  Q  numbers of state
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.episode_layout import ArraySpec
from asyncrl.learner.batches import Batch
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.replay.episode_format import EpisodeFormat


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What decisions of a run look at. Rank 0 knows it and tells the other learner ranks."""

    image_size: int
    """Height and width of all pictures in pixels."""
    tasks: tuple[str, ...]
    """All instructions, each once."""
    more_cameras: int = 0
    """``V``."""
    state_dim: int = 0
    """``Q``; 0: the policy is shown none."""

    def to_json(self) -> str:
        """Write it as the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Read what `to_json` wrote; an empty text: it is not known."""
        if not text:
            return None
        plain = json.loads(text)
        return cls(**{**plain, "tasks": tuple(plain["tasks"])})


def shown_of(episodes: EpisodeFormat) -> Shown | None:
    """Return what decisions of such episodes look at; None where pictures or instructions are not known."""
    simulator = episodes.simulator
    named = (
        simulator.tasks if simulator is not None else [t for some in episodes.tasks.values() for t in some]
    )
    if not episodes.image_size or not named:
        return None
    return Shown(
        image_size=episodes.image_size,
        tasks=tuple(sorted(set(named))),
        more_cameras=simulator.more_cameras if simulator is not None else 0,
        state_dim=simulator.state_dim if simulator is not None else 0,
    )


def has_known_sizes(policy: Policy) -> bool:
    """Tell whether all arrays of the policy's samples have sizes that it says before anything is decided."""
    return all(
        isinstance(size, int) or size in ("C", "A")
        for spec in policy.sample_arrays.values()
        for size in spec.shape[1:]
    )


def placeholder_batch(policy: Policy, shown: Shown, tasks: Sequence[str], sampling: SamplingParams) -> Batch:
    """Make a batch of one decision per instruction.

    Args:
        tasks: ``D`` instructions; each decision is an episode of its own.

    Returns:
        ``D`` decisions, with shapes and types as in `build_batch`.
    """
    decisions, spec = len(tasks), policy.action_spec
    frames = np.zeros((decisions, shown.image_size, shown.image_size, 3), np.uint8)
    more = np.repeat(frames[:, None], shown.more_cameras, axis=1) if shown.more_cameras else None
    states = np.zeros((decisions, shown.state_dim), np.float32) if shown.state_dim else None
    rows_D = torch.arange(decisions)
    return Batch(
        frames=frames,
        tasks=tuple(tasks),
        sample=_samples(policy.sample_arrays, decisions, {"C": spec.chunk, "A": spec.dim}),
        logprob_behaviour=torch.zeros(decisions, spec.chunk, spec.dim),
        mask=torch.ones(decisions, spec.chunk, spec.dim, dtype=torch.bool),
        rewards=torch.zeros(decisions, spec.chunk),
        lag=torch.zeros_like(rows_D),
        episode=rows_D,
        decision_index=torch.zeros_like(rows_D),
        returns=torch.zeros(decisions),
        lengths=torch.full_like(rows_D, spec.chunk),
        terminated=torch.zeros(decisions, dtype=torch.bool),
        final_frames=frames,
        more_frames=more,
        states=states,
        final_more_frames=more,
        final_states=states,
        group_size=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
    )


def _samples(specs: Mapping[str, ArraySpec], decisions: int, letters: Mapping[str, int]) -> dict[str, Tensor]:
    """Name -> zeros ``[D, ...]``; integers as int64, as `build_batch` gives them."""
    return {
        name: torch.zeros(
            decisions,
            *(size if isinstance(size, int) else letters[size] for size in spec.shape[1:]),
            dtype=torch.float32 if spec.dtype.startswith("float") else torch.int64,
        )
        for name, spec in specs.items()
    }
