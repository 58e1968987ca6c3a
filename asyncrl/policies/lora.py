"""Train low-rank adapters (peft) inside the policy: ``W x`` becomes ``W x + alpha / r * B A x``.

The layers are exchanged in place: the policy stays an `OpenVLAOFT`. Its files stay plain policies with the
adapters merged; `checkpoints.adapters` reads and writes the adapters alone.

Dimension letters:
    I, O  features into and out of a linear layer      r  rank
    A     ``[r, I]``                                   B  ``[O, r]``
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.vision import stable_name

Targets = Literal["language", "all"]
ADAPTER: Final = "default"
"""Name under which peft keeps the adapters; it appears in no file and no broadcast."""
_LLAMA: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEARS: Final = {
    "llm.layers.": _LLAMA,
    "projector.": ("fc1", "fc2", "fc3"),
    "vision.dino.encoder.": ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
    "vision.siglip.encoder.": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
"""Last parts of the names of the linear layers that get adapters, by part of the policy."""


def add_lora(
    policy: Any,
    rank: int,
    alpha: float,
    targets: Targets = "all",
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Put adapters into the policy, in place. Only they and the value head are trainable afterwards.

    B is zero, so the policy acts as before; A is random (torch's generator) and there is no dropout. The
    output layer (`lm_head`) gets no adapter: only its 256 action rows are ever multiplied. Nor do the two
    patch embeddings, which are convolutions. Every adapter gets a gradient, as the vision towers end after
    the block that is read.

    Args:
        policy: Without adapters; an `nn.Module` that has `capabilities.LoraTargets`.
        rank: ``r``.
        alpha: The adapters' output is scaled by ``alpha / rank``; 0 = rank.
        targets: language: every linear layer of the Llama model. all: those of the vision towers and of
            the projector as well.
        dtype: Of the adapters, whatever that of the weights below.

    Raises:
        ConfigError: the rank or targets cannot work, the policy already has adapters, or it lacks a layer.
    """
    _check_settings(policy, rank, alpha, targets)
    adapt(policy, set(policy.lora_layers(targets)), rank, alpha, dtype=dtype)
    for name, parameter in policy.named_parameters():
        if not is_adapter(name) and name.startswith(policy.critic_prefix):
            parameter.requires_grad_(True)


def adapt(
    network: Any, layers: Set[str], rank: int, alpha: float, *, dtype: torch.dtype = torch.float32
) -> None:
    """Put adapters into some linear layers of any network, in place; they alone are trainable afterwards.

    Args:
        network: Without adapters.
        layers: By their names in `named_modules`.
        rank: ``r``, at least 1.
        alpha: The adapters' output is scaled by ``alpha / rank``; 0 = rank.
        dtype: Of the adapters, whatever that of the weights below.
    """
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


def _check_settings(policy: nn.Module, rank: int, alpha: float, targets: str) -> None:
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


def target_layers(policy: OpenVLAOFT, targets: Targets) -> dict[str, nn.Linear]:
    """Find the linear layers that get adapters, by the module's own name.

    Raises:
        ConfigError: a kind of layer on the list is not in the policy.
    """
    parts = ["llm.layers."] if targets == "language" else list(LINEARS)
    found: dict[str, nn.Linear] = {}
    for part in parts:
        for kind in LINEARS[part]:
            layers = {
                name: module
                for name, module in policy.named_modules()
                if isinstance(module, nn.Linear) and _is_target(name, part, kind)
            }
            if not layers:
                raise ConfigError(
                    f"--lora.targets is {targets}, but the policy has no linear layer {part}*.{kind}: its "
                    "adapters would be fewer than asked for. Use --lora.rank 0, or a version of transformers "
                    "that asyncrl supports."
                )
            found |= layers
    return found


def _is_target(name: str, part: str, kind: str) -> bool:
    stable = stable_name(f"{name}.")
    return stable.startswith(part) and stable.endswith(f".{kind}.")


def is_adapter(name: str) -> bool:
    """Tell whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def has_lora(policy: nn.Module) -> bool:
    """Tell whether the policy has adapters."""
    return next(_adapted(policy), None) is not None


def _adapted(policy: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters, by the module's own name. Needs no peft."""
    for name, module in policy.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@contextmanager
def adapters_disabled(policy: nn.Module) -> Iterator[None]:
    """Let the policy compute without its adapters within the block: as it was when training began.

    Only a flag of each layer is turned, so it works on sharded policies too. Run no backward pass of an
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


def native_names(policy: nn.Module) -> list[str]:
    """List the stable names of all parameters but the adapters, in the policy's order."""
    return [stable_name(name) for name, _ in policy.named_parameters() if not is_adapter(name)]


def merged_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their adapters merged, by the names that the policy has without adapters.

    Each has the same shape and dtype as the parameter.

    One at a time: a merged weight needs the memory of one layer; the other tensors share memory with the
    parameters. Without adapters these are all. Where weights are sharded too, so is what comes; every
    rank must take every one.
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
