"""Folders in, a Wan world out, and back: our own layout, and the published one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.worlds import wan_transformer, wan_vae
from asyncrl.worlds.wan import WanWorld
from asyncrl.worlds.wan_transformer import TransformerConfig, load_transformer
from asyncrl.worlds.wan_vae import VaeConfig, load_vae
from asyncrl.worlds.weight_files import read_json, write_json, write_tensors

FORMAT: Final = "asyncrl-world-1"


def save_world(folder: Path, world: WanWorld) -> None:
    """Write `world` as ``transformer.safetensors``, ``vae.safetensors`` and ``world.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "transformer.safetensors", world.transformer.state_dict())
    write_tensors(folder / "vae.safetensors", world.vae.state_dict())
    content = {
        "format": FORMAT,
        "kind": "wan",
        "version": world.version,
        "image_size": world.image_size,
        "schedule_steps": world.schedule_steps,
        "transformer": asdict(world.transformer.size),
        "vae": asdict(world.vae.size),
    }
    write_json(folder / "world.json", content)


def load_world(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    schedule_steps: int | None = None,
) -> WanWorld:
    """Load a world from a folder of ours (``world.json``) or one with the published files.

    Args:
        folder: Holds the weights.
        device: Where they go.
        dtype: Of the weights once loaded.
        schedule_steps: Network calls per decision; None takes what the folder says (published: 5).

    Raises:
        CheckpointError: A file is missing or does not fit.
    """
    if not (folder / "world.json").is_file() and (folder / wan_transformer.PUBLISHED_FILE).is_file():
        return _load_published(folder, device, dtype, schedule_steps or 5)
    content = read_json(folder / "world.json")
    if content.get("format") != FORMAT or content.get("kind") != "wan":
        raise CheckpointError(
            f"{folder / 'world.json'} describes {content.get('kind')!r} in format {content.get('format')!r}; "
            f"this version reads 'wan' in format {FORMAT!r}."
        )
    try:
        transformer_size = TransformerConfig(**content["transformer"])
        vae_size = VaeConfig.from_json(content["vae"])
        image_size, steps, version = (int(content[k]) for k in ("image_size", "schedule_steps", "version"))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'world.json'} is incomplete ({error}). Save the world again."
        ) from error
    kept = {"dtype": dtype, "device": device}
    return WanWorld(
        load_transformer(folder / "transformer.safetensors", transformer_size, **kept),
        load_vae(folder / "vae.safetensors", vae_size, **kept),
        image_size=image_size,
        schedule_steps=schedule_steps or steps,
        version=version,
        device=device,
    )


def _load_published(folder: Path, device: torch.device | str, dtype: torch.dtype, steps: int) -> WanWorld:
    kept = {"published": True, "dtype": dtype, "device": device}
    return WanWorld(
        load_transformer(folder / wan_transformer.PUBLISHED_FILE, TransformerConfig.full(), **kept),
        load_vae(folder / wan_vae.PUBLISHED_FILE, VaeConfig.full(), **kept),
        image_size=256,
        schedule_steps=steps,
        device=device,
    )
