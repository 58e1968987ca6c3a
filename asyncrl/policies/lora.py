"""Low-rank adapters (peft) inside a policy or world: ``W x`` becomes ``W x + alpha / r * B A x``.

Policy folders hold the merged weights; adapter folders are peft's. Dimension letters: I, O features into and
out of a linear layer, r rank; A is ``[r, I]``, B ``[O, r]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.policies.openvla.files import read_pt
from asyncrl.policies.openvla.names import TensorMapping
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_files import TensorFiles, write_tensors
from asyncrl.storage.untrusted import check_types

Targets = Literal["language", "all"]
ADAPTER: Final = "default"  # peft's key of the adapters; it appears in no file and no broadcast.
PREFIX: Final = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_SETTINGS: Final = (
    "r lora_alpha rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform "
    "layers_pattern lora_dropout inference_mode task_type peft_type peft_version auto_mapping revision "
    "base_model_name_or_path init_lora_weights eva_config corda_config loftq_config lora_ga_config"
)
"""Settings of peft that do not change what the tensors mean; all others must have peft's defaults."""
_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged; others (PiSSA) change them."""


def add_lora(
    policy: Any, rank: int, alpha: float, targets: Targets = "all", *, dtype: torch.dtype = torch.float32
) -> None:
    """Put adapters into the policy, in place; only they and the value head are trainable afterwards.

    B is zero, so the policy acts as before. The output is scaled by ``alpha / rank``; alpha 0: rank.
    """
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


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def has_lora(policy: nn.Module) -> bool:
    """Return True if the policy has adapters."""
    return next(_adapted(policy), None) is not None


def _adapted(policy: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@contextmanager
def adapters_disabled(policy: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block; run no backward pass of an earlier forward pass inside."""
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
    """Yield parameters by stable name, adapters merged; every rank of a sharded policy must take all."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted(policy)}
    for name, parameter in policy.named_parameters():
        if not is_adapter(name):
            layer = layers.get(name)
            yield stable_name(name), parameter.detach() if layer is None else _merged_weight(layer)


def _merged_weight(layer: Any) -> Tensor:
    from torch.distributed.tensor import DTensor  # takes a second to import

    weight = layer.base_layer.weight.detach()
    into, out = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
    if not isinstance(weight, DTensor):
        into, out = (t.full_tensor() if isinstance(t, DTensor) else t for t in (into, out))
    return _merged(weight, pair=_Pair(into, out, layer.scaling[ADAPTER]))


class _Pair(NamedTuple):
    into: Tensor  # A [r, I].
    out: Tensor  # B [O, r].
    scale: float


def _merged(weight: Tensor, *, pair: _Pair) -> Tensor:
    """Compute ``W + alpha / r * B A``: ``[O, I]``, in float32, rounded once to the dtype of W."""
    into, out = pair.into.flatten(1).float(), pair.out.flatten(1).float()
    return (weight.flatten(1).float() + pair.scale * (out @ into)).to(weight.dtype).view_as(weight)


# --- files --------------------------------------------------------------------


def save_adapter(
    policy: nn.Module, folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters in peft's layout and their own dtype, without the value head."""
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


def merge_adapter(files: TensorFiles, rows: Sequence[TensorMapping], folder: Path) -> int:
    """Let `files` read weights as ``W + alpha / r * B A`` (float32, then W's dtype); return their count."""
    pairs = read_pairs(folder)
    if not all(f"{layer}.weight" in files.names() for layer in pairs):
        pairs = _published_pairs(folder, pairs, rows)
    for layer, pair in pairs.items():
        weight = f"{layer}.weight"
        shape = files.spec(weight).shape if weight in files.names() else ()
        if not shape or (pair.out.shape[0], *pair.into.shape[1:]) != shape:
            there = f"a weight {list(shape)}" if shape else "none"
            raise CheckpointError(
                f"{folder} has an adapter of {layer} with shapes {list(pair.into.shape)} and "
                f"{list(pair.out.shape)}, and {files.label} has {there} there. Give the "
                "checkpoint that the adapters were trained on."
            )
        files.changes[weight] = partial(_merged, pair=pair)
    return len(pairs)


def read_pairs(folder: Path) -> dict[str, _Pair]:
    """Read the adapters by layer, in the dtype of the file; raises CheckpointError for other tensors."""
    from peft import LoraConfig
    from peft.utils.other import get_pattern_key

    fields = read_json(folder / CONFIG)
    usual = LoraConfig().to_dict()
    used = [
        name for name, x in fields.items() if name not in _SETTINGS.split() and x and x != usual.get(name)
    ]
    if (start := fields.get("init_lora_weights", True)) not in _STARTS:
        used.append(f"init_lora_weights {start}")
    if fields.get("peft_type") != "LORA" or used:
        raise CheckpointError(
            f"{folder / CONFIG} is of kind {fields.get('peft_type')!r} ({', '.join(used) or 'plain'}); only "
            "plain LORA adapters can be merged here. Merge them into the policy with peft and load that."
        )
    tensors = read_pt(folder / (TENSORS if (folder / TENSORS).is_file() else _PICKLED))
    tensors = {stable_name(name.removeprefix(PREFIX)): tensor for name, tensor in tensors.items()}
    pairs: dict[str, _Pair] = {}
    try:
        check_types(fields, {"r": int, "lora_alpha": float})
        for layer in dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors):
            rank, alpha = (
                float(patterns.get(get_pattern_key(list(patterns), layer), fields[name]))
                for name, key in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
                for patterns in [fields.get(key) or {}]
            )
            into, out = (tensors[f"{layer}.lora_{half}.weight"] for half in "AB")
            floating = into.is_floating_point() and out.is_floating_point()
            if not floating or not into.shape[0] == out.shape[1] == rank or alpha <= 0:
                raise ValueError(f"{layer} is not of floats of rank {rank:g} with a positive alpha")
            pairs[layer] = _Pair(into, out, alpha / rank)
        if len(tensors) != 2 * len(pairs) or not pairs:
            raise ValueError("there are none, or tensors besides lora_A and lora_B")
    except (KeyError, AttributeError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(
            f"{folder} holds no low-rank adapters that can be read ({error}). Copy it again, or merge the "
            "adapter with peft and convert the merged checkpoint."
        ) from error
    return pairs


def export_adapter(source: Path, folder: Path, rows: Sequence[TensorMapping]) -> int:
    """Write the adapters of a checkpoint under published names, for peft; returns the number of layers.

    Published layers for query, key and value together have three times the rank and alpha.
    """
    fields, joined = read_json(source / CONFIG), _published_pairs(source, read_pairs(source), rows)
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
                "layer for query, key and value. Merge it with peft."
            )
        if present:  # The A are stacked, the B stand on the diagonal.
            out = torch.block_diag(*(pair.out for pair in present))
            joined[theirs] = _Pair(torch.cat([pair.into for pair in present]), out, present[0].scale)
    inside = {layer for parts in layers.values() for layer in parts}
    return joined | {layer: pair for layer, pair in pairs.items() if layer not in inside}
