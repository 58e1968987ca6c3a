"""Know the sizes of the published worlds that the shipped recipes name, without having their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from asyncrl.config.imagination import ImaginationSettings
from asyncrl.devices.float8 import saved_bytes
from asyncrl.records import SlotBytes
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.evac.options import EvacOptions
from asyncrl.worlds.evac.work import decision_work as evac_work
from asyncrl.worlds.evac.world import estimate_slot
from asyncrl.worlds.opensora.autoencoder import FrameVae
from asyncrl.worlds.opensora.autoencoder import VaeConfig as FrameVaeConfig
from asyncrl.worlds.opensora.memory import slot_bytes as opensora_slot_bytes
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config
from asyncrl.worlds.opensora.work import decision_work as opensora_work
from asyncrl.worlds.wan.memory import slot_bytes
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.work import decision_work as wan_work
from asyncrl.worlds.work import WorldWork

PIXELS: Final = 256
"""Height and width of their frames."""


@dataclass(frozen=True, kw_only=True)
class PublishedWorld:
    """A world at its published size."""

    nbytes: int = 0
    """Of its weights in bfloat16, or as --imagination.precision rounds them."""
    slot: SlotBytes = field(default_factory=SlotBytes)
    work: WorldWork = field(default_factory=WorldWork)


def published_world(name: str, settings: ImaginationSettings, decisions: int) -> PublishedWorld | None:
    """Measure the world that is published under a name, on the meta device; None: none is known.

    Args:
        name: Of its folder.
        settings: How it imagines; what they leave open is as published.
        decisions: Of an episode, at most.

    Raises:
        ConfigError: A setting that an EVAC world cannot follow.
    """
    kind = next((kind for kind in _BUILDERS if kind in name.lower()), "")
    return _built(kind, settings, decisions) if kind else None


@cache
def _built(kind: str, settings: ImaginationSettings, decisions: int) -> PublishedWorld:
    with torch.device("meta"):
        return _BUILDERS[kind](settings, decisions)


def _wan(settings: ImaginationSettings, _: int) -> PublishedWorld:
    vae, transformer = WanVae(VaeConfig.full()), ActionWanTransformer(TransformerConfig.full())
    tiny = TinyDecoder(TinyDecoderConfig.full()) if settings.decoder == "tiny" else None
    context = "latents" if settings.context == "latents" else "frames"
    work = wan_work(
        transformer,
        vae,
        image_size=PIXELS,
        context=context,
        steps=settings.steps or 5,
        tiny_decoder=tiny,
        precision=settings.precision,
    )
    nn.Module.to(vae, torch.bfloat16)  # diffusers' own `to` warns
    slot = slot_bytes(vae, PIXELS, context)
    nbytes = _bytes(transformer, vae) - _saved(settings, transformer.blocks)
    return PublishedWorld(nbytes=nbytes, slot=slot, work=work)


def _opensora(settings: ImaginationSettings, _: int) -> PublishedWorld:
    size, frames = replace(STDiT3Config.xl2(), unused_branches=False), FrameVaeConfig.published()
    transformer, vae = STDiT3(size), FrameVae(frames)
    saved = _saved(settings, transformer.spatial_blocks, transformer.temporal_blocks)
    return PublishedWorld(
        nbytes=_bytes(transformer, vae) - saved,
        slot=opensora_slot_bytes(size, frames, PIXELS, torch.bfloat16),
        work=opensora_work(
            transformer,
            vae,
            image_size=PIXELS,
            steps=settings.steps or 10,
            precision=settings.precision,
        ),
    )


def _evac(settings: ImaginationSettings, decisions: int) -> PublishedWorld:
    EvacOptions.from_settings(settings, {})
    size = EvacConfig.published()
    networks = EvacNetworks.build(size).by_name().values()
    return PublishedWorld(
        nbytes=_bytes(*networks),
        slot=estimate_slot(size, decisions, torch.bfloat16),
        work=evac_work(size, steps=settings.steps or size.schedule_steps),
    )


def _bytes(*modules: Any) -> int:
    """Bytes of weights in bfloat16, whatever they are on the meta device."""
    return sum(2 * p.numel() for module in modules for p in module.parameters())


def _saved(settings: ImaginationSettings, *rounded: nn.Module) -> int:
    """Bytes by which 8-bit weights are smaller."""
    if settings.precision != "float8":
        return 0
    return sum(saved_bytes(blocks, torch.bfloat16) for blocks in rounded)


_BUILDERS: Final[Mapping[str, Callable[[ImaginationSettings, int], PublishedWorld]]] = {
    "wan": _wan,
    "opensora": _opensora,
    "evac": _evac,
}
"""What a folder's name has in it -> how its world is built."""
