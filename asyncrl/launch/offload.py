"""What --actor.offload and --learner.offload keep in host memory: models in, `Parking` out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from asyncrl.actors.imagination import Imagination
from asyncrl.config.run import TrainConfig
from asyncrl.devices.offload import NEVER, Parked, Parking
from asyncrl.learner.update import Update
from asyncrl.worlds.wan.world import WanState, WanWorld


@runtime_checkable
class Movable(Protocol):
    """A model that knows addresses of its weights, as captured CUDA graphs do."""

    def weights_left(self) -> None:
        """Forget the addresses: the weights will be elsewhere when they return."""
        ...


def actor_parking(config: TrainConfig, imagination: Imagination[WanState], world: WanWorld) -> Parking:
    """Park an actor's models; what the receiver holds stays, and new weights reach the parked copy.

    Args:
        config: Of the run.
        imagination: Policy and reward model are parked.
        world: Its world model.
    """
    if not config.actor.offload:
        return NEVER
    policy, reward = imagination.policy, imagination.reward
    parts = (policy, world.transformer, world.vae, world.decoder, reward.network)
    models = [part for part in parts if isinstance(part, nn.Module)]
    movable = [model for model in (policy, world, reward) if isinstance(model, Movable)]
    return Parking(
        Parked(
            partial(_tensors_of, models),
            lambda: policy.acting_tensors().values(),
            imagination.devices,
            leaving=lambda: [model.weights_left() for model in movable],
        )
    )


def learner_parking(config: TrainConfig, update: Update) -> Parking:
    """Park this rank's part of weights, gradient and optimizer state."""
    if not config.learner.offload:
        return NEVER
    reference = getattr(update.reference, "policy", None)
    models = [model for model in (update.policy, reference) if isinstance(model, nn.Module)]
    movable = [model for model in models if isinstance(model, Movable)]
    return Parking(
        Parked(
            partial(_tensors_of, models),
            partial(_training_tensors, update),
            {update.device},
            leaving=lambda: [model.weights_left() for model in movable],
        )
    )


def _tensors_of(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _training_tensors(update: Update) -> Iterator[Tensor]:
    """What an update changes: weights, their gradient, the optimizer's state."""
    for parameter in update.policy.trainable_parameters().values():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from (
            x for x in update.optimizer.state.get(parameter, {}).values() if isinstance(x, torch.Tensor)
        )
