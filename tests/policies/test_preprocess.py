"""The official picture pipeline against TensorFlow's formulas, written out with loops at tiny sizes."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.policies.openvla.preprocess import (
    crop_centre,
    encode_jpeg,
    prepare_oft,
    resize_lanczos3,
    through_jpeg,
)

CPU = torch.device("cpu")
LUMINANCE = [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55]
"""First two rows of the quantisation table in Annex K of the JPEG standard, at quality 50."""


def some_frames(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def kernel(x: float) -> float:
    if abs(x) > 3:
        return 0.0
    if x == 0:
        return 1.0
    return 3 * math.sin(math.pi * x) * math.sin(math.pi * x / 3) / (math.pi * x) ** 2


def weights_of(target_pixel: int, source: int, target: int) -> dict[int, float]:
    """TensorFlow's spans: the kernel widens with the ratio, ends at the edges and is made to add up to 1."""
    scale = source / target
    wide = max(scale, 1.0)
    center = (target_pixel + 0.5) * scale
    first = max(0, math.ceil(center - 3 * wide - 0.5))
    last = min(source - 1, math.floor(center + 3 * wide - 0.5))
    found = {i: kernel((i + 0.5 - center) / wide) for i in range(first, last + 1)}
    total = sum(found.values())
    return {i: weight / total for i, weight in found.items()}


@pytest.mark.parametrize(("height", "width", "size"), [(12, 10, 8), (16, 16, 7), (6, 5, 8), (8, 8, 8)])
def test_lanczos_equals_the_sum_over_every_span(height: int, width: int, size: int) -> None:
    frame = some_frames(height, width)
    found = resize_lanczos3(torch.from_numpy(frame)[None], size)[0]
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (size, size, 3))
    for y in range(size):
        for x in range(size):
            rows, columns = weights_of(y, height, size), weights_of(x, width, size)
            for c in range(3):
                level = sum(
                    v * h * float(frame[i, j, c]) for i, v in rows.items() for j, h in columns.items()
                )
                assert found[y, x, c] == min(255, max(0, round(level)))


@pytest.mark.parametrize("size", [5, 8])
def test_the_crop_equals_bilinear_sampling_between_the_corners(size: int) -> None:
    frame = some_frames(size, size)
    found = crop_centre(torch.from_numpy(frame)[None])[0]
    side = math.sqrt(0.9)
    low = (1 - side) / 2
    levels = frame / 255

    def place(i: int) -> tuple[int, int, float]:
        at = low * (size - 1) + i * side * (size - 1) / (size - 1)
        return math.floor(at), math.ceil(at), at - math.floor(at)

    for y in range(size):
        for x in range(size):
            (top, bottom, down), (left, right, along) = place(y), place(x)
            upper = levels[top, left] + (levels[top, right] - levels[top, left]) * along
            lower = levels[bottom, left] + (levels[bottom, right] - levels[bottom, left]) * along
            expected = np.floor(255.5 * (upper + (lower - upper) * down))
            assert found[y, x].tolist() == expected.tolist()


def test_the_jpeg_has_quality_95_and_colours_at_half_the_resolution() -> None:
    file = encode_jpeg(some_frames(32, 32))
    opened: Any = Image.open(io.BytesIO(file))
    table = opened.quantization[0]
    at_95 = [max(1, (q * 10 + 50) // 100) for q in LUMINANCE]  # 200 - 2 * 95 percent
    assert list(table[:16]) == at_95
    frame_header = file.index(b"\xff\xc0")
    components = [file[frame_header + 10 + 3 * i : frame_header + 13 + 3 * i] for i in range(3)]
    assert [part[1] for part in components] == [
        0x22,
        0x11,
        0x11,
    ]  # luminance twice as fine in both directions


def test_the_policy_sees_the_pipeline_that_its_configuration_names() -> None:
    frames = some_frames(2, 80, 72)
    policies = {
        name: OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny(image_pipeline=name)) for name in ("rlinf", "oft")
    }
    tasks = ["lift the cube"] * 2
    raw, official = (policy.preprocess(frames, tasks).pixels for policy in policies.values())
    assert np.array_equal(raw.numpy(), frames)
    decoded = torch.from_numpy(np.stack([through_jpeg(frame) for frame in frames]))
    expected = crop_centre(resize_lanczos3(decoded, 64))
    assert torch.equal(official, expected)
    several = prepare_oft(frames.reshape(1, 2, 80, 72, 3), 64, CPU)
    assert torch.equal(several[0], expected)
