"""Read and write adapters alone, in peft's layout: `adapter_config.json`, `adapter_model.safetensors`.

Tensors are called ``base_model.model.<layer>.lora_A.weight`` ``[r, I]`` and ``...lora_B.weight`` ``[O, r]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.policies.checkpoints.published_names import TensorMapping, qkv_rows
from asyncrl.policies.checkpoints.published_policy import read_pt
from asyncrl.policies.lora import ADAPTER, Targets, add_lora, has_lora, is_adapter, target_layers
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.vision import stable_name
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.storage.tensor_writer import write_tensors
from asyncrl.storage.weight_files import compare_names

PICKLED: Final = "adapter_model.bin"
_KIND = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
Pair = tuple[Tensor, Tensor]


def merge_adapter(files: TensorFiles, folder: Path) -> int:
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
            f"{folder} has adapters for {len(unknown)} layers that {files.label} lacks: "
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
    """Read A ``[r, I]`` and B ``[O, r]`` by layer, in the dtype of the file.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is not of a pair.
    """
    if (folder / PICKLED).is_file() and not (folder / TENSORS).is_file():
        tensors = read_pt(folder / PICKLED)
    else:
        files = TensorFiles(folder / TENSORS)
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
    """Look a layer up in peft's `rank_pattern` or `alpha_pattern`: the first key that fits it counts."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return default


# --- out ----------------------------------------------------------------------


def export_adapter(source: Path, folder: Path, rows: Sequence[TensorMapping]) -> int:
    """Write an adapter folder of ours (`save_adapter`) so that peft puts it on the published model.

    The published vision towers have one layer for query, key and value. Its adapter is made of ours exactly:
    A is the three A stacked, B has the three B on its diagonal; rank and alpha of these layers are three
    times the others' (`rank_pattern`, `alpha_pattern`), so the scale is the same.

    Args:
        source: Folder with adapters under our names.
        folder: Created when missing.
        rows: Of the policy, see `published.tensor_map`.

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
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = into
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = out
    write_tensors(folder / TENSORS, tensors)
    write_json(folder / CONFIG, fields)


PREFIX: Final = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: Final = (
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "modules_to_save",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
"""Settings of peft that must be off: with them the same tensors mean another policy."""
_PATTERNS: Final = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What an `adapter_config.json` says about its tensors."""

    rank: int
    """``r``."""
    alpha: float
    """The adapters' output is scaled by ``alpha / r``."""
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    """Other ranks, by regular expression of layers."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Other alphas, by regular expression of layers."""


def save_adapter(
    policy: nn.Module, folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters, in their own dtype, as peft reads them; the value head is not among them.

    Args:
        policy: With adapters.
        folder: Created when missing.
        tensors: `adapter_tensors` copied before, for example gathered from shards, ``[r, I]`` and ``[O, r]``;
            None: the policy's.

    Raises:
        CheckpointError: the policy has no adapters.
    """
    if not has_lora(policy):
        raise CheckpointError("The policy has no adapters to write. Use save_policy, or add_lora first.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = adapter_tensors(policy) if tensors is None else tensors
    write_tensors(folder / TENSORS, {PREFIX + name: tensor for name, tensor in chosen.items()})
    fields = _settings(policy).to_dict() | {"inference_mode": True}
    write_json(folder / CONFIG, {k: sorted(v) if isinstance(v, set) else v for k, v in fields.items()})


def load_adapter(policy: OpenVLAOFT, folder: str | Path) -> None:
    """Read adapters into a policy, in place; a policy that has none gets those of the folder.

    Raises:
        CheckpointError: a file is missing or truncated, or the adapters are not of this policy, or of
            another rank, scale or kind than those that it has. The policy is unchanged then.
    """
    folder = Path(folder)
    settings = adapter_settings(folder / CONFIG)
    rank, alpha, file = settings.rank, settings.alpha, folder / TENSORS
    files = TensorFiles(file, rename=lambda name: name.removeprefix(PREFIX))
    tensors = {name: files.read(name) for name in files.names()}
    targets: Targets = "language" if all(name.startswith("llm.") for name in tensors) else "all"
    if has_lora(policy):
        own = _settings(policy)
        if (own.r, own.lora_alpha) != (rank, alpha):
            raise CheckpointError(
                f"{folder} holds adapters of rank {rank} and alpha {alpha:g}, but the policy's have rank "
                f"{own.r} and alpha {own.lora_alpha:g}. Set --lora.rank and --lora.alpha to the folder's."
            )
        expected = {name: p.shape for name, p in _adapters(policy).items()}
    else:
        expected = _shapes(policy, rank, targets)
    _check(file, tensors, expected)
    if not has_lora(policy):
        add_lora(policy, rank, alpha, targets)
    with torch.no_grad():
        for name, parameter in _adapters(policy).items():
            parameter.copy_(tensors[name])


def adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the adapters by stable name: A ``[r, I]`` and B ``[O, r]``, dtype kept, without gradient."""
    return {name: parameter.detach() for name, parameter in _adapters(policy).items()}


def _adapters(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {stable_name(name): p for name, p in policy.named_parameters() if is_adapter(name)}


def _settings(policy: nn.Module) -> Any:
    """Return the LoraConfig that peft left in the policy."""
    return policy.peft_config[ADAPTER]  # type: ignore[index]


def _shapes(policy: OpenVLAOFT, rank: int, targets: Targets) -> dict[str, torch.Size]:
    """Compute the shapes of the adapters' tensors before there are any."""
    shapes: dict[str, torch.Size] = {}
    for name, layer in target_layers(policy, targets).items():
        stable = stable_name(f"{name}.")
        shapes[f"{stable}lora_A.weight"] = torch.Size((rank, layer.in_features))
        shapes[f"{stable}lora_B.weight"] = torch.Size((layer.out_features, rank))
    return shapes


def adapter_settings(file: Path, *, patterns: bool = False) -> AdapterSettings:
    """Read an `adapter_config.json`.

    Args:
        file: The file.
        patterns: Whether layers may have ranks and alphas of their own.

    Raises:
        CheckpointError: it is missing, is not of LoRA, or has settings that change what the tensors mean.
    """
    fields = read_json(file)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file} is of kind {fields.get('peft_type')!r}, but asyncrl's adapters are LORA. Merge it into "
            "the policy with peft and load the merged policy."
        )
    refused = _PLAIN if patterns else (*_PLAIN, *_PATTERNS)
    used = [name for name in refused if fields.get(name)]
    used += ["bias"] if fields.get("bias", "none") != "none" else []
    if used:
        raise CheckpointError(
            f"{file} sets {', '.join(used)}, which changes what the adapters mean and is not supported. "
            "Merge them into the policy with peft and load the merged policy."
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    ranks, alphas = (_pattern(file, name, fields.get(name) or {}) for name in _PATTERNS)
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0 and alpha > 0):
        raise CheckpointError(f"{file} has rank (r) {rank} and lora_alpha {alpha}. Copy it again.")
    return AdapterSettings(rank=rank, alpha=float(alpha), rank_pattern=ranks, alpha_pattern=alphas)


def _pattern(file: Path, name: str, pattern: Any) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in pattern.items() if re.compile(key)}
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"{file} has a {name} that cannot be read ({error}). Copy it again.") from error


def _check(file: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    compare_names(file, tensors.keys(), expected.keys(), allowed=expected.keys())
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}. The "
                "adapters belong to another policy or rank: use the policy they were trained on."
            )
