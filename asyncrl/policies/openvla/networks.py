"""Networks of OpenVLA: two vision towers, projectors, the Llama trunk, action and value heads.

The towers are read after their second-to-last block, so the last block and the final norm are not built.
Dimension letters: B rows, H/W frame size in pixels, P patches, S positions, Q new positions, D features or
width, K tokens of a decision, N = 256 action bins.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig

DINO_MEAN: Final = (0.484375, 0.455078125, 0.40625)
DINO_STD: Final = (0.228515625, 0.2236328125, 0.224609375)
"""ImageNet's statistics rounded to bfloat16, as the published policies were trained."""
REGISTERS: Final = 4  # Extra tokens of the DINOv2 tower, dropped from the features like its class token
_RENAMED = (
    # transformers renamed its DINOv2 attention; files and broadcasts use the new names everywhere
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".base_layer.", "."),  # peft's names of a layer with an adapter
    (".lora_A.default.", ".lora_A."),
    (".lora_B.default.", ".lora_B."),
)


def stable_name(name: str) -> str:
    """Return a parameter's name in files and broadcasts, independent of transformers and adapters."""
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def build_dino(size: TowerConfig, image_size: int, patch_size: int) -> transformers.Dinov2WithRegistersModel:
    """Build DINOv2 with registers, all blocks but the last, no final norm."""
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        mlp_ratio=size.mlp // size.width,
        image_size=image_size,
        patch_size=patch_size,
        num_register_tokens=REGISTERS,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
        initializer_range=size.width**-0.5,  # The usual 0.02 keeps a narrow model from learning.
    )
    tower = transformers.Dinov2WithRegistersModel(config)
    tower.layernorm = nn.Identity()  # type: ignore[assignment]
    tower.embeddings.register_parameter("mask_token", None)  # only used in pre-training
    return tower


def build_siglip(size: TowerConfig, image_size: int, patch_size: int) -> transformers.SiglipVisionModel:
    """Build SigLIP's vision tower, all blocks but the last, no final norm, no pooling head."""
    config = transformers.SiglipVisionConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        intermediate_size=size.mlp,
        image_size=image_size,
        patch_size=patch_size,
        hidden_act="gelu",  # the published weights use exact GELU, not the tanh form that is the default
        layer_norm_eps=1e-6,
        vision_use_head=False,
    )
    tower = transformers.SiglipVisionModel(config)
    tower.post_layernorm = nn.Identity()  # type: ignore[assignment]
    return tower


def resize(frames_BHW3: Tensor, image_size: int) -> Tensor:
    """Resize ``[B, H, W, 3]`` uint8 to whole grey levels ``[B, 3, S, S]`` float32: bicubic, antialiased."""
    pixels = frames_BHW3.permute(0, 3, 1, 2).float()
    if pixels.shape[-2:] == (image_size, image_size):
        return pixels
    size = (image_size, image_size)
    pixels = nn.functional.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
    return pixels.clamp(0, 255).round()


def normalise(pixels_B3HW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Map grey levels ``[B, 3, H, W]`` float32 in [0, 255] to ``(x / 255 - mean) / std`` per channel."""
    return torch.stack([(pixels_B3HW[:, c] / 255 - mean[c]) / std[c] for c in range(3)], dim=1)


class FusedVision(nn.Module):
    """Both towers side by side."""

    def __init__(self, dino: TowerConfig, siglip: TowerConfig, *, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.dino = build_dino(dino, image_size, patch_size)
        self.siglip = build_siglip(siglip, image_size, patch_size)

    def forward(self, frames_BHW3: Tensor) -> Tensor:
        """Turn ``[B, H, W, 3]`` uint8 into ``[B, P, D]`` float: DINOv2's features first, patches by rows."""
        pixels = resize(frames_BHW3, self.image_size)
        dino = self.dino(pixel_values=normalise(pixels, DINO_MEAN, DINO_STD)).last_hidden_state
        siglip = self.siglip(pixel_values=normalise(pixels, (0.5,) * 3, (0.5,) * 3)).last_hidden_state
        return torch.cat([dino[:, 1 + REGISTERS :], siglip], dim=-1)


class Projector(nn.Module):
    """Patch features to the width of the language model: three layers with exact GELU between them."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width)

    def forward(self, features_BPD: Tensor) -> Tensor:
        """Map ``[B, P, D]`` to ``[B, P, llm_width]``, both in the weights' dtype."""
        gelu = nn.functional.gelu
        return self.fc3(gelu(self.fc2(gelu(self.fc1(features_BPD)))))


class ProprioProjector(nn.Module):
    """The robot's own state to one token: two layers with exact GELU between them."""

    def __init__(self, numbers: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(numbers, llm_width)
        self.fc2 = nn.Linear(llm_width, llm_width)

    def forward(self, proprio: Tensor) -> Tensor:
        """Turn ``[B, numbers]`` float32 into one token ``[B, 1, D]`` in the weights' dtype."""
        hidden = nn.functional.gelu(self.fc1(proprio.to(self.fc1.weight.dtype)))
        return self.fc2(hidden).unsqueeze(1)


def build_llm(config: OpenVLAOFTConfig) -> transformers.LlamaModel:
    """Build a Llama model; for parallel decoding, it attends both ways, or OFT loses half its successes."""
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.llm_width,
            intermediate_size=config.llm_mlp,
            num_hidden_layers=config.llm_layers,
            num_attention_heads=config.llm_heads,
            rms_norm_eps=config.rms_eps,
            initializer_range=config.llm_width**-0.5,
            pad_token_id=config.token_count,
            is_causal=config.causal,  # type: ignore[call-arg]  # an extra field that the mask builder reads
            use_cache=False,
        )
    )


def run_trunk(
    llm: transformers.LlamaModel,
    x_BQD: Tensor,
    mask_BS: Tensor | None,
    *,
    causal: bool,
    cache: transformers.Cache | None = None,
) -> Tensor:
    """Return the final hidden states ``[B, Q, D]`` of further positions.

    The model's own `forward` waits to read the mask, and makes masks that prevent fast attention.

    `mask_BS`: ``[B, S]`` integer or bool over all positions so far; 0 = padding, not counted by rotary
    positions. None: no padding.
    """
    new = x_BQD.shape[1]
    before = cache.get_seq_length() if cache is not None else 0
    attends_B1QS = None
    if mask_BS is None:
        positions = torch.arange(before, before + new, device=x_BQD.device)[None]
    else:
        attends_B1QS = _attends(mask_BS, new, causal=causal)
        positions = (mask_BS.cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
    rotary = llm.rotary_emb(x_BQD, position_ids=positions)
    for layer in llm.layers:
        x_BQD = layer(
            x_BQD,
            attention_mask=attends_B1QS,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=cache,
            use_cache=cache is not None,
            is_causal=causal and new > 1,
        )
    return llm.norm(x_BQD)


def _attends(mask_BS: Tensor, new: int, *, causal: bool) -> Tensor:
    """Return the positions that the last Q see: ``[B, 1, Q, S]`` bool."""
    seen = mask_BS.shape[1]
    attends_B1QS = mask_BS.bool()[:, None, None, :].expand(-1, 1, new, -1)
    if not causal:
        return attends_B1QS
    before_QS = torch.ones(new, seen, dtype=torch.bool, device=mask_BS.device).tril(seen - new)
    return attends_B1QS & before_QS


class ActionHead(nn.Linear):
    """The vocabulary's output layer, of which only the action rows are ever multiplied."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__(config.llm_width, config.vocab_size, bias=False)
        self.first = config.first_action_id

    def forward(self, input: Tensor) -> Tensor:
        """Turn hidden states ``[B, K, D]`` of any float dtype into logits ``[B, K, N]`` float32 of bins."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight[self.first : self.first + BINS].float())


class ValueHead(nn.Module):
    """Three linear layers with exact GELU, in float32; the last has no bias and starts near zero.

    Names and shapes follow RLinf's `value_head.mlp.{0,2,4}`, so that its critics can be read.
    """

    def __init__(self, width: int, hidden: tuple[int, int], outputs: int) -> None:
        super().__init__()
        first, second = hidden
        layers = nn.Linear(width, first), nn.Linear(first, second), nn.Linear(second, outputs, bias=False)
        for layer in layers[:2]:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(layers[2].weight, std=0.02)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """Turn hidden states ``[B, D]`` of any float dtype into values ``[B, V]`` float32."""
        values = hidden_BD.float()
        with torch.autocast(hidden_BD.device.type, enabled=False):
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    bias = None if layer.bias is None else layer.bias.float()
                    values = nn.functional.linear(values, layer.weight.float(), bias)
                else:
                    values = layer(values)
        return values


def build_networks(config: OpenVLAOFTConfig) -> dict[str, Any]:
    """Build a policy's networks except its critic, by attribute, with random weights in float32."""
    vision = FusedVision(
        config.dino, config.siglip, image_size=config.image_size, patch_size=config.patch_size
    )
    projector = Projector(config.dino.width + config.siglip.width, config.llm_width)
    proprio = ProprioProjector(config.proprio_dim, config.llm_width) if config.proprio_dim else None
    own = {"vision": vision, "projector": projector, "proprio_projector": proprio}
    return own | {"llm": build_llm(config), "lm_head": ActionHead(config)}


def native_shapes(config: OpenVLAOFTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a policy's parameters by stable name."""
    with torch.device("meta"):
        networks = build_networks(config)
        if config.values:
            networks["value_head"] = ValueHead(config.llm_width, config.value_hidden, config.values)
    return {
        stable_name(f"{part}.{name}"): tuple(parameter.shape)
        for part, network in networks.items()
        if network is not None
        for name, parameter in network.named_parameters()
    }
