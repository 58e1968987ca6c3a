"""Adapters alone as files, in peft's layout: `adapter_config.json` and `adapter_model.safetensors`.

Tensors are called ``base_model.model.<layer>.lora_A.weight`` ``[r, I]`` and ``...lora_B.weight`` ``[O, r]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.policies.lora import ADAPTER, Targets, add_lora, has_lora, is_adapter, target_layers
from asyncrl.policies.openvla_oft import OpenVLAOFT
from asyncrl.policies.vision import stable_name
from asyncrl.storage.atomic import compare_names, read_json, write, write_json
from asyncrl.storage.weight_files import WeightFiles

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
    policy: OpenVLAOFT, folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters, in their own type, as peft reads them; the value head is not among them.

    Args:
        policy: With adapters.
        folder: Created when missing.
        tensors: `adapter_tensors` copied before, for example gathered from shards; None: the policy's.

    Raises:
        CheckpointError: the policy has no adapters.
    """
    if not has_lora(policy):
        raise CheckpointError("The policy has no adapters to write. Use save_policy, or add_lora first.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = adapter_tensors(policy) if tensors is None else tensors
    files = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in chosen.items()}
    write(folder / TENSORS, lambda path: save_file(files, path, metadata={"format": "pt"}))
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
    files = WeightFiles(file, rename=lambda name: name.removeprefix(PREFIX))
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


def adapter_tensors(policy: OpenVLAOFT) -> dict[str, Tensor]:
    """The adapters by stable name, without gradient; empty when there are none."""
    return {name: parameter.detach() for name, parameter in _adapters(policy).items()}


def _adapters(policy: OpenVLAOFT) -> dict[str, nn.Parameter]:
    return {stable_name(name): p for name, p in policy.named_parameters() if is_adapter(name)}


def _settings(policy: OpenVLAOFT) -> Any:
    """The LoraConfig that peft left in the policy."""
    return policy.peft_config[ADAPTER]  # type: ignore[index]


def _shapes(policy: OpenVLAOFT, rank: int, targets: Targets) -> dict[str, torch.Size]:
    """What the adapters' tensors will be, before there are any."""
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
