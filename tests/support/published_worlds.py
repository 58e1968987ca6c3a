"""Small worlds of every kind with random weights in published layouts, with a reward model."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld
from support.evac import SMALL as SMALL_EVAC
from support.evac import checkpoint, pose_file, tiny_networks
from support.opensora import export_opensora, nano_world
from support.pth import write_pth
from support.published_exports import export_world

SIZE: Final = 256
"""Pixels of all published worlds."""
SMALL = replace(TransformerConfig.full(), heads=1, layers=2, ffn_dim=64, freq_dim=32)
SMALL_VAE = replace(VaeConfig.full(), base_dim=4, decoder_base_dim=4)


def small_world() -> WanWorld:
    torch.manual_seed(0)
    transformer: Any = ActionWanTransformer(SMALL).eval().requires_grad_(False)
    vae: Any = WanVae(SMALL_VAE).eval().requires_grad_(False)
    return WanWorld(transformer.to(torch.bfloat16), vae.to(torch.bfloat16), image_size=SIZE)


def export_wan(folder: Path) -> None:
    export_world(folder, small_world())


def export_sharded_opensora(folder: Path) -> None:
    export_opensora(folder, nano_world(), shard_bytes=20_000)


def export_evac(folder: Path) -> None:
    """Write a Lightning checkpoint with more than tensors, and the model of poses in a file of its own."""
    networks = tiny_networks(SMALL_EVAC)
    folder.mkdir()
    tensors = checkpoint(networks)
    torch.save({"epoch": 3, "state_dict": tensors, "hyper_parameters": {"lr": 5e-5}}, folder / "epoch=3.ckpt")
    write_pth(folder / "action_predictor.pth", pose_file(networks))


EXPORTS: Final[dict[str, Callable[[Path], None]]] = {
    "wan": export_wan,
    "opensora": export_sharded_opensora,
    "evac": export_evac,
}
"""Writes a published folder of a kind."""


def listed_shapes(name: str) -> dict[str, torch.Size]:
    """Names and shapes of a published file, from tests/data."""
    rows = (Path(__file__).parents[1] / "data" / f"{name}.txt").read_text().splitlines()
    split = [row.partition(" ") for row in rows]
    return {name: torch.Size(int(size) for size in sizes.split("x") if size) for name, _, sizes in split}


def sparse_safetensors(path: Path, shapes: dict[str, torch.Size]) -> None:
    """A bfloat16 file of the true size whose numbers are a hole: it takes no space."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + offset)
