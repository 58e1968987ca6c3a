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
from asyncrl.observability import process_status
from asyncrl.records import CHUNK
from asyncrl.seeds import recorded_noise_seed
from asyncrl.worlds.wan.state import WanState
from asyncrl.worlds.wan.world import CONTEXT, WanWorld

EPISODES_AT_ONCE: Final = 64


@torch.no_grad()
def with_own_memories(world: WanWorld, windows: Windows, share: float, seed: int) -> Windows:
    """Replace the memories of some windows by those that the world draws.

    They are of whole episodes, chosen by chance until as many windows are replaced: each decision's memory is
    drawn from the one before, so that some windows of every episode would cost as much as all of them.

    Args:
        world: As it imagines, on the device of the windows.
        windows: Of true latents, with the actions that the network takes; episode by episode, each from its
            first decision on.
        share: Of the windows behind an episode's first decision, in [0, 1].
        seed: Of the choice and of the world's noise.

    Returns:
        As many windows, in the same order.
    """
    episodes = _chosen(_episodes(windows), share, torch.Generator().manual_seed(seed))
    memories = _drawn_memories(world, windows, episodes, seed)
    own = (
        torch.cat([torch.arange(begin + 1, end) for begin, end in episodes]) if episodes else torch.arange(0)
    )
    own = own.to(windows.rows.device)
    rows = windows.rows.clone()
    rows[own, 1] = len(windows.latents) + torch.arange(len(own), device=rows.device)
    return replace(windows, latents=torch.cat([windows.latents, memories[own]]), rows=rows)


def _episodes(windows: Windows) -> list[tuple[int, int]]:
    """Find the first window of each episode and the one behind its last."""
    # The memory of a first window is the latent behind the anchor.
    begins = torch.nonzero(windows.rows[:, 1] == windows.rows[:, 0] + 1).flatten().tolist()
    return list(zip(begins, [*begins[1:], len(windows)], strict=True))


def _chosen(
    episodes: list[tuple[int, int]], share: float, generator: torch.Generator
) -> list[tuple[int, int]]:
    """Choose episodes that have the share of all windows but the first ones, as nearly as it can be."""
    wanted = share * sum(end - begin - 1 for begin, end in episodes)
    found = list[tuple[int, int]]()
    for number in torch.randperm(len(episodes), generator=generator).tolist():
        begin, end = episodes[number]
        if end - begin - 1 <= 2 * wanted:  # More than half of it is missing.
            found.append((begin, end))
            wanted -= end - begin - 1
    return sorted(found)


def _drawn_memories(world: WanWorld, windows: Windows, episodes: list[tuple[int, int]], seed: int) -> Tensor:
    """Imagine episodes; returns the memory of each window, drawn where it is theirs: ``[W, z, h, w]``."""
    memories = windows.latents[windows.rows[:, 1]].clone()
    device = windows.rows.device
    parts = range(0, len(episodes), EPISODES_AT_ONCE)
    for part in tqdm(parts, desc="own memories", mininterval=2.0, delay=2):
        alive = episodes[part : part + EPISODES_AT_ONCE]
        decision = 0
        while alive := [(begin, end) for begin, end in alive if begin + decision + 1 < end]:
            at = torch.tensor([begin + decision for begin, _ in alive], device=device)
            noise = [recorded_noise_seed(seed, begin, decision) for begin, _ in alive]
            memories[at + 1] = _denoised(world, windows, memories, at, noise)
            process_status.progress()
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
