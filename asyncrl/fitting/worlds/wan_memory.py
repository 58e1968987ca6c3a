"""Let a Wan world draw the memories that it is fitted with: it imagines with its own, not with true ones.

A fit on true memories never sees how the world's own differ from them (by a mean square of 0.066 in the
shipped world, latents having variance 1), so errors grow from decision to decision. Here a part of the
windows gets the memory that the present network draws from the same start and the same actions, with the true
latents as the target still.

Letters: W windows, B episodes of a batch, z latent channels, h w latent grid, A numbers per action.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from asyncrl.fitting.worlds.wan_windows import Windows
from asyncrl.records import CHUNK
from asyncrl.seeds import recorded_noise_seed
from asyncrl.worlds.wan.state import WanState
from asyncrl.worlds.wan.world import CONTEXT, WanWorld

EPISODES_AT_ONCE: Final = 64


@torch.no_grad()
def with_own_memories(world: WanWorld, windows: Windows, share: float, seed: int) -> Windows:
    """Replace the memories of some windows by those that the world draws.

    Args:
        world: As it imagines, on the device of the windows.
        windows: Of true latents, with the actions that the network takes; episode by episode, each from its
            first decision on.
        share: Of the windows behind an episode's first decision, in [0, 1].
        seed: Of the choice and of the world's noise.

    Returns:
        As many windows, in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = _drawn_memories(world, windows, seed)
    first = windows.rows[:, 1] == windows.rows[:, 0] + 1  # Its memory is the latent behind the anchor.
    own = (torch.rand(len(windows), generator=generator) < share).to(first.device) & ~first
    count = int(own.sum())
    rows = windows.rows.clone()
    rows[own, 1] = len(windows.latents) + torch.arange(count, device=rows.device)
    return replace(windows, latents=torch.cat([windows.latents, drawn[own]]), rows=rows)


def _drawn_memories(world: WanWorld, windows: Windows, seed: int) -> Tensor:
    """Imagine every episode; returns the memory that each window would have: ``[W, z, h, w]``."""
    anchors = windows.rows[:, 0]
    begins = torch.nonzero(windows.rows[:, 1] == anchors + 1).flatten().tolist()
    ends = [*begins[1:], len(windows)]
    memories = windows.latents[windows.rows[:, 1]].clone()
    parts = range(0, len(begins), EPISODES_AT_ONCE)
    for part in tqdm(parts, desc="own memories", mininterval=2.0, delay=2):
        alive = list(zip(begins, ends, strict=True))[part : part + EPISODES_AT_ONCE]
        decision = 0
        while alive := [(begin, end) for begin, end in alive if begin + decision + 1 < end]:
            at = torch.tensor([begin + decision for begin, _ in alive], device=anchors.device)
            noise = [recorded_noise_seed(seed, begin, decision) for begin, _ in alive]
            memories[at + 1] = _denoised(world, windows, memories, at, noise)
            decision += 1
    return memories


def _denoised(
    world: WanWorld, windows: Windows, memories: Tensor, at_B: Tensor, noise_seeds: list[int]
) -> Tensor:
    """Draw what the decisions of some windows make of their memories: the last latent, ``[B, z, h, w]``."""
    actions_BTA = windows.actions[at_B]
    state = WanState(
        anchor=windows.latents[windows.rows[at_B, 0]].unsqueeze(2),
        memory=memories[at_B].unsqueeze(2),
        last_actions=actions_BTA[:, 1 : 1 + CONTEXT],
        finite=torch.ones(len(at_B), dtype=torch.bool, device=at_B.device),
        cache=[],
        encoder_cache=[],
    )
    return world.denoise(state, actions_BTA[:, -CHUNK:], noise_seeds)[:, :, -1]
