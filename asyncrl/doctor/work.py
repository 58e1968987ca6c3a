"""What a run computes, whatever the device it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.launch.named_models import named_world
from asyncrl.launch.simulated import simulator_named
from asyncrl.policies.capabilities import CountsFlops, CountsFrozenFlops
from asyncrl.policies.interface import Policy
from asyncrl.worlds.interface import CountsWork
from asyncrl.worlds.work import WorldWork

LEAST_FLOPS: Final = 1e11
"""Of a decision of the policy. Below, launches and the host take longer than what a GPU computes."""


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """What a run computes, whatever the device."""

    policy: float
    """FLOPs of a decision's forward pass."""
    frozen: float = 0.0
    """Of `policy`, those that the learner makes products of 8-bit numbers (--learner.frozen-precision)."""
    world: WorldWork
    """Empty where a simulator is played in, whose time is not predicted."""
    token_passes: int = 0
    """Passes that acting makes beside the one that is counted: of a policy that draws token by token."""
    decisions: int
    """Decisions of an episode of full length."""
    chunk: int
    """Steps of a decision."""


def work_of(config: TrainConfig, policy: Policy) -> RunWork | None:
    """Ask the models what they compute; None where they do not say it, or too little to go by.

    Args:
        config: With what the world says where its user said nothing.
        policy: Of the run.
    """
    counts: object = policy
    if not isinstance(counts, CountsFlops) or (flops := counts.decision_flops()) < LEAST_FLOPS:
        return None
    world = WorldWork()
    if not simulator_named(config.world):
        named = named_world(config.world, config.world_settings)
        if not isinstance(named.kind, CountsWork):
            return None
        world = named.kind.decision_work(named.folder, config.imagination, **named.settings)
    rounded = config.learner.frozen_precision == "float8"
    return RunWork(
        policy=flops,
        frozen=_frozen_flops(policy, config.lora.targets) if rounded else 0.0,
        world=world,
        token_passes=counts.token_passes,
        decisions=config.actor.max_decisions,
        chunk=policy.action_spec.chunk,
    )


def _frozen_flops(policy: object, targets: str) -> float:
    return policy.frozen_flops(targets) if isinstance(policy, CountsFrozenFlops) else 0.0
