"""Compiling the blocks of a policy: one graph per kind of block and way to call it, not one per block."""

from __future__ import annotations

from typing import Final

from asyncrl.policies.memory import blocks
from asyncrl.policies.openvla_oft import OpenVLAOFT

GRAPHS: Final = 64
"""Graphs that one piece of code may have. Checkpointed blocks of all three kinds share a piece, and each has
graphs with and without gradient, padding, adapters, and for sizes that vary. Beyond its limit, by default 8,
the compiler runs such code uncompiled without an error."""


def compile_blocks(policy: OpenVLAOFT, *, dynamic: bool | None = None) -> None:
    """Compile vision blocks and Llama layers in place, at their first calls.

    Args:
        policy: Finished: adapters and gradient checkpointing are there or will never be.
        dynamic: Whether graphs are for any size: False: none is, None: those of which a second size comes.
    """
    from torch._dynamo import config  # takes a second to import

    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    for block in blocks(policy):
        block.compile(dynamic=dynamic)
