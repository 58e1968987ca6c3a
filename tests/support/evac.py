"""What the tests of EVAC's world share: published names, and small networks."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.worlds.evac.conditions import EvacConfig, EvacNetworks, ImageEncoderConfig, ResamplerConfig
from asyncrl.worlds.evac.files import PREFIXES, published_tensors
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.layers import FrameVaeConfig
from support import tiny_models

SCALE = 0.18215
start_state = partial(tiny_models.start_state, size=32)
_INNER: dict[str, int] = {"width": 32, "depth": 1, "heads": 1, "head_dim": 64}
_UNET: dict[str, Any] = {"multipliers": (1, 2), "res_blocks": 1}
_ONE_LEVEL: dict[str, Any] = _UNET | {"attention_levels": (0,)}
SMALL = EvacConfig(
    image_size=256,
    unet=UNetConfig(channels=64, head_dim=64, context_dim=32, initial_inner=64, **_ONE_LEVEL),
    autoencoder=FrameVaeConfig(widths=(32, 32, 32, 64), layers_per_block=1, scale=SCALE),
    image_encoder=ImageEncoderConfig(width=80, layers=2, heads=1, mlp=96, patch=14, size=28),
    image_resampler=ResamplerConfig(inputs=80, queries=128, **_INNER),
    action_resampler=ResamplerConfig(inputs=14, queries=16, **_INNER),
    pose_hidden=64,
)
"""A small world with what the published layout leaves open: heads of 64, groups of 32."""
_TINY: dict[str, Any] = _UNET | {"attention_levels": (0, 1), "groups": 4, "domains": 12}
TINY_UNET = UNetConfig(channels=16, head_dim=8, context_dim=24, initial_inner=16, **_TINY)
TINY_IMAGE_ENCODER = ImageEncoderConfig(width=16, layers=2, heads=2, mlp=32, patch=8, size=32)
_OF_TOKENS: dict[str, int] = {"width": 1024, "depth": 4, "heads": 12, "head_dim": 64}
PUBLISHED = EvacConfig(
    image_size=256,
    unet=UNetConfig.published(),
    autoencoder=FrameVaeConfig(widths=(128, 256, 512, 512), layers_per_block=2, scale=SCALE),
    image_encoder=ImageEncoderConfig.published(),
    image_resampler=ResamplerConfig(inputs=1280, queries=128, **_OF_TOKENS),
    action_resampler=ResamplerConfig(inputs=14, queries=16, **_OF_TOKENS),
)
"""The size published for LIBERO: pictures of 256 pixels, chunks of 8."""


def tiny_config(image_size: int = 32) -> EvacConfig:
    inner: dict[str, int] = {"width": 24, "depth": 1, "heads": 2, "head_dim": 8}
    return EvacConfig(
        image_size=image_size,
        unet=TINY_UNET,
        autoencoder=FrameVaeConfig(widths=(8, 8, 16, 16), layers_per_block=1, groups=4, scale=SCALE),
        image_encoder=TINY_IMAGE_ENCODER,
        image_resampler=ResamplerConfig(inputs=16, queries=4, **inner),
        action_resampler=ResamplerConfig(inputs=14, queries=3, **inner),
        schedule_steps=3,
    )


def randomised(module: nn.Module, seed: int, spread: float = 0.3) -> nn.Module:
    """Give every parameter random values, so that none is zero or one by default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan = max(parameter[0].numel(), 1) if parameter.ndim > 1 else 1
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) / fan**0.5)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return module.eval()


def tiny_networks(config: EvacConfig, seed: int = 0) -> EvacNetworks:
    """Small networks with random weights, of which every input matters."""
    torch.manual_seed(seed)
    networks = EvacNetworks(config)
    for number, module in enumerate(networks.by_name().values()):
        randomised(module, seed + number, 0.6)
        module.requires_grad_(False)
    # Poses in front of the camera, that move a little.
    mean = torch.tensor([-0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 1.0, 0.0])
    networks.pose_model.abs_action_mean.copy_(mean)
    networks.pose_model.abs_action_std.copy_(torch.full((8,), 0.05))
    return networks


def some_actions(batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 8, 7, generator=torch.Generator().manual_seed(seed))


def checkpoint(networks: EvacNetworks) -> dict[str, Tensor]:
    """All tensors of one published file, with what training frameworks put beside them."""
    tensors = published_tensors(networks)
    found = {p + name: t.clone() for part, p in PREFIXES.items() for name, t in tensors[part].items()}
    found = {name: tensor for name, tensor in found.items() if not name.startswith("pose_model.")}
    beside = {"positional_embedding": (77, 4), "ln_final.weight": (4,), "visual.proj": (80, 4)}
    beside |= {"transformer.resblocks.0.ln_1.bias": (4,)}
    found |= {f"embedder.model.{name}": torch.zeros(shape) for name, shape in beside.items()}
    schedule = "betas alphas_cumprod sqrt_recipm1_alphas_cumprod scale_arr posterior_mean_coef1"
    return found | {name: torch.zeros(1000) for name in schedule.split()}


def pose_file(networks: EvacNetworks) -> dict[str, Tensor]:
    own = networks.pose_model.state_dict()
    layers = {f"mlp.{i}.{kind}": own[f"net.{i}.{kind}"] for i in (0, 2, 4) for kind in ("weight", "bias")}
    return layers | {name: own[name] for name in ("abs_action_mean", "abs_action_std")}
