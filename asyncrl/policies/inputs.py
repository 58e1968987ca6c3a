"""Frames, instructions and proprioception in, `PolicyInputs` on the device out; what is missing is named.

Dimension letters:
    B  rows      H, W  frame size in pixels      N  pictures per row      Q  numbers of proprioception
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.tensors import put
from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import normalise
from asyncrl.policies.openvla_config import OpenVLAOFTConfig
from asyncrl.policies.pictures import prepare_oft
from asyncrl.policies.protocol import PolicyInputs
from asyncrl.policies.tokenizer import PromptTokenizer

_WORLDS = (
    "A world model draws one picture and no proprioception: such a policy can be evaluated in a simulator "
    "that gives what it needs, but not trained in a world."
)


def build_inputs(
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    device: torch.device,
    frames: NDArray[np.uint8],
    tasks: Sequence[str],
    proprio: NDArray[np.floating] | None,
) -> PolicyInputs:
    """Do what `protocol.Policy.preprocess` says, without waiting for the device.

    Raises:
        ConfigError: The frames or the proprioception are missing, or not of the type and shape needed.
    """
    _check_frames(config, frames, len(tasks))
    if config.images == 1 and frames.ndim == 5:
        frames = frames[:, 0]
    ids, mask = tokenizer.batch(tasks)
    return PolicyInputs(
        pixels=place_pictures(config, frames, device),
        input_ids=put(ids.numpy(), device),
        attention_mask=put(mask.numpy(), device),
        padded=not bool(mask.all()),
        proprio=_place_proprio(config, proprio, len(tasks), device),
    )


def place_pictures(config: OpenVLAOFTConfig, frames: NDArray[np.uint8], device: torch.device) -> Tensor:
    """``[..., H, W, 3]`` uint8 on the device, after the `image_pipeline` that the policy wants."""
    if config.image_pipeline == "oft":
        return prepare_oft(frames, config.image_size, device)
    return put(frames, device)


def require_complete(config: OpenVLAOFTConfig, inputs: PolicyInputs) -> None:
    """Refuse inputs that lack a picture or the proprioception (they need not come from `build_inputs`).

    Raises:
        ConfigError: Says what is missing.
    """
    shape = tuple(inputs.pixels.shape)
    if shape[1:-3] != ((config.images,) if config.images > 1 else ()):
        raise ConfigError(f"{_wanted_frames(config)}, but it got pixels {list(shape)}. {_WORLDS}")
    if config.proprio_dim and inputs.proprio is None:
        raise _lacks_proprio(config)


def _check_frames(config: OpenVLAOFTConfig, frames: NDArray[np.uint8], tasks: int) -> None:
    one = frames.ndim == 4 and config.images == 1
    several = frames.ndim == 5 and frames.shape[1] == config.images
    if frames.dtype == np.uint8 and (one or several) and frames.shape[-1] == 3 and len(frames) == tasks:
        return
    advice = _WORLDS if config.images > 1 else "Check the world's or simulator's observation."
    found = f"frames {frames.dtype}{list(frames.shape)} for {tasks} tasks"
    raise ConfigError(f"{_wanted_frames(config)}, but it got {found}. {advice}")


def _wanted_frames(config: OpenVLAOFTConfig) -> str:
    if config.images == 1:
        return "The policy reads one uint8 picture [H, W, 3] per task"
    return f"The policy reads {config.images} uint8 pictures [{config.images}, H, W, 3] per task"


def _lacks_proprio(config: OpenVLAOFTConfig) -> ConfigError:
    return ConfigError(
        f"The policy needs proprioception of {config.proprio_dim} numbers per row (proprio_dim in its "
        f"config.json), but it got none. {_WORLDS}"
    )


def _place_proprio(
    config: OpenVLAOFTConfig, proprio: NDArray[np.floating] | None, rows: int, device: torch.device
) -> Tensor | None:
    """``[B, Q]`` float32 in [-1, 1]. What a policy does not look at is not asked for, and ignored."""
    if not config.proprio_dim:
        return None
    if proprio is None:
        raise _lacks_proprio(config)
    if proprio.shape != (rows, config.proprio_dim):
        raise ConfigError(
            f"The policy needs proprioception of {config.proprio_dim} numbers for each of {rows} rows, but "
            f"it got {list(proprio.shape)}. Give the robot's state as in the data it was fine-tuned on."
        )
    bounds = config.proprio_bounds
    return put(proprio.astype(np.float32) if bounds is None else normalise(proprio, bounds), device)
