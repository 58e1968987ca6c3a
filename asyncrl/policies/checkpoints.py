"""Policies as files: our own folder, and the published OpenVLA layout in both directions.

Our folder: `config.json` + `model.safetensors` + `tokenizer.json`; names are the module's (`stable_name`).
Published: Hugging Face shards with timm names, see `published`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.policies.action_tokens import NormStats
from asyncrl.policies.files import compare_names, read_json, read_tensors, write, write_json
from asyncrl.policies.lora import merged_tensors
from asyncrl.policies.openvla import build_policy_model
from asyncrl.policies.openvla_config import OpenVLAOFTConfig
from asyncrl.policies.openvla_oft import OpenVLAOFT
from asyncrl.policies.published import (
    dropped_tensors,
    modern_name,
    native_part,
    published_config,
    rows_of,
    to_published,
)
from asyncrl.policies.tokenizer import PromptTokenizer
from asyncrl.policies.vision import stable_name

FORMAT: Final = "asyncrl-openvla-oft"
SHARD_BYTES: Final = 5_000_000_000
Dtype = torch.dtype | Literal["config"]


# --- our own folder -----------------------------------------------------------


def save_policy(
    policy: OpenVLAOFT,
    folder: str | Path,
    *,
    dtype: Dtype = "config",
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a policy; each file appears whole or not at all. Adapters are merged: a plain policy comes out.

    Args:
        policy: Any device.
        folder: Created when missing; the three files in it are replaced.
        dtype: Of the numbers in the file (the policy computes in `config.dtype` all the same).
        tensors: All weights by stable name, where the policy itself holds only a part of them (sharding).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = policy.config.torch_dtype if dtype == "config" else dtype
    found = merged_tensors(policy) if tensors is None else tensors.items()
    weights = {name: t.to("cpu", kept).contiguous() for name, t in found}
    write(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))
    write(folder / "tokenizer.json", policy.tokenizer.save)
    write_json(folder / "config.json", {"format": FORMAT, "format_version": 1, **policy.config.to_json()})


def load_policy(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: Dtype = "config"
) -> OpenVLAOFT:
    """Read what `save_policy` wrote; in evaluation mode, everything trainable.

    Raises:
        CheckpointError: a file is missing, truncated, or does not fit the configuration.
    """
    folder = Path(folder)
    fields = read_json(folder / "config.json")
    if fields.pop("format", None) != FORMAT:
        published = fields.get("model_type") == "openvla"
        remedy = "Give a folder written by asyncrl."
        if published:
            remedy = "Convert it first: load_openvla and save_policy of asyncrl.policies.checkpoints."
        raise CheckpointError(f"{folder / 'config.json'} is not of an asyncrl policy. {remedy}")
    if fields.pop("format_version", None) != 1:
        raise CheckpointError(f"{folder} was written by another version of asyncrl. Update asyncrl.")
    config = OpenVLAOFTConfig.from_json(fields)
    tokenizer = PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count)
    policy = _on_meta(config, tokenizer)
    file = folder / "model.safetensors"
    return _fill(policy, dict(read_tensors(file)), file, device, dtype)


# --- the published OpenVLA layout ---------------------------------------------


def load_openvla(
    folder: str | Path,
    config: OpenVLAOFTConfig,
    *,
    norm_key: str,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
) -> OpenVLAOFT:
    """Read a published OpenVLA or OpenVLA-OFT checkpoint.

    Args:
        folder: Shards with `model.safetensors.index.json`, or one `model.safetensors`; `config.json`,
            `tokenizer.json`, and `dataset_statistics.json` if there is one.
        config: Sizes and conventions, usually ``OpenVLAOFTConfig.full(gripper="libero")``; its statistics are
            replaced by those of the folder.
        norm_key: Statistics to scale actions with; `norm_key` + "_no_noops" is tried as well.
        device: Where the weights go.
        dtype: What they become.

    A critic that `config` asks for and the folder does not hold begins with random weights.

    Raises:
        CheckpointError: a file or tensor is missing, unknown, truncated or misshapen, or no `norm_key`.
    """
    folder = Path(folder)
    stats = _published_stats(folder)
    key = norm_key if norm_key in stats else f"{norm_key}_no_noops"
    if key not in stats:
        raise CheckpointError(
            f"{folder} has no action statistics for {norm_key!r}, so tokens cannot become actions. "
            f"Choose one of: {', '.join(sorted(stats)) or 'none found (dataset_statistics.json is missing)'}."
        )
    config = dataclasses.replace(config, norm_key=key, norm_stats=stats)
    policy = _on_meta(config, PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count))
    index = folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map", {}) if index.exists() else {"": "model.safetensors"}
    published: dict[str, Tensor] = {}
    for name in sorted(set(shards.values())):
        published |= {modern_name(key): tensor for key, tensor in read_tensors(folder / name)}
    return _fill(policy, _to_native(policy, published, folder), folder, device, dtype)


def export_openvla(policy: OpenVLAOFT, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the published layout, all its tensors included, in `config.dtype`; adapters are merged.

    Other stacks also want the files that are theirs (`preprocessor_config.json`, `*.py`, `tokenizer.model`):
    copy them from the checkpoint the policy came from.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = to_published(policy), policy.config
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards, room = [*shards, {}], shard_bytes
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(files, shards, strict=True):
        write(folder / name, lambda path, shard=shard: save_file(shard, path, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    stats = {key: value.to_published() for key, value in config.norm_stats.items()}
    write_json(folder / "dataset_statistics.json", stats)
    write_json(folder / "config.json", published_config(config) | {"norm_stats": stats})
    write(folder / "tokenizer.json", policy.tokenizer.save)


def _published_stats(folder: Path) -> dict[str, NormStats]:
    stats: dict[str, Any] = dict(read_json(folder / "config.json").get("norm_stats") or {})
    overlay = folder / "dataset_statistics.json"
    if overlay.exists():
        stats |= read_json(overlay)
    try:
        return {key: NormStats.from_published(value) for key, value in stats.items() if "action" in value}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The action statistics in {folder} lack {error}: tokens cannot become actions. "
            "Copy config.json and dataset_statistics.json again."
        ) from error


def _to_native(policy: OpenVLAOFT, published: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    rows = rows_of(policy)
    wanted = {theirs for _, theirs, _ in rows}
    optional = {name for name in wanted if name.startswith("value_head.")}
    compare_names(
        folder, published.keys(), wanted - optional, allowed=wanted | dropped_tensors(policy.config).keys()
    )
    return {ours: native_part(published[theirs], part) for ours, theirs, part in rows if theirs in published}


# --- reading and checking -----------------------------------------------------


def _on_meta(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer) -> OpenVLAOFT:
    with torch.device("meta"):
        return build_policy_model(config, tokenizer)


def _fill(
    policy: OpenVLAOFT, tensors: Mapping[str, Tensor], source: Path, device: str | torch.device, dtype: Dtype
) -> OpenVLAOFT:
    wanted = policy.config.torch_dtype if dtype == "config" else dtype
    expected = {stable_name(name): (name, p.shape) for name, p in policy.named_parameters()}
    fresh_critic: set[str] = set()
    if not any(name.startswith("value_head.") for name in tensors):
        fresh_critic = {name for name in expected if name.startswith("value_head.")}
    compare_names(source, tensors.keys(), expected.keys() - fresh_critic, allowed=expected.keys())
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own_name, shape = expected[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}. The "
                "weights belong to another size of policy: use the config.json they were saved with."
            )
        state[own_name] = tensor.to(device=device, dtype=wanted, copy=True)
    if fresh_critic:
        policy.value_head = None
    policy.load_state_dict(state, strict=True, assign=True)
    policy.restore_buffers()
    if policy.config.value_head != "none" and fresh_critic:
        policy.add_value_head(policy.config.value_head)
    return policy.requires_grad_(True).eval()
