"""A small checkpoint as other stacks write it, and a small policy of the same size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl import cli
from asyncrl.policies.action_tokens import NormStats
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.published_exports import section_of

STATS = NormStats(q01=(-0.5,) * 7, q99=(0.9,) * 7, mask=(True,) * 6 + (False,))
TOWERS: dict[str, Any] = {
    "dino": TowerConfig(width=24, depth=3, heads=3, mlp=48),
    "siglip": TowerConfig(width=32, depth=4, heads=2, mlp=40),
}
CONFIG = OpenVLAOFTConfig.tiny(
    norm_key="desk_no_noops", norm_stats={"desk_no_noops": STATS}, gripper="libero", llm_layers=1, **TOWERS
)
TASK = "put the red cube on the white plate"
DINO, SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
LLAMA = "language_model.model."


def some_policy(config: OpenVLAOFTConfig = CONFIG, spread: float = 0.1) -> OpenVLAOFTPolicy:
    """The same weights every time, large enough to matter everywhere."""
    torch.manual_seed(0)
    policy = OpenVLAOFTPolicy(config).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return policy


def published_tensors() -> dict[str, Tensor]:
    """A checkpoint as other stacks write it: every tensor random, also those that never matter."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    tensors: dict[str, Tensor] = {f"{DINO}cls_token": normal(1, 1, 24), f"{DINO}reg_token": normal(1, 4, 24)}
    for tower, d, m, depth in ((DINO, 24, 48, 3), (SIGLIP, 32, 40, 4)):
        tensors |= {
            f"{tower}pos_embed": normal(1, 64, d),
            f"{tower}patch_embed.proj.weight": normal(d, 3, 8, 8),
        }
        tensors |= {f"{tower}{n}": normal(d) for n in ("patch_embed.proj.bias", "norm.weight", "norm.bias")}
        for i in range(depth):
            shapes = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.fc1": (m, d), "mlp.fc2": (d, m)}
            shapes |= {"norm1": (d,), "norm2": (d,)}
            for name, shape in shapes.items():
                tensors[f"{tower}blocks.{i}.{name}.weight"] = normal(*shape)
                tensors[f"{tower}blocks.{i}.{name}.bias"] = normal(shape[0])
            if tower == DINO:
                tensors |= {f"{tower}blocks.{i}.ls{n}.scale_factor": normal(d) for n in (1, 2)}
    pool = {"q": (32, 32), "kv": (64, 32), "proj": (32, 32), "norm": (32,)}
    pool |= {"mlp.fc1": (40, 32), "mlp.fc2": (32, 40)}
    tensors[f"{SIGLIP}attn_pool.latent"] = normal(1, 1, 32)
    for name, shape in pool.items():
        tensors[f"{SIGLIP}attn_pool.{name}.weight"] = normal(*shape)
        tensors[f"{SIGLIP}attn_pool.{name}.bias"] = normal(shape[0])
    for name, out, into in (("fc1", 224, 56), ("fc2", 128, 224), ("fc3", 128, 128)):
        tensors |= {f"projector.{name}.weight": normal(out, into), f"projector.{name}.bias": normal(out)}
    layer = {f"self_attn.{p}_proj": (128, 128) for p in "qkvo"}
    layer |= {"mlp.gate_proj": (384, 128), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384)}
    layer |= {"input_layernorm": (128,), "post_attention_layernorm": (128,)}
    tensors |= {f"{LLAMA}layers.0.{name}.weight": normal(*shape) for name, shape in layer.items()}
    tensors |= {f"{LLAMA}embed_tokens.weight": normal(512, 128), f"{LLAMA}norm.weight": normal(128)}
    return tensors | {"language_model.lm_head.weight": normal(512, 128)}


def write_published(
    folder: Path, tensors: dict[str, Tensor], *, config: OpenVLAOFTConfig | None = None, **fields: object
) -> Path:
    """Write tensors as a published folder; with `config`, the sizes are in its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    some_policy().tokenizer.save(folder / "tokenizer.json")
    stats = {"desk_no_noops": {"action": {"q01": [-0.5] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]}}}
    content = {"model_type": "openvla", "norm_stats": stats} | fields
    if config is not None:
        content["asyncrl"] = section_of(config)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")
    return folder


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit: also -0.0 differs from 0.0."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        same = found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        assert torch.equal(*same), name


def run_cli(*arguments: object) -> int:
    return cli.run("convert", [str(argument) for argument in arguments])


def logits_of(policy: OpenVLAOFTPolicy) -> Tensor:
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    with torch.no_grad():
        return policy.lm_head(policy.readout(policy.preprocess(frames, [TASK, "lift it"])))
