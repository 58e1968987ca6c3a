"""Load and save policies: our own folder, and the published OpenVLA layout.

Our folder: `config.json`, `tokenizer.json` and weights, named as the module's (`stable_name`), in one
`model.safetensors` or in shards. Published: Hugging Face shards with timm names, see `published_names`.
Weights are streamed: loading takes the memory of the policy and of a few tensors. `convert` turns folders
into each other without building a policy.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.policies.checkpoints.published_names import (
    dropped_tensors,
    native_specs,
    published_specs,
    tensor_map,
)
from asyncrl.policies.checkpoints.published_policy import (
    CRITIC,
    MODEL_TYPE,
    read_statistics,
)
from asyncrl.policies.lora import merged_tensors
from asyncrl.policies.openvla.autoregressive import build_policy_model
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.policies.openvla.vision import stable_name
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.tensor_reader import Spec, TensorFiles
from asyncrl.storage.tensor_writer import SHARD_BYTES, write_folder

FORMAT: Final = "asyncrl-openvla-oft"
Dtype = torch.dtype | Literal["config"]
_log = logging.getLogger(__name__)


# --- our own folder -----------------------------------------------------------


def save_policy(
    policy: OpenVLAOFT,
    folder: str | Path,
    *,
    dtype: Dtype = "config",
    tensors: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a policy; each file appears whole or not at all. Adapters are merged: a plain policy comes out.

    Args:
        policy: Any device.
        folder: Created when missing; a policy that is in it is replaced.
        dtype: Of the numbers in the file (the policy computes in `config.dtype` all the same).
        tensors: All weights by stable name, any shape, each whole, and any float dtype, where the policy
            itself holds only a part of them (sharding).
        shard_bytes: Size above which a further weight file is begun.
    """
    kept = policy.config.torch_dtype if dtype == "config" else dtype
    found = merged_tensors(policy) if tensors is None else tensors.items()
    shapes = {n: s.shape for n, s in native_specs(policy).items()} if tensors is None else _shapes(tensors)
    specs = {name: Spec(kept, shape) for name, shape in shapes.items()}
    write_policy(Path(folder), policy.config, policy.tokenizer, specs, found, shard_bytes=shard_bytes)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_policy(
    folder: Path,
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write our own folder from its parts.

    Args:
        folder: Created when missing.
        config: Of the policy.
        tokenizer: Of the policy.
        specs: The shape and dtype of each tensor in the file.
        tensors: Name and tensor in the order of `specs`, each of its shape there and any dtype; see
            `write_folder`.
        shard_bytes: Size above which a further weight file is begun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, specs, tensors, shard_bytes=shard_bytes)
    with replacing(folder / "tokenizer.json") as part:
        tokenizer.save(part)
    write_json(folder / "config.json", {"format": FORMAT, "format_version": 1, **config.to_json()})


Model = TypeVar("Model", bound=OpenVLAOFT)


def read_policy(
    folder: str | Path,
    kind: type[Model],
    *,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
) -> Model:
    """Read what `save_policy` wrote; in evaluation mode, everything trainable.

    Raises:
        CheckpointError: a file is missing, truncated, or does not fit the configuration.
    """
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        policy = kind(config, PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count))
    files, expected = TensorFiles(folder), native_specs(policy)
    critic = _has_critic(files)
    files.check({n: s.shape for n, s in expected.items() if critic or not n.startswith(CRITIC)})
    return fill_policy(policy, files.stream(files.names(), what="load policy"), device, dtype, critic=critic)


def read_config(folder: Path) -> OpenVLAOFTConfig:
    """Read the configuration of a folder of ours.

    Raises:
        CheckpointError: it is of something else, or of another version.
    """
    fields = read_json(folder / "config.json")
    if fields.pop("format", None) != FORMAT:
        remedy = "Give a folder written by asyncrl."
        if fields.get("model_type") == MODEL_TYPE:
            remedy = f"It is a published OpenVLA checkpoint: convert it with `{_conversion(folder, fields)}`."
        raise CheckpointError(f"{folder / 'config.json'} is not of an asyncrl policy. {remedy}")
    if fields.pop("format_version", None) != 1:
        raise CheckpointError(f"{folder} was written by another version of asyncrl. Update asyncrl.")
    return OpenVLAOFTConfig.from_json(fields)


def _conversion(folder: Path, fields: Mapping[str, Any]) -> str:
    keys = sorted(read_statistics(folder, fields))
    chosen = f" --unnorm-key {'|'.join(keys)}" if len(keys) > 1 else ""
    out = folder.with_name(f"{folder.name}-asyncrl")
    return f"asyncrl convert {shlex.quote(str(folder))} {shlex.quote(str(out))}{chosen}"


# --- the published OpenVLA layout ---------------------------------------------


def check_published(
    files: TensorFiles, policy: OpenVLAOFT, *, leave_out: Set[str] = frozenset()
) -> list[str]:
    """Compare the tensors of a published folder with what a policy needs.

    Args:
        files: Of the folder.
        policy: May be on meta.
        leave_out: Tensors of the folder that are not wanted.

    Returns:
        Names of those that the policy uses, in the order of the files.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen.
    """
    used = {n: s.shape for n, s in published_specs(tensor_map(policy), native_specs(policy)).items()}
    if not _has_critic(files):
        used = {name: shape for name, shape in used.items() if not name.startswith(CRITIC)}
    unused = dropped_tensors(policy.config)
    ignored = {name: files.spec(name).shape for name in leave_out}
    files.check(used | unused | ignored, optional=unused.keys())
    return [name for name in files.names() if name in used]


# --- filling ------------------------------------------------------------------


def build_on_meta(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer) -> OpenVLAOFT:
    """Build a policy whose weights take no memory."""
    with torch.device("meta"):
        return build_policy_model(config, tokenizer)


def _has_critic(files: TensorFiles) -> bool:
    return any(name.startswith(CRITIC) for name in files.names())


def fill_policy(
    policy: Model,
    tensors: Iterable[tuple[str, Tensor]],
    device: str | torch.device,
    dtype: Dtype,
    *,
    critic: bool,
) -> Model:
    """Make `tensors` the parameters of a policy on meta; without `critic` one that it needs begins afresh.

    Args:
        policy: Built without memory for its weights.
        tensors: Each by its stable name, of the same shape as the parameter and any float dtype.
        device: Where they go.
        dtype: What they become; "config" means the policy's own.
        critic: Whether `tensors` have a critic.
    """
    wanted = policy.config.torch_dtype if dtype == "config" else dtype
    own_names = {stable_name(name): name for name, _ in policy.named_parameters()}
    state: dict[str, Tensor] = {}
    for name, tensor in tensors:
        placed = tensor.to(device=device, dtype=wanted)
        if placed.untyped_storage().nbytes() != placed.nbytes:
            placed = placed.clone()  # A part of a larger tensor would keep all of it.
        state[own_names[name]] = placed.contiguous()
    if not critic:
        policy.value_head = None
    policy.load_state_dict(state, strict=True, assign=True)
    policy.restore_buffers()
    if policy.config.value_head != "none" and not critic:
        policy.add_critic(policy.critic)
    return policy.requires_grad_(True).eval()
