"""Random tiny models and start states, and the flags of a run that takes seconds with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asyncrl.policies.checkpoints.folder import save_policy
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import StartState
from asyncrl.rewards.model import ResNetReward, save_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.start_states import save_start_states
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, save_world

GROUP_SIZE = 2
SIZE = 64


def write_models(folder: Path) -> list[str]:
    """Write policy, world, reward and start states; returns the flags of a small run with them."""
    torch.manual_seed(0)
    save_policy(OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()), folder / "policy")
    vae = WanVae(VaeConfig.tiny())
    save_world(
        folder / "world", WanWorld(ActionWanTransformer(TransformerConfig.tiny()), vae, image_size=SIZE)
    )
    reward = RewardConfig.tiny(tasks=tuple(TASKS))
    save_reward(folder / "world", ResNetReward(build_network(reward), reward))
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


def start_state(number: int, size: int) -> StartState:
    """A start state of noise."""
    frame = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return StartState(
        name=f"noise-{number}",
        task=TASKS[number % len(TASKS)],
        frame=frame,
        context_frames=np.empty((0, size, size, 3), np.uint8),
        context_actions=np.empty((0, 7), np.float32),
    )
