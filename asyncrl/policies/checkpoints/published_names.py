"""Map names, shapes and config.json of the published OpenVLA layout to those of our policy.

What the policy never computes (the last block, final norm and pooling head of the vision towers) has no
native name: `dropped_tensors`. Pure: no files here, see `published_policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.policies.lora import is_adapter, native_names
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.vision import TowerConfig, stable_name
from asyncrl.storage.tensor_reader import Spec

_BLOCK_COMMON: Final = {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
_DINO_BLOCK: Final = {**_BLOCK_COMMON, "norm1": "norm1", "norm2": "norm2", "attention.o_proj": "attn.proj"}
_SIGLIP_BLOCK: Final = {
    **_BLOCK_COMMON,
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.out_proj": "attn.proj",
}
_WHOLE, _DINO_POSITIONS, _SIGLIP_POSITIONS, _CLASS_POSITION = (
    "whole",
    "dino places",
    "siglip places",
    "class place",
)
_POSITIONS: Final = "vision.dino.embeddings.position_embeddings"
_TIMM_CLASS: Final = "vision_backbone.featurizer.cls_token"
_QKV: Final = ("q", "k", "v")
TensorMapping = tuple[str, str, str]
"""Our name, published name, part of the published tensor."""


def _tower_rows(config: OpenVLAOFTConfig) -> Iterator[TensorMapping]:
    dino, timm = "vision.dino.", "vision_backbone.featurizer."
    yield dino + "embeddings.cls_token", timm + "cls_token", _WHOLE
    yield dino + "embeddings.register_tokens", timm + "reg_token", _WHOLE
    yield dino + "embeddings.position_embeddings", timm + "pos_embed", _DINO_POSITIONS
    for kind in ("weight", "bias"):
        yield f"{dino}embeddings.patch_embeddings.projection.{kind}", f"{timm}patch_embed.proj.{kind}", _WHOLE
    for i in range(config.dino.depth - 1):
        ours, theirs = f"{dino}encoder.layer.{i}.", f"{timm}blocks.{i}."
        yield from _block_rows(ours, theirs, _DINO_BLOCK, "attention")
        for n in (1, 2):
            yield f"{ours}layer_scale{n}.lambda1", f"{theirs}ls{n}.scale_factor", _WHOLE
    siglip, timm = "vision.siglip.", "vision_backbone.fused_featurizer."
    yield siglip + "embeddings.position_embedding.weight", timm + "pos_embed", _SIGLIP_POSITIONS
    for kind in ("weight", "bias"):
        yield f"{siglip}embeddings.patch_embedding.{kind}", f"{timm}patch_embed.proj.{kind}", _WHOLE
    for i in range(config.siglip.depth - 1):
        yield from _block_rows(
            f"{siglip}encoder.layers.{i}.", f"{timm}blocks.{i}.", _SIGLIP_BLOCK, "self_attn"
        )


def _block_rows(ours: str, theirs: str, names: Mapping[str, str], attention: str) -> Iterator[TensorMapping]:
    for kind in ("weight", "bias"):
        for mine, published in names.items():
            yield f"{ours}{mine}.{kind}", f"{theirs}{published}.{kind}", _WHOLE
        for part in _QKV:
            yield f"{ours}{attention}.{part}_proj.{kind}", f"{theirs}attn.qkv.{kind}", part


def tensor_map(policy: OpenVLAOFT) -> list[TensorMapping]:
    """Make one row per native parameter, in the order that parts of one published tensor are joined."""
    rows = list(_tower_rows(policy.config))
    for name in native_names(policy):
        if name.startswith("llm."):
            rows.append((name, name.replace("llm.", "language_model.model.", 1), _WHOLE))
        elif name.startswith("lm_head."):
            rows.append((name, f"language_model.{name}", _WHOLE))
        elif name.startswith(("projector.", "proprio_projector.", "value_head.")):
            rows.append((name, name, _WHOLE))
    return rows


def qkv_rows(rows: Sequence[TensorMapping]) -> dict[str, tuple[str, ...]]:
    """Map a published layer to our three, in order, that it is all of; names without `.weight`."""
    layers: dict[str, tuple[str, ...]] = {}
    for ours, theirs, part in rows:
        if part in _QKV and ours.endswith(".weight"):
            layer = theirs.removesuffix(".weight")
            layers[layer] = (*layers.get(layer, ()), ours.removesuffix(".weight"))
    return layers


def dropped_tensors(config: OpenVLAOFTConfig) -> dict[str, tuple[int, ...]]:
    """List name and shape of every published tensor that never affects the output."""
    shapes: dict[str, tuple[int, ...]] = {}
    for timm, size in (("featurizer.", config.dino), ("fused_featurizer.", config.siglip)):
        d, block = size.width, f"blocks.{size.depth - 1}."
        parts = _linears(size, block) | {f"{block}norm1": (d,), f"{block}norm2": (d,), "norm": (d,)}
        if timm == "featurizer.":
            extra = {f"{block}ls{n}.scale_factor": (d,) for n in (1, 2)}
        else:
            pool = {"q": (d, d), "kv": (2 * d, d), "proj": (d, d), "norm": (d,)}
            pool |= {"mlp.fc1": (size.mlp, d), "mlp.fc2": (d, size.mlp)}
            parts |= {f"attn_pool.{name}": shape for name, shape in pool.items()}
            extra = {"attn_pool.latent": (1, 1, d)}
        for name, shape in parts.items():
            extra |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= {f"vision_backbone.{timm}{name}": shape for name, shape in extra.items()}
    return shapes


def _linears(size: TowerConfig, block: str) -> dict[str, tuple[int, ...]]:
    d, m = size.width, size.mlp
    shapes = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.fc1": (m, d), "mlp.fc2": (d, m)}
    return {block + name: shape for name, shape in shapes.items()}


def modern_name(name: str) -> str:
    """Rename the layer scale, which raw timm weights call gamma."""
    return name.replace(".ls1.gamma", ".ls1.scale_factor").replace(".ls2.gamma", ".ls2.scale_factor")


def native_specs(policy: OpenVLAOFT) -> dict[str, Spec]:
    """List dtype and shape of every parameter by stable name, without adapters; the policy may be on meta."""
    return {
        stable_name(name): Spec(p.dtype, tuple(p.shape))
        for name, p in policy.named_parameters()
        if not is_adapter(name)
    }


def published_specs(rows: Sequence[TensorMapping], natives: Mapping[str, Spec]) -> dict[str, Spec]:
    """Compute dtype and shape of what `to_published` gives, in its order; reads nothing."""
    empty = ((name, spec.empty()) for name, spec in natives.items())
    return {name: Spec(t.dtype, tuple(t.shape)) for name, t in to_published(rows, empty)}


def to_native(
    rows: Sequence[TensorMapping], published: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Turn published tensors into ours, one by one; parts of one tensor share its memory.

    Args:
        rows: See `tensor_map`.
        published: Only names that the rows have; any shapes and dtypes.

    Yields:
        Our name, and a tensor of the same dtype in the shape of our parameter.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    for ours, theirs, part in rows:
        parts.setdefault(theirs, []).append((ours, part))
    for theirs, tensor in published:
        for ours, part in parts[theirs]:
            yield ours, _native_part(tensor, part)


def to_published(
    rows: Sequence[TensorMapping], natives: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Turn our tensors into published ones, each as soon as its parts are there; without those never used.

    Args:
        rows: See `tensor_map`.
        natives: All of ours, any shapes and dtypes, in any order: parts wait in memory until the last one
            comes.

    Yields:
        Published name, and a tensor of the same dtype in the shape of `published_specs`.
    """
    sources: dict[str, list[TensorMapping]] = {}
    for row in [*rows, (_POSITIONS, _TIMM_CLASS, _CLASS_POSITION)]:
        sources.setdefault(row[1], []).append(row)
    feeds: dict[str, list[str]] = {}
    for theirs, feeding in sources.items():
        for ours, _, _ in feeding:
            feeds.setdefault(ours, []).append(theirs)
    waiting: dict[str, dict[str, Tensor]] = {}
    for ours, tensor in natives:
        for theirs in feeds[ours]:
            parts = waiting.setdefault(theirs, {})
            parts[ours] = tensor
            if len(parts) == len(sources[theirs]):
                yield theirs, _join([(parts[name], part) for name, _, part in sources[theirs]])
                del waiting[theirs], parts


def _native_part(tensor: Tensor, part: str) -> Tensor:
    if part in _QKV:
        return tensor.chunk(3, dim=0)[_QKV.index(part)]
    if part == _DINO_POSITIONS:  # the class token has no position in the published model
        return torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
    return tensor[0] if part == _SIGLIP_POSITIONS else tensor


def _join(parts: Sequence[tuple[Tensor, str]]) -> Tensor:
    tensor, kind = parts[0]
    if parts[-1][1] == _CLASS_POSITION:
        position = parts[-1][0][:, :1]
        learned = not position.is_meta and bool(position.any())  # fine-tuning may have given it one
        return tensor + position if learned else tensor  # adding zero would turn -0.0 into 0.0
    if kind == _DINO_POSITIONS:
        return tensor[:, 1:]
    if kind == _SIGLIP_POSITIONS:
        return tensor[None]
    return torch.cat([part for part, _ in parts]) if len(parts) > 1 else tensor


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
