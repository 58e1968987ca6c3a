"""Names of tensors in the published Wan files to ours and back, and the fingerprint of such files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

PREFIX: Final = "pipe.dit."
"""Stands in front of a transformer's names in some files."""


def fingerprint(shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash names and shapes as DiffSynth does: MD5 of all "name:d0_d1" and "name", sorted, joined by commas.

    Example:
        >>> fingerprint({"a": (2, 3)}) == hashlib.md5(b"a,a:2_3", usedforsecurity=False).hexdigest()
        True
    """
    words = [f"{name}:{'_'.join(map(str, shape))}" for name, shape in shapes.items()] + list(shapes)
    return hashlib.md5(",".join(sorted(words)).encode(), usedforsecurity=False).hexdigest()


_OUTSIDE: Final = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_IN_BLOCK: Final = {
    **{f"self_attn.{letter}": f"attn1.to_{letter}" for letter in "qkv"},
    **{f"cross_attn.{letter}": f"attn2.to_{letter}" for letter in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "self_attn": "attn1",
    "cross_attn": "attn2",
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_OUTSIDE_BACK: Final = {ours: published for published, ours in _OUTSIDE.items()}
_IN_BLOCK_BACK: Final = {ours: published for published, ours in _IN_BLOCK.items()}


def _replace_start(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def _rename(name: str, outside: dict[str, str], in_block: dict[str, str]) -> str:
    if not name.startswith("blocks."):
        return _replace_start(name, outside)
    blocks, number, rest = name.split(".", 2)
    return f"{blocks}.{number}.{_replace_start(rest, in_block)}"


def transformer_from_published(name: str) -> str:
    """Map a tensor name of a published checkpoint to ours.

    Example:
        >>> transformer_from_published("blocks.3.self_attn.o.bias")
        'blocks.3.attn1.to_out.0.bias'
    """
    return _rename(name.removeprefix(PREFIX), _OUTSIDE, _IN_BLOCK)


def transformer_to_published(name: str) -> str:
    """Map one of our tensor names to the published one; the inverse of `transformer_from_published`."""
    return _rename(name, _OUTSIDE_BACK, _IN_BLOCK_BACK)


_RESIDUAL: Final = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_ENDS: Final = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
_MIDDLE: Final = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}


def _swap(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def vae_from_published(name: str) -> str:
    """Map a tensor name of ``Wan2.2_VAE.pth`` to ours.

    Example:
        >>> vae_from_published("decoder.upsamples.0.upsamples.3.time_conv.bias")
        'decoder.up_blocks.0.upsampler.time_conv.bias'
    """
    if not name.startswith(("encoder.", "decoder.")):
        return _swap(name, {"conv1": "quant_conv", "conv2": "post_quant_conv"})
    side, rest = name.split(".", 1)
    if match := re.fullmatch(r"middle\.(\d)\.(.+)", rest):
        return f"{side}.mid_block.{_MIDDLE[match[1]]}.{_swap(match[2], _RESIDUAL)}"
    if match := re.fullmatch(r"(down|up)samples\.(\d)\.(?:down|up)samples\.(\d)\.(.+)", rest):
        way, level, place, inner = match.groups()
        resamples = inner.startswith(("resample.", "time_conv."))
        module = f"{way}sampler" if resamples else f"resnets.{place}"
        return f"{side}.{way}_blocks.{level}.{module}.{_swap(inner, _RESIDUAL)}"
    return f"{side}.{_swap(rest, _ENDS)}"


def vae_to_published(name: str, *, res_blocks: int = 2) -> str:
    """Map one of our tensor names to the published one; the inverse of `vae_from_published`."""
    if not name.startswith(("encoder.", "decoder.")):
        return _swap(name, {"quant_conv": "conv1", "post_quant_conv": "conv2"})
    side, rest = name.split(".", 1)
    if rest.startswith("mid_block."):
        place, inner = _swap(rest.removeprefix("mid_block."), _inverse(_MIDDLE)).split(".", 1)
        return f"{side}.middle.{place}.{_swap(inner, _inverse(_RESIDUAL))}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d)\.(?:resnets\.(\d)|(?:down|up)sampler)\.(.+)", rest):
        way, level, place, inner = match.groups()
        last = res_blocks if way == "down" else res_blocks + 1
        stages = f"{way}samples.{level}.{way}samples.{place or last}"
        return f"{side}.{stages}.{_swap(inner, _inverse(_RESIDUAL))}"
    return f"{side}.{_swap(rest, _inverse(_ENDS))}"
