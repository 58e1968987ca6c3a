"""Know the sizes of the published models that the shipped recipes name, without having their files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import RunWork
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.models import measure
from asyncrl.errors import ConfigError
from asyncrl.launch.environment import EnvironmentFiles
from asyncrl.launch.policies import add_adapters
from asyncrl.launch.simulated import simulator_named
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import new_policy
from asyncrl.records import SlotBytes
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
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
REWARD: Final = 45_000_000
"""Bytes of a published reward model."""


@dataclass(frozen=True, kw_only=True)
class PublishedWorld:
    """A world at its published size."""

    parameters: int = 0
    slot: SlotBytes = field(default_factory=SlotBytes)
    work: WorldWork = field(default_factory=WorldWork)


def published_run(config: TrainConfig) -> tuple[Sizes, RunWork]:
    """Measure the models that a recipe names, as published, without their weights.

    Args:
        config: Names its models as the shipped recipes do, and says how long episodes are.

    Raises:
        ConfigError: It names something else.
    """
    size = _policy_size(config)
    with torch.device("meta"):
        policy = new_policy(size)
        if config.lora.rank:
            add_adapters(config, policy)
    policy = policy.to(torch.bfloat16)
    simulated = bool(simulator_named(config.world))
    world = PublishedWorld() if simulated else _world(config)
    files = EnvironmentFiles(
        folder=Path(),
        starts=[],
        image_size=PIXELS,
        nbytes=0 if simulated else 2 * world.parameters + REWARD,
        action_spec=policy.action_spec,
    )
    steps = config.simulator.horizon if simulated else config.actor.max_decisions * size.chunk
    return measure(config, policy, files, world.slot), RunWork(
        policy=policy.decision_flops(),
        world=world.work,
        token_passes=policy.token_passes,
        decisions=-(-steps // size.chunk),
        chunk=size.chunk,
    )


def _policy_size(config: TrainConfig) -> OpenVLAOFTConfig:
    name = Path(config.policy).name
    if name == "maniskill_openvla":
        return OpenVLAOFTConfig.full(decoding="autoregressive", chunk=1)
    if name.startswith("libero_") or name == "maniskill_openvlaoft":
        return OpenVLAOFTConfig.full()
    raise ConfigError(
        f"--policy is {config.policy}, but only the policies of the shipped recipes are known without their "
        "files, like models/libero_spatial. Name one of these, or run `asyncrl doctor` where the files are."
    )


def _world(config: TrainConfig) -> PublishedWorld:
    """Build the networks of the world that a recipe names, on the meta device."""
    name = Path(config.world).name.lower()
    kinds = {"wan": _wan, "opensora": _opensora, "evac": _evac}
    for kind, build in kinds.items():
        if kind in name:
            with torch.device("meta"):
                return build(config)
    raise ConfigError(
        f"--world is {config.world}, but only the worlds of the shipped recipes are known without their "
        "files, like models/RLinf-Wan-LIBERO-Spatial. Name one of these, or run `asyncrl doctor` where the "
        "files are."
    )


def _wan(config: TrainConfig) -> PublishedWorld:
    vae, transformer = WanVae(VaeConfig.full()), ActionWanTransformer(TransformerConfig.full())
    tiny = TinyDecoder(TinyDecoderConfig.full()) if config.imagination.decoder == "tiny" else None
    context = "latents" if config.imagination.context == "latents" else "frames"
    work = wan_work(
        transformer,
        vae,
        image_size=PIXELS,
        context=context,
        steps=config.imagination.steps or 5,
        tiny_decoder=tiny,
    )
    nn.Module.to(vae, torch.bfloat16)  # diffusers' own `to` warns
    slot = slot_bytes(vae, PIXELS, context)
    return PublishedWorld(parameters=_parameters(transformer, vae), slot=slot, work=work)


def _opensora(config: TrainConfig) -> PublishedWorld:
    size, frames = replace(STDiT3Config.xl2(), unused_branches=False), FrameVaeConfig.published()
    transformer, vae = STDiT3(size), FrameVae(frames)
    return PublishedWorld(
        parameters=_parameters(transformer, vae),
        slot=opensora_slot_bytes(size, frames, PIXELS, torch.bfloat16),
        work=opensora_work(transformer, vae, image_size=PIXELS, steps=config.imagination.steps or 10),
    )


def _evac(config: TrainConfig) -> PublishedWorld:
    size = EvacConfig.published()
    networks = EvacNetworks.build(size).by_name().values()
    return PublishedWorld(
        parameters=_parameters(*networks),
        slot=estimate_slot(size, config.actor.max_decisions, torch.bfloat16),
        work=evac_work(size, steps=config.imagination.steps or size.schedule_steps),
    )


def _parameters(*modules: Any) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
