"""OpenSora's and EVAC's worlds with random weights, of the published size or small ones, for benchmarks.

    python benchmarks/random_worlds.py /tmp/opensora --kind opensora     write a folder for `--world`

The folder has asyncrl's own layout, a reward model that calls no frame a success, and start states. Worlds of
that layout are computed in float32; with --imagination.precision bf16 they are as fast as the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import published_world
import torch
import tyro
from measuring import randomised
from torch import Tensor, nn

from asyncrl.launch.placement import pick_device
from asyncrl.records import ACTION_DIM, CHUNK, StartState
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.rewards.model import ResNetReward, save_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.evac.options import EvacOptions
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.evac.world import save_world as save_evac
from asyncrl.worlds.opensora.action_range import ActionRange
from asyncrl.worlds.opensora.autoencoder import FrameVae, VaeConfig
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import OpenSoraWorld
from asyncrl.worlds.opensora.world import save_world as save_opensora

POSE = (-0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 1.0, 0.5)
"""In front of EVAC's camera."""


def with_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, and norms that let numbers through: zeros would be multiplied at less power."""
    made = randomised(module, device, dtype)
    for part in made.modules():
        if isinstance(part, nn.GroupNorm | nn.LayerNorm) and part.weight is not None:
            part.weight.data.fill_(1)
    return made


def build_opensora(*, tiny: bool, device: torch.device) -> OpenSoraWorld:
    """OpenSora's world with random weights, eager."""
    size = STDiT3Config.tiny() if tiny else replace(STDiT3Config.xl2(), unused_branches=False)
    vae_size = VaeConfig.tiny() if tiny else VaeConfig.published()
    with torch.device("meta"):
        transformer, vae = STDiT3(size), FrameVae(vae_size)
    dtype = torch.float32 if tiny else torch.bfloat16
    transformer, vae = with_weights(transformer, device, dtype), with_weights(vae, device, dtype)
    vae.use_channels_last()
    actions = ActionRange(low=(-1.0,) * ACTION_DIM, high=(1.0,) * ACTION_DIM)
    return OpenSoraWorld(transformer, vae, actions, image_size=64 if tiny else 256, device=device)


def build_evac(*, tiny: bool, steps: int, device: torch.device) -> EvacWorld:
    """EVAC's world with random weights, eager; poses stay where the camera sees them.

    `steps`: network calls per decision; 0: as published.
    """
    config = EvacConfig.tiny() if tiny else EvacConfig.published()
    with torch.device("meta"):
        networks = EvacNetworks.build(config)
    dtype = torch.float32 if tiny else torch.bfloat16
    for name, module in networks.by_name().items():
        made = with_weights(module, device, torch.float32 if name == "pose_model" else dtype)
        object.__setattr__(networks, name, made)
    networks.image_encoder.set_constants(device)
    networks.pose_model.abs_action_mean.copy_(torch.tensor(POSE))
    networks.pose_model.abs_action_std.fill_(0.01)
    return EvacWorld(networks, config, options=EvacOptions(steps=steps), device=device)


def begin(world: OpenSoraWorld | EvacWorld, rows: int, decisions: int) -> tuple[Any, Tensor, list[int]]:
    """Open the slots; returns their state, actions and noise seeds."""
    rng, side = np.random.default_rng(0), world.image_size
    one = StartState(
        name="random",
        task="",
        frame=rng.integers(0, 256, (side, side, 3), dtype=np.uint8),
        context_frames=np.zeros((0, side, side, 3), np.uint8),
        context_actions=np.zeros((0, ACTION_DIM), np.float32),
        ee_pose=np.array(POSE, np.float32),
    )
    state: Any = world.start([one], decisions=decisions).select([0] * rows)
    actions = torch.randn(rows, CHUNK, ACTION_DIM, device=world.device) * 0.3
    return state, actions, list(range(rows))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Write a world."""

    folder: Annotated[Path, tyro.conf.Positional]
    kind: Literal["opensora", "evac"]
    scale: Literal["full", "tiny"] = "full"


def main() -> None:
    """Write it, its reward model and its start states; the last ones tell that all is there."""
    settings = tyro.cli(Settings, description=__doc__)
    device, tiny = pick_device("auto"), settings.scale == "tiny"
    if settings.kind == "opensora":
        world = build_opensora(tiny=tiny, device=device)
        save_opensora(settings.folder, world)
    else:
        world = build_evac(tiny=tiny, steps=0, device=device)
        save_evac(settings.folder, world)
    size = RewardConfig.tiny(tasks=(), image_size=world.image_size) if tiny else RewardConfig.full()
    network = build_network(size)
    with torch.no_grad():
        list(network.parameters())[-1].sub_(5.0)  # Of the last layer: every imagined episode has full length.
    save_reward(settings.folder, ResNetReward(network, size))
    published_world.write_dataset(settings.folder / "dataset", SUITES["libero_spatial"], 40, 0)


if __name__ == "__main__":
    main()
