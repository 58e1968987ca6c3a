"""Decide which policy a published folder holds, from what it says and what the user chose."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from asyncrl.errors import CheckpointError
from asyncrl.policies.checkpoints.published_policy import CRITIC, PROPRIO, PublishedFolder, conventions_of
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.storage.tensor_reader import TensorFiles


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """What a published folder does not say about itself; "folder", 0 and "": see each."""

    norm_key: str = ""
    """Statistics to scale actions with; empty: the only ones there are."""
    convention: Literal["folder", "rlinf", "oft"] = "folder"
    """rlinf: no stop token, bicubic resize. oft: stop token, Lanczos resize and centre crop, as supervised
    OFT training. folder: what an export of ours says, else rlinf."""
    gripper: Literal["folder", "none", "libero", "maniskill"] = "folder"
    """folder: what an export of ours says, else by the statistics: libero*, bridge*; else none."""
    decoding: Literal["folder", "parallel", "autoregressive"] = "folder"
    """folder: what an export of ours says, else parallel."""
    images: int = 0
    """Pictures per decision; 0: what an export of ours says, else 1."""
    chunk: int = 0
    """Steps per decision; 0: what an export of ours says, else 8, or 1 for autoregressive."""
    proprio: bool = True
    """Read the proprioception projector if there is one."""
    critic: bool = True
    """Read the value head if there is one."""


def config_of(opened: PublishedFolder, choices: PublishedOptions) -> OpenVLAOFTConfig:
    """Build the configuration of the policy in a published folder.

    Raises:
        CheckpointError: the statistics cannot be found.
        ConfigError: the choices do not fit together.
    """
    known, known_key = conventions_of(opened.fields)
    stats = opened.action_stats()
    unscaled = known is not None and not (stats or choices.norm_key)
    key = "" if unscaled else opened.statistics_key(choices.norm_key or known_key)
    changes: dict[str, Any] = {"norm_key": key, "norm_stats": stats}
    changes |= {"dtype": _computed(opened.files)} if known is None else {}
    changes |= {"action_dim": len(stats[key].q01)} if key else {}
    if choices.convention != "folder":
        stop = choices.convention == "oft" and choices.decoding != "autoregressive"
        changes |= {"stop_token": stop, "image_pipeline": choices.convention}
    if choices.decoding != "folder":
        changes["decoding"] = choices.decoding
        changes |= {"chunk": 1} if choices.decoding == "autoregressive" else {}
    if choices.chunk:
        changes["chunk"] = choices.chunk
    if choices.images:
        changes["images"] = choices.images
    if choices.gripper != "folder":
        changes["gripper"] = choices.gripper
    elif known is None:
        changes["gripper"] = _gripper_of(key)
    changes |= _proprio(opened.files, choices.proprio)
    base = OpenVLAOFTConfig.full(**changes) if known is None else dataclasses.replace(known, **changes)
    return dataclasses.replace(base, **_critic(opened.files, base, choices.critic))


def _gripper_of(key: str) -> str:
    return {"libero": "libero", "bridge": "maniskill"}.get(key.split("_")[0], "none")


def _computed(files: TensorFiles) -> str:
    """Decide what a policy from elsewhere computes in, whose output layer has a certain type."""
    name = "language_model.lm_head.weight"
    half = name in files.names() and files.spec(name).dtype == torch.bfloat16
    return "bfloat16" if half else "float32"


def _proprio(files: TensorFiles, wanted: bool) -> dict[str, Any]:
    name = f"{PROPRIO}fc1.weight"
    if name not in files.names():
        return {}
    return {"proprio_dim": files.spec(name).shape[1] if wanted else 0}


def _critic(files: TensorFiles, config: OpenVLAOFTConfig, wanted: bool) -> dict[str, Any]:
    """Read level and hidden features of the folder's value head; its last layer tells the level."""
    names = [f"{CRITIC}mlp.{layer}.weight" for layer in (0, 2, 4)]
    if not wanted or not all(name in files.names() for name in names):
        return {"value_head": "none"}
    first, second, outputs = (files.spec(name).shape[0] for name in names)
    if outputs not in (1, config.chunk):
        raise CheckpointError(
            f"{files.label}: {names[2]} has {outputs} rows, but a critic gives 1 value per decision or "
            f"{config.chunk} (one per step). Leave it out with --no-critic, or correct --chunk."
        )
    return {"value_head": "chunk" if outputs == 1 else "action", "value_hidden": (first, second)}
