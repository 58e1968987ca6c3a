"""Imagine in batches of a fixed number of rows, as compiled networks want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.records import ActionSpec
from asyncrl.worlds.interface import State

USUAL: Final = ActionSpec()


def imagine_full(
    imagine: Callable[[State, Tensor, Sequence[int]], tuple[Tensor, State]],
    state: State,
    actions: Tensor | NDArray[np.float32],
    noise_seeds: Sequence[int],
    *,
    rows: int,
    device: torch.device,
    spec: ActionSpec = USUAL,
) -> tuple[Tensor, State]:
    """Check a decision, fill it up with copies of its first row, and leave out what they became.

    Args:
        imagine: Draws a decision from a state, actions ``[B, C, A]`` float32 on `device` and ``B`` seeds.
        state: Of ``B`` slots.
        actions: ``[B, C, A]`` float32, on any device.
        noise_seeds: ``B`` seeds.
        rows: Slots that a batch has at least; 0: as many as there are.
        device: Of the world.
        spec: ``C`` and ``A`` of the world.

    Returns:
        What `imagine` returns for the ``B`` slots.

    Raises:
        ValueError: Actions or seeds are not those of the slots.
    """
    if not isinstance(actions, Tensor):
        actions = torch.from_numpy(np.array(actions, dtype=np.float32))  # a copy, for it may be read-only
    actions_BCA = actions.to(device, torch.float32, non_blocking=True)
    live = len(state)
    if actions_BCA.shape != (live, spec.chunk, spec.dim) or len(noise_seeds) != live:
        raise ValueError(
            f"{live} slots need actions [{live}, {spec.chunk}, {spec.dim}] and as many seeds, "
            f"got {list(actions_BCA.shape)} and {len(noise_seeds)}"
        )
    if live >= rows:
        return imagine(state, actions_BCA, noise_seeds)
    taken = [*range(live), *[0] * (rows - live)]
    filled = torch.cat([actions_BCA, actions_BCA[:1].expand(rows - live, -1, -1)])
    frames, after = imagine(state.select(taken), filled, [noise_seeds[row] for row in taken])
    return frames[:live], after.select(range(live))
