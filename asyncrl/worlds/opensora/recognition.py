"""Tell whether a folder holds an OpenSora world as published: by the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.storage.tensor_names import names_in

MARKS: Final = (
    "x_embedder.proj.weight",
    "spatial_blocks.0.attn.qkv.weight",
    "temporal_blocks.0.attn.qkv.weight",
)
"""Tensors that every STDiT3 has, and no other world or policy."""


def lacks(folder: Path) -> str:
    """Say what a folder lacks to hold an STDiT3, empty if it holds one; torn files count as whole."""
    names = names_in(folder)
    absent = next((name for name in MARKS if name not in names), "")
    return f"no tensor {absent} in its *.safetensors" if absent else ""
