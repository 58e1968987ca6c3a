"""Random tiny models and start states, and the flags of a run that takes seconds with them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import StartState
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork, save_reward
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.start_states import save_start_states
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, save_world

GROUP_SIZE = 2
NANO_VAE = replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4)
SIZE = 64
POSE = (-0.1, 0.02, 0.88, 0.1, 0.0, 0.0, 1.0, 0.5)
"""Of the hand, in every start state."""


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def nano_wan(steps: int, **about: Any) -> WanWorld:
    """The smallest Wan world with the tabletop's pictures, of weights that are random now."""
    size = TransformerConfig(heads=2, head_dim=24, layers=2, ffn_dim=40, channels=32, patch=2, freq_dim=32)
    transformer = ActionWanTransformer(size)
    world = WanWorld(transformer, WanVae(NANO_VAE), image_size=SIZE, schedule_steps=steps, **about)
    for module in (world.transformer, world.vae):
        module.eval().requires_grad_(False)
    return world


def small_policy(**changes: Any) -> OpenVLAOFTPolicy:
    """A policy of random weights in eval mode, always the same, at the tabletop's picture size."""
    torch.manual_seed(0)
    tower = TowerConfig(width=48, depth=2, heads=2, mlp=96)
    sizes = {"dino": tower, "siglip": tower, "llm_layers": 2} | changes
    return OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny(**sizes)).eval()


def write_wan(folder: Path) -> None:
    """Write a Wan world."""
    vae = WanVae(VaeConfig.tiny())
    save_world(folder, WanWorld(ActionWanTransformer(TransformerConfig.tiny()), vae, image_size=SIZE))


def write_opensora(folder: Path) -> None:
    """Write an OpenSora world."""
    from asyncrl.worlds.opensora.world import save_world
    from support.opensora import nano_world

    save_world(folder, nano_world(image_size=SIZE))


def write_evac(folder: Path) -> None:
    """Write an EVAC world."""
    from asyncrl.worlds.evac.world import EvacWorld, save_world
    from support.evac import tiny_config, tiny_networks

    config = tiny_config(SIZE)
    save_world(folder, EvacWorld(tiny_networks(config), config))


WORLDS: Final[dict[str, Callable[[Path], None]]] = {
    "wan": write_wan,
    "opensora": write_opensora,
    "evac": write_evac,
}
"""Writes a world of a kind."""


def write_models(folder: Path, world: str = "wan") -> list[str]:
    """Write policy, world (one of `WORLDS`), reward and start states; returns the flags of a small run."""
    torch.manual_seed(0)
    OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()).save(folder / "policy")
    WORLDS[world](folder / "world")
    reward = RewardConfig.tiny(tasks=tuple(TASKS))
    save_reward(folder / "world", ResNetReward(RewardNetwork(reward), reward))
    save_start_states(folder / "starts.h5", [start_state(number, SIZE) for number in range(8)])
    return flags_of(folder)


def flags_of(folder: Path) -> list[str]:
    """Return the flags of a small run with the models that `write_models` wrote into `folder`."""
    flags = {
        "policy": folder / "policy",
        "world": folder / "world",
        "start-states": folder / "starts.h5",
        "device": "cpu",
        "actor.slots": 4,
        "actor.max-decisions": 1,
        "algorithm.group-size": GROUP_SIZE,
        "algorithm.groups-per-update": 1,
    }
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def start_state(
    number: int, size: int = SIZE, *, context: int = 0, task: str = "", pose: Sequence[float] | None = POSE
) -> StartState:
    """A start state of noise; with `context` frames it lies on the way of an episode."""
    rng = np.random.default_rng(number)
    return StartState(
        name=f"start-{number}",
        task=task or TASKS[number % len(TASKS)],
        frame=rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
        context_frames=rng.integers(0, 256, (context, size, size, 3), dtype=np.uint8),
        context_actions=rng.normal(size=(context, 7)).astype(np.float32),
        ee_pose=None if pose is None else np.array(pose, np.float32),
    )
