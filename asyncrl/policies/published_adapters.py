"""Adapters under published names: peft folders of OpenVLA in, merged weights out; ours out as such a folder.

Dimension letters:
    I, O  features into and out of a layer      r  rank
    A     ``[r, I]``                            B  ``[O, r]``
    Of a convolution, A is ``[r, I, h, w]`` and B ``[O, r, 1, 1]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.policies.adapter_files import CONFIG, PREFIX, TENSORS, adapter_settings
from asyncrl.policies.published import Row, qkv_rows
from asyncrl.policies.side_files import read_pt
from asyncrl.storage.atomic import read_json, write, write_json
from asyncrl.storage.weight_files import WeightFiles

PICKLED: Final = "adapter_model.bin"
_KIND = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
Pair = tuple[Tensor, Tensor]


def merge_adapter(files: WeightFiles, folder: Path) -> int:
    """Let every weight with an adapter be read as ``W + alpha / r * B A``: float32, rounded once to W's type.

    Args:
        files: Weights under the names that the adapter uses: published, or ours.
        folder: peft's `adapter_config.json` with `adapter_model.safetensors` (or `.bin`).

    Returns:
        Layers that have an adapter.

    Raises:
        CheckpointError: a file is missing or truncated, the adapter is of a kind that means something else,
            or it does not fit the weights.
    """
    settings = adapter_settings(folder / CONFIG, patterns=True)
    pairs = read_pairs(folder)
    unknown = sorted(layer for layer in pairs if f"{layer}.weight" not in files.names())
    if unknown:
        raise CheckpointError(
            f"{folder} has adapters for {len(unknown)} layers that {files.source} lacks: "
            f"{', '.join(unknown[:5])}. Give the checkpoint that the adapters were trained on."
        )
    for layer, (into, out) in pairs.items():
        shape = files.spec(f"{layer}.weight").shape
        fits = into.shape[1:] == shape[1:] and out.shape[0] == shape[0] and into.shape[0] == out.shape[1]
        expected = pattern_value(settings.rank_pattern, layer, settings.rank)
        if not fits or into.shape[0] != expected:
            raise CheckpointError(
                f"{folder}: the adapter of {layer} has shapes {list(into.shape)} and {list(out.shape)}, "
                f"which do not fit a weight {list(shape)} with rank {expected:g}. Give the checkpoint "
                "that the adapters were trained on."
            )
        scale = pattern_value(settings.alpha_pattern, layer, settings.alpha) / into.shape[0]
        files.changes[f"{layer}.weight"] = partial(_merged, into=into, out=out, scale=scale)
    return len(pairs)


def _merged(weight: Tensor, *, into: Tensor, out: Tensor, scale: float) -> Tensor:
    delta = out.flatten(1).float() @ into.flatten(1).float()
    return (weight.float() + scale * delta.view_as(weight)).to(weight.dtype)


def read_pairs(folder: Path) -> dict[str, Pair]:
    """A and B by layer.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is not of a pair.
    """
    if (folder / PICKLED).is_file() and not (folder / TENSORS).is_file():
        tensors = read_pt(folder / PICKLED)
    else:
        files = WeightFiles(folder / TENSORS)
        tensors = {name: files.read(name) for name in files.names()}
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KIND.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise CheckpointError(
                f"{folder} has tensor {name}, which is neither lora_A nor lora_B of a layer. Merge the "
                "adapter with peft and convert the merged checkpoint."
            )
        halves.setdefault(match["layer"], {})[match["which"]] = tensor
    lonely = [layer for layer, found in halves.items() if len(found) < 2]
    if lonely or not halves:
        raise CheckpointError(
            f"{folder} has {'only one of lora_A and lora_B for ' + lonely[0] if lonely else 'no adapters'}. "
            "Copy it again."
        )
    return {layer: (found["A"], found["B"]) for layer, found in halves.items()}


def pattern_value(pattern: Mapping[str, float], layer: str, default: float) -> float:
    """Value that peft's `rank_pattern` or `alpha_pattern` has for a layer: of the first key that fits it."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return default


# --- out ----------------------------------------------------------------------


def export_adapter(source: Path, folder: Path, rows: Sequence[Row]) -> int:
    """Write an adapter folder of ours (`save_adapter`) so that peft puts it on the published model.

    The published vision towers have one layer for query, key and value. Its adapter is made of ours exactly:
    A is the three A stacked, B has the three B on its diagonal; rank and alpha of these layers are three
    times the others' (`rank_pattern`, `alpha_pattern`), so the scale is the same.

    Args:
        source: Folder with adapters under our names.
        folder: Created when missing.
        rows: Of the policy, see `published.rows_of`.

    Returns:
        Layers that have an adapter.

    Raises:
        CheckpointError: the adapters are not of a policy of ours.
    """
    settings = adapter_settings(source / CONFIG)
    pairs = read_pairs(source)
    names = {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs, _ in rows}
    unknown = sorted(pairs.keys() - names.keys())
    if unknown:
        raise CheckpointError(
            f"{source} has adapters for layers that are not of asyncrl's policy, for example {unknown[0]}. "
            "Only adapters that asyncrl wrote can be exported."
        )
    fused = qkv_rows(rows)
    joined: dict[str, Pair] = {
        theirs: _stack(source, pairs, ours) for theirs, ours in fused.items() if ours[0] in pairs
    }
    inside = {name for ours in fused.values() for name in ours}
    joined |= {names[layer]: pair for layer, pair in pairs.items() if layer not in inside}
    tripled = [layer for layer in joined if layer in fused]
    fields = read_json(source / CONFIG) | {
        "target_modules": sorted(joined),
        "exclude_modules": None,
        "rank_pattern": {re.escape(layer): 3 * settings.rank for layer in tripled},
        "alpha_pattern": {re.escape(layer): 3 * settings.alpha for layer in tripled},
    }
    _write(folder, joined, fields)
    return len(joined)


def _stack(source: Path, pairs: Mapping[str, Pair], layers: Sequence[str]) -> Pair:
    missing = [layer for layer in layers if layer not in pairs]
    if missing:
        raise CheckpointError(
            f"{source} has an adapter for {layers[0]} but none for {missing[0]}, and the published "
            "model has one layer for query, key and value. Export the merged policy instead."
        )
    return torch.cat([pairs[layer][0] for layer in layers]), torch.block_diag(
        *(pairs[layer][1] for layer in layers)
    )


def _write(folder: Path, pairs: Mapping[str, Pair], fields: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for layer, (into, out) in pairs.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = into.contiguous()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = out.contiguous()
    write(folder / TENSORS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(folder / CONFIG, fields)
