"""Names, shapes and config.json of the published OpenVLA layout, mapped to the policy's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.storage.weight_files import Spec

PROPRIO, CRITIC, LM_HEAD = "proprio_projector.", "value_head.", "language_model.lm_head.weight"
_DINO, _SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
POSITIONS, UNUSED_NORM = f"{_DINO}pos_embed", f"{_DINO}norm.weight"
_CLASS, _NATIVE_POSITIONS = f"{_DINO}cls_token", "vision.dino.embeddings.position_embeddings"
# Replacements that turn a published name with this prefix into the policy's name, in order.
_NATIVE: Final = {
    "language_model.model.": {"language_model.model.": "llm."},
    "language_model.lm_head.": {"language_model.": ""},
    _DINO: {
        _DINO: "vision.dino.",
        "blocks.": "encoder.layer.",
        "attn.proj.": "attention.o_proj.",
        "attn.qkv.": "attention.{}_proj.",
        ".ls1.scale_factor": ".layer_scale1.lambda1",
        ".ls2.scale_factor": ".layer_scale2.lambda1",
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    },
    _SIGLIP: {
        _SIGLIP: "vision.siglip.",
        "blocks.": "encoder.layers.",
        ".norm": ".layer_norm",
        "attn.proj.": "self_attn.out_proj.",
        "attn.qkv.": "self_attn.{}_proj.",
        "pos_embed": "embeddings.position_embedding.weight",
        "patch_embed.proj.": "embeddings.patch_embedding.",
    },
}
_QKV: Final = "qkv"
TensorMapping = tuple[str, str, str]
"""The policy's name, published name, and part of the published tensor: q, k, v, or empty for the whole."""
Shapes = dict[str, tuple[int, ...]]


def published_shapes(config: OpenVLAOFTConfig, *, class_position: bool = False) -> Shapes:
    """Return the published tensors that the policy uses."""
    shapes = {**_tower(_DINO, config, config.dino), **_tower(_SIGLIP, config, config.siglip)}
    if class_position:
        shapes[POSITIONS] = (1, 1 + config.patches, config.dino.width)
    d, fused, mlp = config.llm_width, config.dino.width + config.siglip.width, config.llm_mlp
    shapes |= _linears("projector.", {"fc1": (4 * fused, fused), "fc2": (d, 4 * fused), "fc3": (d, d)})
    if config.proprio_dim:
        shapes |= _linears(PROPRIO, {"fc1": (d, config.proprio_dim), "fc2": (d, d)})
    llama = "language_model.model."
    shapes[f"{llama}embed_tokens.weight"] = (config.vocab_size, d)
    layer: Shapes = {f"self_attn.{part}_proj": (d, d) for part in "qkvo"}
    layer |= {"mlp.gate_proj": (mlp, d), "mlp.up_proj": (mlp, d), "mlp.down_proj": (d, mlp)}
    layer |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    for i in range(config.llm_layers):
        shapes |= {f"{llama}layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {f"{llama}norm.weight": (d,), LM_HEAD: (config.vocab_size, d)}
    if config.values:
        first, second = config.value_hidden
        shapes |= _linears(f"{CRITIC}mlp.", {"0": (first, d), "2": (second, first)})
        shapes[f"{CRITIC}mlp.4.weight"] = (config.values, second)
    return shapes


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


def _tower(tower: str, config: OpenVLAOFTConfig, size: TowerConfig) -> Shapes:
    d, patch, dino = size.width, config.patch_size, tower == _DINO
    shapes: Shapes = {_CLASS: (1, 1, d), f"{tower}reg_token": (1, 4, d)} if dino else {}
    shapes |= {f"{tower}pos_embed": (1, config.patches, d)}
    shapes |= _linears(tower, {"patch_embed.proj": (d, 3, patch, patch)})
    for i in range(size.depth - 1):
        shapes |= _block(f"{tower}blocks.{i}.", size, scaled=dino)
    return shapes


def _block(prefix: str, size: TowerConfig, *, scaled: bool) -> Shapes:
    d, m = size.width, size.mlp
    parts: Shapes = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.fc1": (m, d), "mlp.fc2": (d, m)}
    shapes = _linears(prefix, parts | {"norm1": (d,), "norm2": (d,)})
    return shapes | ({f"{prefix}ls{n}.scale_factor": (d,) for n in (1, 2)} if scaled else {})


def _linears(prefix: str, layers: Shapes) -> Shapes:
    named = {f"{prefix}{name}": shape for name, shape in layers.items()}
    weights = {f"{name}.weight": shape for name, shape in named.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in named.items()}


def tensor_map(config: OpenVLAOFTConfig) -> list[TensorMapping]:
    """Return one row per parameter of the policy; parts of a published tensor in the order of joining."""
    return [row for name in published_shapes(config) for row in _rows(name)]


def _rows(published: str) -> list[TensorMapping]:
    name = published
    for prefix, replacements in _NATIVE.items():
        if published.startswith(prefix):
            for old, new in replacements.items():
                name = name.replace(old, new)
    parts = _QKV if "{}" in name else ("",)
    return [(name.format(part), published, part) for part in parts]


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
