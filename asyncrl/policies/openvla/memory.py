"""Estimate the memory of an OpenVLA policy's activations, from its sizes alone.

A token of a block of width D with an MLP of M leaves so many numbers of D and of M behind:

    acting, and what one block needs at a time       8 D + 3 M
    learning: what every block keeps for its backward 7 D + 3 M; with gradient checkpointing its input, D
    learning: what one block needs at a time         14 D + 6 M: computed again, and the gradients

Held against measurements in docs/measurements/run_speed.md (tests/doctor/test_memory.py).
"""

from __future__ import annotations

from typing import Final, Literal

from asyncrl.policies.openvla.config import OpenVLAOFTConfig

PROMPT: Final = 35
"""Tokens of a prompt of LIBERO."""
_REGISTERS: Final = 5
"""Class and register tokens of the first vision tower."""
_ACTING, _KEPT, _WORKING = (8, 3), (7, 3), (14, 6)


def activation_bytes(
    config: OpenVLAOFTConfig, rows: int, passes: Literal["acting", "checkpointed", "kept"], itemsize: int
) -> int:
    """Estimate what passes over some decisions need beside the weights.

    Args:
        config: Sizes of the policy.
        rows: Decisions in one pass.
        passes: acting: forward. checkpointed, kept: forward and backward, with gradient checkpointing or not.
        itemsize: Bytes of a number.

    Returns:
        Bytes.
    """
    patches = config.images * config.patches
    stacks = (  # tokens, width, MLP, blocks
        (patches + config.images * _REGISTERS, config.dino.width, config.dino.mlp, config.dino.depth),
        (patches, config.siglip.width, config.siglip.mlp, config.siglip.depth),
        (config.prefix + PROMPT + config.slots, config.llm_width, config.llm_mlp, config.llm_layers),
    )
    one_at_a_time = _ACTING if passes == "acting" else _WORKING
    working = max(tokens * _numbers(one_at_a_time, width, mlp) for tokens, width, mlp, _ in stacks)
    kept = {"acting": (0, 0), "checkpointed": (1, 0), "kept": _KEPT}[passes]
    for tokens, width, mlp, blocks in stacks:
        working += blocks * tokens * _numbers(kept, width, mlp)
    return rows * working * itemsize


def _numbers(counts: tuple[int, int], width: int, mlp: int) -> int:
    return counts[0] * width + counts[1] * mlp
