"""Chooses what an actor and a learner rank move to host memory while they have nothing to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.actors.imagination import Imagination
from asyncrl.actors.play import Play
from asyncrl.config.run import TrainConfig
from asyncrl.devices.offload import NO_OFFLOAD, HoldsAddresses, IdleOffload, OffloadedTensors
from asyncrl.launch.policies import as_module
from asyncrl.learner.update import Update


def actor_offload(config: TrainConfig, acting: Imagination[Any] | Play) -> IdleOffload:
    """Offload an idle actor's models. What the receivers hold stays; new weights reach the copy."""
    if not config.actor.offload:
        return NO_OFFLOAD
    policy = acting.policy
    others = acting.models if isinstance(acting, Imagination) else []
    models = [as_module(policy), *(module for other in others for module in other.modules().values())]
    movable = [model for model in (policy, *others) if isinstance(model, HoldsAddresses)]
    return IdleOffload(
        OffloadedTensors(
            partial(_tensors_of, models),
            lambda: policy.acting_tensors().values(),
            acting.devices,
            on_offload=lambda: [model.weights_moved() for model in movable],
        )
    )


def learner_offload(config: TrainConfig, update: Update) -> IdleOffload:
    """Offload, while it waits, this rank's part of weights, gradient and optimizer state."""
    if not config.learner.offload:
        return NO_OFFLOAD
    reference = getattr(update.reference, "policy", None)
    models = [model for model in (update.policy, reference) if isinstance(model, nn.Module)]
    movable = [model for model in models if isinstance(model, HoldsAddresses)]
    return IdleOffload(
        OffloadedTensors(
            partial(_tensors_of, models),
            partial(_training_tensors, update),
            {update.device},
            on_offload=lambda: [model.weights_moved() for model in movable],
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
