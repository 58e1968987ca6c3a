"""Know the sizes of the published models that the shipped recipes name, without having their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, Literal

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.models import measure
from asyncrl.doctor.work import RunWork
from asyncrl.errors import ConfigError
from asyncrl.launch.environment import EnvironmentFiles
from asyncrl.launch.policies import add_adapters
from asyncrl.launch.simulated import simulator_named
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import new_policy
from asyncrl.policies.openvla.work import forward_flops
from asyncrl.worlds.published_sizes import PIXELS, PublishedWorld, published_world

REWARD: Final = 45_000_000
"""Bytes of a published reward model."""


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
        nbytes=0 if simulated else world.nbytes + REWARD,
        action_spec=policy.action_spec,
    )
    steps = config.simulator.horizon if simulated else config.actor.max_decisions * size.chunk
    return measure(config, policy, files, world.slot), RunWork(
        policy=_policy_flops(size.decoding, size.chunk),
        frozen=policy.frozen_flops(config.lora.targets)
        if config.learner.frozen_precision == "float8"
        else 0.0,
        world=world.work,
        token_passes=policy.token_passes,
        decisions=-(-steps // size.chunk),
        chunk=size.chunk,
    )


@cache
def _policy_flops(decoding: Literal["parallel", "autoregressive"], chunk: int) -> float:
    return forward_flops(OpenVLAOFTConfig.full(decoding=decoding, chunk=chunk))


def _world(config: TrainConfig) -> PublishedWorld:
    found = published_world(Path(config.world).name, config.imagination, config.actor.max_decisions)
    if found is None:
        raise ConfigError(
            f"--world is {config.world}, but only the worlds of the shipped recipes are known without their "
            "files, like models/RLinf-Wan-LIBERO-Spatial. Name one of these, or run `asyncrl doctor` where "
            "the files are."
        )
    return found


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
