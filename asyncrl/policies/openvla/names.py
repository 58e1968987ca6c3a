"""Names, shapes and config.json of the published OpenVLA layout, mapped to the policy's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.networks import native_shapes
from asyncrl.storage.tensor_files import Spec

PROPRIO, CRITIC, LM_HEAD = "proprio_projector.", "value_head.", "language_model.lm_head.weight"
_DINO, _SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
POSITIONS, UNUSED_NORM = f"{_DINO}pos_embed", f"{_DINO}norm.weight"
_CLASS, _NATIVE_POSITIONS = f"{_DINO}cls_token", "vision.dino.embeddings.position_embeddings"
# Replacements that turn one of the policy's names with this prefix into the published one, in order.
_PUBLISHED: Final = {
    "llm.": {"llm.": "language_model.model."},
    "lm_head.": {"lm_head.": "language_model.lm_head."},
    "vision.dino.": {
        "vision.dino.": _DINO,
        "encoder.layer.": "blocks.",
        "attention.o_proj.": "attn.proj.",
        "attention.": "attn.",
        ".layer_scale1.lambda1": ".ls1.scale_factor",
        ".layer_scale2.lambda1": ".ls2.scale_factor",
        "embeddings.cls_token": "cls_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    },
    "vision.siglip.": {
        "vision.siglip.": _SIGLIP,
        "encoder.layers.": "blocks.",
        ".layer_norm": ".norm",
        "self_attn.out_proj.": "attn.proj.",
        "self_attn.": "attn.",
        "embeddings.position_embedding.weight": "pos_embed",
        "embeddings.patch_embedding.": "patch_embed.proj.",
    },
}
_QKV: Final = "qkv"
_PART: Final = re.compile(r"(?<=\.attn\.)([qkv])_proj(?=\.)")  # In the towers they are one published tensor.
TensorMapping = tuple[str, str, str]
"""The policy's name, published name, and part of the published tensor: q, k, v, or empty for the whole."""
Shapes = dict[str, tuple[int, ...]]


def tensor_map(natives: Iterable[str]) -> list[TensorMapping]:
    """Return one row per parameter of the policy; parts of a published tensor in the order of joining."""
    return sorted(map(_row, natives), key=lambda row: _QKV.find(row[2]))


def _row(native: str) -> TensorMapping:
    name = native
    for prefix, replacements in _PUBLISHED.items():
        if native.startswith(prefix):
            for old, new in replacements.items():
                name = name.replace(old, new)
    part = _PART.search(name)
    return native, _PART.sub("qkv", name), part[1] if part else ""


def published_shapes(config: OpenVLAOFTConfig, *, class_position: bool = False) -> Shapes:
    """Return the published tensors that the policy uses."""
    natives = {name: Spec(torch.float32, shape) for name, shape in native_shapes(config).items()}
    specs = published_specs(tensor_map(natives), natives, fold=not class_position)
    return {name: spec.shape for name, spec in specs.items()}


def unused_shapes(config: OpenVLAOFTConfig) -> Shapes:
    """Return tensors that never affect the output: the towers' last block, final norm, pooling head."""
    shapes: Shapes = {}
    for tower, size in ((_DINO, config.dino), (_SIGLIP, config.siglip)):
        shapes |= _block(f"{tower}blocks.{size.depth - 1}.", size, scaled=tower == _DINO)
        shapes |= _linears(tower, {"norm": (size.width,)})
    d, m = config.siglip.width, config.siglip.mlp
    pool: Shapes = {"q": (d, d), "kv": (2 * d, d), "proj": (d, d), "norm": (d,)}
    pool |= {"mlp.fc1": (m, d), "mlp.fc2": (d, m)}
    return shapes | {f"{_SIGLIP}attn_pool.latent": (1, 1, d)} | _linears(f"{_SIGLIP}attn_pool.", pool)


def _block(prefix: str, size: TowerConfig, *, scaled: bool) -> Shapes:
    d, m = size.width, size.mlp
    parts: Shapes = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.fc1": (m, d), "mlp.fc2": (d, m)}
    shapes = _linears(prefix, parts | {"norm1": (d,), "norm2": (d,)})
    return shapes | ({f"{prefix}ls{n}.scale_factor": (d,) for n in (1, 2)} if scaled else {})


def _linears(prefix: str, layers: Shapes) -> Shapes:
    named = {f"{prefix}{name}": shape for name, shape in layers.items()}
    weights = {f"{name}.weight": shape for name, shape in named.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in named.items()}


def modern_name(name: str) -> str:
    """Rename the layer scale, which raw timm weights call gamma."""
    return name.replace(".ls1.gamma", ".ls1.scale_factor").replace(".ls2.gamma", ".ls2.scale_factor")


def to_native(
    rows: Sequence[TensorMapping], published: Iterable[tuple[str, Tensor]], config: OpenVLAOFTConfig
) -> Iterator[tuple[str, Tensor]]:
    """Turn published tensors, any dtype, into the policy's; parts of one tensor share its memory."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for ours, theirs, part in rows:
        parts.setdefault(theirs, []).append((ours, part))
    for theirs, tensor in published:
        if theirs == POSITIONS and tensor.shape[1] == config.patches:  # no position of the class token
            tensor = torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
        elif theirs == f"{_SIGLIP}pos_embed":
            tensor = tensor[0]
        for ours, part in parts[theirs]:
            yield ours, tensor.chunk(3, dim=0)[_QKV.index(part)] if part else tensor


def to_published(
    rows: Sequence[TensorMapping], natives: Iterable[tuple[str, Tensor]], *, fold: bool
) -> Iterator[tuple[str, Tensor]]:
    """Turn the policy's tensors, in any order, into published ones, each as soon as its parts are there."""
    sources: dict[str, list[str]] = {}
    for ours, theirs, _ in rows:
        sources.setdefault(theirs, []).append(ours)
    if fold:
        sources[_CLASS].append(_NATIVE_POSITIONS)
    feeds: dict[str, list[str]] = {}
    for theirs, feeding in sources.items():
        for ours in feeding:
            feeds.setdefault(ours, []).append(theirs)
    waiting: dict[str, dict[str, Tensor]] = {}
    for ours, tensor in natives:
        for theirs in feeds[ours]:
            parts = waiting.setdefault(theirs, {})
            parts[ours] = tensor
            if len(parts) == len(sources[theirs]):
                yield theirs, _join(theirs, [parts[name] for name in sources[theirs]], fold)
                del waiting[theirs], parts


def _join(theirs: str, parts: Sequence[Tensor], fold: bool) -> Tensor:
    tensor = parts[0]
    if theirs == _CLASS and fold:
        position = parts[1][:, :1]
        learned = not position.is_meta and bool(position.any())
        return tensor + position if learned else tensor  # adding zero would turn -0.0 into 0.0
    if theirs == POSITIONS:
        return tensor[:, 1:] if fold else tensor
    if theirs == f"{_SIGLIP}pos_embed":
        return tensor[None]
    return torch.cat(list(parts)) if len(parts) > 1 else tensor


def published_specs(
    rows: Sequence[TensorMapping], natives: Mapping[str, Spec], *, fold: bool
) -> dict[str, Spec]:
    """Compute dtype and shape of the tensors of `to_published`, in its order; reads nothing."""
    empty = ((name, spec.empty()) for name, spec in natives.items())
    return {name: Spec(t.dtype, tuple(t.shape)) for name, t in to_published(rows, empty, fold=fold)}


def published_config(config: OpenVLAOFTConfig) -> dict[str, Any]:
    """Build the published config.json, without the action statistics."""
    text = {"model_type": "llama", "vocab_size": config.vocab_size, "pad_token_id": config.token_count}
    text |= {"hidden_size": config.llm_width, "intermediate_size": config.llm_mlp}
    text |= {"num_hidden_layers": config.llm_layers, "num_attention_heads": config.llm_heads}
    text |= {"num_key_value_heads": config.llm_heads, "rms_norm_eps": config.rms_eps}
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "use_fused_vision_backbone": True,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "image_sizes": [config.image_size, config.image_size],
        "image_resize_strategy": "resize-naive",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "llm_max_length": 2048,
        "pad_token_id": config.token_count,
        "pad_to_multiple_of": 64,
        "output_projector_states": False,
        "n_action_bins": 256,
        "text_config": text | {"torch_dtype": config.dtype},
        "torch_dtype": config.dtype,
    }
