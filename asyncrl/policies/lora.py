"""Low-rank adapters (peft) inside a policy or world: ``W x`` becomes ``W x + alpha / r * B A x``.

The layers are exchanged in place: the policy keeps its class. Policy folders hold the merged weights; adapter
folders (`adapter_config.json`, `adapter_model.safetensors`) are peft's.

Dimension letters:
    I, O  features into and out of a linear layer      r  rank
    A     ``[r, I]``                                   B  ``[O, r]``
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.openvla.files import read_pt
from asyncrl.policies.openvla.names import TensorMapping
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_files import TensorFiles
from asyncrl.storage.weight_files import write_tensors

Targets = Literal["language", "all"]
ADAPTER: Final = "default"
"""peft's key of the adapters; it appears in no file and no broadcast."""
PREFIX: Final = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_ADAPTER_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_LLAMA: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEARS: Final = {
    "llm.layers.": _LLAMA,
    "projector.": ("fc1", "fc2", "fc3"),
    "vision.dino.encoder.": ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
    "vision.siglip.encoder.": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
"""Last parts of the names of OpenVLA's linear layers that get adapters, by part of the policy."""
_UNSUPPORTED: Final = (
    *("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias"),
    *("target_parameters", "trainable_token_indices", "layer_replication"),
)
"""Settings of peft that change the meaning of the tensors."""


def add_lora(
    policy: Any, rank: int, alpha: float, targets: Targets = "all", *, dtype: torch.dtype = torch.float32
) -> None:
    """Put adapters into the policy, in place. Only they and the value head are trainable afterwards.

    B is zero, so the policy acts as before; A is random (torch's generator) and there is no dropout. The
    output layer (`lm_head`) gets no adapter: only its 256 action rows are ever multiplied. Nor do the two
    patch embeddings, which are convolutions.

    Args:
        rank: ``r``.
        alpha: The adapters' output is scaled by ``alpha / rank``; 0 = rank.
        dtype: Of the adapters, independent of the weights' below.

    Raises:
        ConfigError: A setting is invalid, the policy already has adapters, or it lacks a layer.
    """
    if rank < 1 or not alpha >= 0:
        raise ConfigError(
            f"Adapters of rank {rank} with alpha {alpha} cannot be made: the rank counts directions and "
            "alpha is a scale. Use --lora.rank 32 and --lora.alpha 0 (the rank)."
        )
    if targets not in ("language", "all"):
        raise ConfigError(f"--lora.targets is {targets!r}, but adapters go into: language, all. Use all.")
    if has_lora(policy):
        raise ConfigError(
            "The policy already has adapters, and a second set would train on top of them. Load the policy "
            "again, or go on with the adapters that it has."
        )
    adapt(policy, set(policy.lora_layers(targets)), rank, alpha, dtype=dtype)
    for name, parameter in policy.named_parameters():
        if not is_adapter(name) and name.startswith(policy.critic_prefix):
            parameter.requires_grad_(True)


def adapt(
    network: Any, layers: Set[str], rank: int, alpha: float, *, dtype: torch.dtype = torch.float32
) -> None:
    """Put adapters into linear layers (names of `named_modules`) in place; they alone are trainable then."""
    from peft import LoraConfig, inject_adapter_in_model

    kinds = {name.rpartition(".")[2] for name in layers}
    others = [
        name
        for name, module in network.named_modules()
        if name.rpartition(".")[2] in kinds and isinstance(module, nn.Linear) and name not in layers
    ]
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha or rank,  # type: ignore[arg-type]  # peft divides it by the rank, whole or not
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(layers if others else kinds),
    )
    inject_adapter_in_model(settings, network, ADAPTER)
    for name, parameter in network.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def target_layers(policy: nn.Module, targets: Targets) -> list[str]:
    """Return the names in `named_modules` of OpenVLA's linear layers that get adapters."""
    linears = {
        name: stable_name(f"{name}.") for name, m in policy.named_modules() if isinstance(m, nn.Linear)
    }
    targeted: list[str] = []
    for part in ["llm.layers."] if targets == "language" else LINEARS:
        for kind in LINEARS[part]:
            layers = [
                name
                for name, stable in linears.items()
                if stable.startswith(part) and stable.endswith(f".{kind}.")
            ]
            if not layers:
                raise ConfigError(
                    f"--lora.targets is {targets}, but the policy has no linear layer {part}*.{kind}: its "
                    "adapters would be fewer than asked for. Use --lora.rank 0, or a version of transformers "
                    "that asyncrl supports."
                )
            targeted += layers
    return targeted


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def has_lora(policy: nn.Module) -> bool:
    """Return True if the policy has adapters."""
    return next(_adapted(policy), None) is not None


def _adapted(policy: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters, by their names in `named_modules`. Needs no peft."""
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@contextmanager
def adapters_disabled(policy: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block, so that the policy computes as before training.

    Only a flag of each layer changes, so it works on sharded policies too. Run no backward pass of an
    earlier forward pass inside: recomputed activations would lack the adapters.
    """
    layers = [layer for _, layer in _adapted(policy)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would change what is trainable as well
    try:
        yield
    finally:
        for layer, flag in zip(layers, before, strict=True):
            layer._disable_adapters = flag


# --- merging ------------------------------------------------------------------


def merged_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their adapters merged, by stable name, in their shape and dtype.

    A merged weight needs the memory of one layer; the other tensors share memory with the parameters. Sharded
    weights stay sharded, and every rank must take every tensor.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted(policy)}
    for name, parameter in policy.named_parameters():
        if not is_adapter(name):
            layer = layers.get(name)
            yield stable_name(name), parameter.detach() if layer is None else _merged_weight(layer)


def _merged_weight(layer: Any) -> Tensor:
    """Compute ``W + alpha / r * B A``: ``[O, I]``, in float32, rounded to the dtype of W."""
    from torch.distributed.tensor import DTensor  # takes a second to import

    weight = layer.base_layer.weight.detach()
    into, out = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
    if not isinstance(weight, DTensor):
        into, out = (t.full_tensor() if isinstance(t, DTensor) else t for t in (into, out))
    merged = weight.float() + layer.scaling[ADAPTER] * (out.float() @ into.float())
    return merged.to(weight.dtype)


# --- files --------------------------------------------------------------------


def save_adapter(
    policy: nn.Module, folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters in peft's layout and their own dtype, without the value head.

    Args:
        tensors: Copies of `adapter_tensors`, gathered from shards; None: the policy's.
    """
    if not has_lora(policy):
        raise CheckpointError("The policy has no adapters to write. Use save, or add_lora first.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = adapter_tensors(policy) if tensors is None else tensors
    write_tensors(folder / TENSORS, {PREFIX + name: tensor for name, tensor in chosen.items()})
    settings: Any = policy.peft_config[ADAPTER]  # type: ignore[index]  # where peft stored it
    fields = settings.to_dict() | {"inference_mode": True}
    write_json(folder / CONFIG, {k: sorted(v) if isinstance(v, set) else v for k, v in fields.items()})


def adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the adapters by stable name: A ``[r, I]`` and B ``[O, r]``, dtype kept, without gradient."""
    return {stable_name(name): p.detach() for name, p in policy.named_parameters() if is_adapter(name)}


# --- adapters of policy folders -------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    into: Tensor
    """A ``[r, I]``."""
    out: Tensor
    """B ``[O, r]``."""
    scale: float


def merge_adapter(files: TensorFiles, rows: Sequence[TensorMapping], folder: Path) -> int:
    """Make the source's weights read as ``W + alpha / r * B A``: in float32, rounded once to W's dtype.

    Returns:
        Layers with an adapter.
    """
    pairs = read_pairs(folder)
    if not all(f"{layer}.weight" in files.names() for layer in pairs):
        pairs = _published_pairs(folder, pairs, rows)
    unknown = sorted(layer for layer in pairs if f"{layer}.weight" not in files.names())
    if unknown:
        raise CheckpointError(
            f"{folder} has adapters for {len(unknown)} layers that {files.label} lacks: "
            f"{', '.join(unknown[:5])}. Give the checkpoint that the adapters were trained on."
        )
    for layer, pair in pairs.items():
        shape = files.spec(f"{layer}.weight").shape
        if pair.into.shape[1:] != shape[1:] or pair.out.shape[0] != shape[0]:
            raise CheckpointError(
                f"{folder}: the adapter of {layer} has shapes {list(pair.into.shape)} and "
                f"{list(pair.out.shape)}, which do not fit a weight {list(shape)}. Give the checkpoint that "
                "the adapters were trained on."
            )
        files.changes[f"{layer}.weight"] = partial(_merged, pair=pair)
    return len(pairs)


def _merged(weight: Tensor, *, pair: _Pair) -> Tensor:
    delta = pair.out.flatten(1).float() @ pair.into.flatten(1).float()
    return (weight.float() + pair.scale * delta.view_as(weight)).to(weight.dtype)


def read_pairs(folder: Path) -> dict[str, _Pair]:
    """Read the adapters by layer, in the dtype of the file; raises CheckpointError for an incomplete one."""
    fields = _adapter_fields(folder)
    ranks, alphas = (
        _pattern(folder, name, fields.get(name) or {}) for name in ("rank_pattern", "alpha_pattern")
    )
    if (folder / _PICKLED).is_file() and not (folder / TENSORS).is_file():
        tensors = read_pt(folder / _PICKLED)
    else:
        files = TensorFiles(folder / TENSORS)
        tensors = {name: files.read(name) for name in files.names()}
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _ADAPTER_NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise CheckpointError(
                f"{folder} has tensor {name}, which is neither lora_A nor lora_B of a layer. Merge the "
                "adapter with peft and convert the merged checkpoint."
            )
        halves.setdefault(match["layer"], {})[match["which"]] = tensor
    lonely = [layer for layer, half in halves.items() if len(half) < 2]
    if lonely or not halves:
        raise CheckpointError(
            f"{folder} has {'only one of lora_A and lora_B for ' + lonely[0] if lonely else 'no adapters'}. "
            "Copy it again."
        )
    pairs: dict[str, _Pair] = {}
    for layer, half in halves.items():
        into, out, rank = half["A"], half["B"], pattern_value(ranks, layer, fields["r"])
        if not into.shape[0] == out.shape[1] == rank:
            raise CheckpointError(
                f"{folder}: the adapter of {layer} has shapes {list(into.shape)} and {list(out.shape)}, "
                f"which do not fit with rank {rank:g}. Copy it again."
            )
        pairs[layer] = _Pair(into, out, pattern_value(alphas, layer, fields["lora_alpha"]) / rank)
    return pairs


def _pattern(folder: Path, name: str, pattern: Any) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in pattern.items() if re.compile(key)}
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(
            f"{folder / CONFIG} has a {name} that cannot be read ({error}). Copy it again."
        ) from error


def _adapter_fields(folder: Path) -> dict[str, Any]:
    """Read an `adapter_config.json` whose tensors mean ``W + alpha / r * B A``."""
    file = folder / CONFIG
    fields = read_json(file)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file} is of kind {fields.get('peft_type')!r}, but asyncrl's adapters are LORA. Merge it into "
            "the policy with peft and load the merged policy."
        )
    used = [name for name in _UNSUPPORTED if fields.get(name)]
    used += ["bias"] if fields.get("bias", "none") != "none" else []
    if used:
        raise CheckpointError(
            f"{file} sets {', '.join(used)}, which changes what the adapters mean and is not supported. "
            "Merge them into the policy with peft and load the merged policy."
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0 and alpha > 0):
        raise CheckpointError(f"{file} has rank (r) {rank} and lora_alpha {alpha}. Copy it again.")
    return fields


def pattern_value(pattern: Mapping[str, float], layer: str, default: float) -> float:
    """Look a layer up in peft's `rank_pattern` or `alpha_pattern`: the first key that fits it counts."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def export_adapter(source: Path, folder: Path, rows: Sequence[TensorMapping]) -> int:
    """Write an adapter folder of `save_adapter` so that peft puts it on the published model.

    The published vision towers have one layer for query, key and value. Its adapter is made of ours exactly:
    A is the three A stacked, B has the three B on its diagonal; rank and alpha of these layers are three
    times the others' (`rank_pattern`, `alpha_pattern`), so the scale is the same.

    Returns:
        Layers with an adapter.

    Raises:
        CheckpointError: The adapters are not of a policy of asyncrl.
    """
    pairs, fields = read_pairs(source), read_json(source / CONFIG)
    known = {ours.removesuffix(".weight") for ours, _, _ in rows}
    if unknown := sorted(pairs.keys() - known):
        raise CheckpointError(
            f"{source} has adapters for layers that are not of asyncrl's policy, for example {unknown[0]}. "
            "Only adapters that asyncrl wrote can be exported."
        )
    joined = _published_pairs(source, pairs, rows)
    tripled = [re.escape(layer) for layer, pair in joined.items() if len(pair.into) == 3 * fields["r"]]
    fields |= {
        "target_modules": sorted(joined),
        "exclude_modules": None,
        "rank_pattern": dict.fromkeys(tripled, 3 * fields["r"]),
        "alpha_pattern": dict.fromkeys(tripled, 3 * fields["lora_alpha"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    halves = {f"{PREFIX}{layer}.lora_A.weight": pair.into for layer, pair in joined.items()}
    halves |= {f"{PREFIX}{layer}.lora_B.weight": pair.out for layer, pair in joined.items()}
    write_tensors(folder / TENSORS, halves)
    write_json(folder / CONFIG, fields)
    return len(joined)


def _published_pairs(
    source: Path, pairs: Mapping[str, _Pair], rows: Sequence[TensorMapping]
) -> dict[str, _Pair]:
    """Rename adapters from the policy's layers to the published ones; those of q, k and v are joined."""
    layers: dict[str, list[str]] = {}
    for ours, theirs, _ in rows:
        if ours.endswith(".weight"):
            layers.setdefault(theirs.removesuffix(".weight"), []).append(ours.removesuffix(".weight"))
    joined: dict[str, _Pair] = {}
    for theirs, parts in layers.items():
        present = [pairs[layer] for layer in parts if layer in pairs]
        if present and len(present) < len(parts):
            raise CheckpointError(
                f"{source} has an adapter for some of {', '.join(parts)}, and the published model has one "
                "layer for query, key and value. Export the merged policy instead."
            )
        if len(present) > 1:
            stacked = torch.cat([pair.into for pair in present])
            joined[theirs] = _Pair(
                stacked, torch.block_diag(*(pair.out for pair in present)), present[0].scale
            )
        elif present:
            joined[theirs] = present[0]
    inside = {layer for parts in layers.values() for layer in parts}
    return joined | {layer: pair for layer, pair in pairs.items() if layer not in inside}
