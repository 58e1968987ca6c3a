"""Small OpenSora worlds with random weights, and their files in the published layout."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file

from asyncrl.records import Bounds
from asyncrl.storage.tensor_files import Spec, write_folder
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from asyncrl.worlds.opensora.files import write_action_range
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import OpenSoraWorld

NANO = STDiT3Config(depth=2, width=24, heads=2, freq_dim=16)
UNUSED_NAMES = (
    *(f"{kind}_blocks.{i}.cross_attn.kv_linear.weight" for kind in ("spatial", "temporal") for i in (0, 1)),
    *("y_embedder.y_embedding", "y_embedder.y_proj.fc1.bias", "fps_embedder.mlp.0.weight"),
)
"""Some tensors of text and frame rate, which are in published files and in no computation."""
NANO_VAE = FrameVaeConfig(widths=(4, 4, 8, 8), layers_per_block=1, groups=2)
LOW, HIGH = (-0.5, -0.6, -0.7, -0.2, -0.3, -0.4, 0.0), (0.6, 0.7, 0.8, 0.1, 0.2, 0.3, 1.0)
RANGE = Bounds(q01=LOW, q99=HIGH, mask=(True,) * 7)


def nano_transformer(size: STDiT3Config = NANO) -> STDiT3:
    """Random weights, also where layers begin with ones and zeros, so that each of them counts."""
    torch.manual_seed(2)
    model = STDiT3(size).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.startswith("rope"):
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def nano_vae() -> FrameVae:
    torch.manual_seed(1)
    return FrameVae(NANO_VAE).eval().requires_grad_(False)


def by_diffusers(vae: FrameVae) -> AutoencoderKL:
    """The same weights in a model of the library."""
    own = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    own.load_state_dict(vae.state_dict())
    return own.eval().requires_grad_(False)


def nano_world(*, steps: int = 2, size: STDiT3Config = NANO, image_size: int = 32) -> OpenSoraWorld:
    return OpenSoraWorld(
        nano_transformer(size), nano_vae(), RANGE, image_size=image_size, schedule_steps=steps, version=3
    )


def export_opensora(folder: Path, world: OpenSoraWorld, *, shard_bytes: int | None = None) -> None:
    """Write a world as RLinf-OpenSora-LIBERO-* has it: bfloat16 shards and an index, or one file."""
    folder.mkdir(parents=True)
    tensors = {n: t.to(torch.bfloat16) for n, t in world.transformer.state_dict().items()}
    tensors |= {name: torch.full((2,), 3e38).bfloat16() for name in UNUSED_NAMES}
    if shard_bytes is None:
        save_file(tensors, folder / "model-00001.safetensors")
    else:
        specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_folder(folder, specs, tensors.items(), shard_bytes=shard_bytes)
    size = world.transformer.size
    config = {"model_type": "STDiT3", "depth": size.depth, "hidden_size": size.width, "num_heads": size.heads}
    (folder / "config.json").write_text(json.dumps(config))
    vae, inside = world.vae.size, folder / "vae"
    inside.mkdir()
    described = {
        "_class_name": "AutoencoderKL",
        "block_out_channels": list(vae.widths),
        "layers_per_block": vae.layers_per_block,
        "latent_channels": vae.channels,
        "norm_num_groups": vae.groups,
        "scaling_factor": vae.scale,
    }
    (inside / "config.json").write_text(json.dumps(described))
    weights = {name: tensor.contiguous() for name, tensor in world.vae.state_dict().items()}
    save_file(weights, inside / "diffusion_pytorch_model.safetensors")
    write_action_range(folder, world.action_range)
