"""Chooses what carries new weights to the actors beside the learner."""

from __future__ import annotations

from asyncrl.config.run import TrainConfig
from asyncrl.launch.placement import Placement, pick_device


def transport_of(config: TrainConfig, placement: Placement, here: range) -> str:
    """Choose what carries the weights on rank 0's host; every rank there comes to the same answer."""
    if config.weights.transport != "auto":
        return config.weights.transport
    learner = pick_device(config.device, placement.learners[0])
    actors = [pick_device(config.device, rank) for rank in placement.actors if rank in here]
    if learner.type == "cpu":
        return "gloo"
    if set(actors) == {learner}:
        return "cuda_ipc"
    # NCCL takes one process of a group per GPU. Other learner ranks may share it: they are in another group.
    remote = [actor for actor in actors if actor != learner]
    if len(set(remote)) < len(remote):
        return "gloo"  # Two actors on a GPU that is not the learner's: through host memory.
    return "nccl" if len(remote) == len(actors) else "nccl+ipc"
