"""Frames, instructions and proprioception to `PolicyInputs` on the device.

Dimension letters:
    B  rows      H, W  frame size in pixels      N  pictures per row      Q  numbers of proprioception
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from asyncrl.devices.tensors import constant_to_device, to_device
from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import normalise
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.tokenizer import PromptTokenizer

JPEG_QUALITY: Final = 95
CROPPED_AREA: Final = 0.9
"""Share of the picture's area that is kept: fine-tuning augments with random crops of this size."""
_RADIUS: Final = 3
_ROWS_AT_ONCE: Final = 64
_THREADS: Final = 8


def prepare_oft(frames: NDArray[np.uint8], size: int, device: torch.device) -> Tensor:
    """Turn ``[..., H, W, 3]`` uint8 into ``[..., S, S, 3]``: JPEG, Lanczos resize, centre crop."""
    flat = frames.reshape(-1, *frames.shape[-3:])
    parts = []
    with ThreadPoolExecutor(min(_THREADS, len(flat))) as pool:  # Pillow lets other threads run meanwhile
        for start in range(0, len(flat), _ROWS_AT_ONCE):
            decoded = np.stack(list(pool.map(through_jpeg, flat[start : start + _ROWS_AT_ONCE])))
            parts.append(crop_centre(resize_lanczos3(to_device(decoded, device), size)))
    return torch.cat(parts).reshape(*frames.shape[:-3], size, size, 3)


def encode_jpeg(frame: NDArray[np.uint8]) -> bytes:
    """Write a frame ``[H, W, 3]`` uint8 as a JPEG file: quality 95, colours at half resolution (4:2:0)."""
    file, image = io.BytesIO(), Image.fromarray(np.ascontiguousarray(frame))
    image.save(file, format="JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
    return file.getvalue()


def through_jpeg(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pass ``[H, W, 3]`` uint8 through a JPEG file and back, like the fine-tuning data."""
    with Image.open(io.BytesIO(encode_jpeg(frame))) as image:
        return np.asarray(image.convert("RGB"))


def lanczos3_weights(source: int, target: int) -> NDArray[np.float64]:
    """Compute the weights of the source pixels in every target pixel, along one axis.

    Pixels are at half-integer coordinates; when the picture shrinks, the window grows with it (antialiasing).

    Returns:
        ``[target, source]`` float64; every row adds up to 1.
    """
    ratio = source / target
    stretch = max(ratio, 1.0)
    centers = (np.arange(target) + 0.5) * ratio
    distance = (np.arange(source) + 0.5 - centers[:, None]) / stretch
    window = np.sinc(distance) * np.sinc(distance / _RADIUS) * (np.abs(distance) <= _RADIUS)
    return window / window.sum(axis=1, keepdims=True)


@lru_cache(maxsize=32)
def _weights_on(source: int, target: int, device: torch.device) -> Tensor:
    return constant_to_device(lanczos3_weights(source, target), device)


def resize_lanczos3(frames_BHW3: Tensor, size: int) -> Tensor:
    """Resize ``[B, H, W, 3]`` uint8 to ``[B, S, S, 3]`` uint8; halves are rounded to even."""
    # Float64 because reduced-precision matrix products (TF32, autocast) would miss grey levels.
    rows_SH = _weights_on(frames_BHW3.shape[1], size, frames_BHW3.device)
    columns_SW = _weights_on(frames_BHW3.shape[2], size, frames_BHW3.device)
    levels_BSW3 = torch.einsum("sh,bhwc->bswc", rows_SH, frames_BHW3.double())
    levels_BSS3 = torch.einsum("tw,bswc->bstc", columns_SW, levels_BSW3)
    return levels_BSS3.round().clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=32)
def _crop_neighbours(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return lower and upper neighbour ``[S]`` int64 of every sample, and the upper one's share ``[S]``."""
    side = np.sqrt(CROPPED_AREA)
    samples = ((1 - side) / 2 + np.linspace(0, 1, size) * side) * (size - 1)  # corners meet corners
    lower = np.floor(samples).astype(np.int64)
    upper = np.minimum(lower + 1, size - 1)
    share = (samples - lower).astype(np.float32)
    lower_S, upper_S, share_S = (constant_to_device(array, device) for array in (lower, upper, share))
    return lower_S, upper_S, share_S


def crop_centre(frames_BSS3: Tensor) -> Tensor:
    """Crop the centre of ``[B, S, S, 3]`` uint8 (side ``sqrt(0.9)``) and stretch it to the old size.

    Bilinear, corners on corners; the result is ``255.5 x`` without its fraction, for x in [0, 1].
    """
    lower, upper, share_S = _crop_neighbours(frames_BSS3.shape[1], frames_BSS3.device)
    levels = frames_BSS3.float() / 255
    left, right = levels.index_select(2, lower), levels.index_select(2, upper)
    levels = left + (right - left) * share_S[:, None]
    top, bottom = levels.index_select(1, lower), levels.index_select(1, upper)
    levels = top + (bottom - top) * share_S[:, None, None]
    return (levels.clamp(0, 1) * 255.5).to(torch.uint8)


_WORLDS = (
    "A world model draws one picture and no proprioception: such a policy can be evaluated and trained in "
    "a simulator that gives what it needs, but not trained in a world."
)


def build_inputs(
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    device: torch.device,
    frames: NDArray[np.uint8],
    tasks: Sequence[str],
    proprio: NDArray[np.floating] | None,
) -> PolicyInputs:
    """Implement `interface.Policy.preprocess` without waiting for the device."""
    if frames.ndim == 5:
        frames = frames[:, : config.images]
    _check_frames(config, frames, len(tasks))
    if config.images == 1 and frames.ndim == 5:
        frames = frames[:, 0]
    ids, mask = tokenizer.batch(tasks)
    return PolicyInputs(
        pixels=place_pictures(config, frames, device),
        input_ids=to_device(ids.numpy(), device),
        attention_mask=to_device(mask.numpy(), device),
        padded=tokenizer.always_masked or not bool(mask.all()),
        proprio=_place_proprio(config, proprio, len(tasks), device),
    )


def place_pictures(config: OpenVLAOFTConfig, frames: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Move ``[..., H, W, 3]`` uint8 to the device, through the policy's `image_pipeline`."""
    if config.image_pipeline == "oft":
        return prepare_oft(frames, config.image_size, device)
    return to_device(frames, device)


def require_complete(config: OpenVLAOFTConfig, inputs: PolicyInputs) -> None:
    """Refuse inputs, built elsewhere, that lack a picture or the proprioception."""
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
    """Scale proprioception to ``[B, Q]`` float32 in [-1, 1]; None if the policy reads none."""
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
    return to_device(proprio.astype(np.float32) if bounds is None else normalise(proprio, bounds), device)
