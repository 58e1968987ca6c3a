"""Policies as files: our own folder, the published OpenVLA layout, errors, the official picture pipeline."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, load_policy
from asyncrl.policies.openvla.preprocess import (
    crop_centre,
    encode_jpeg,
    prepare_oft,
    resize_lanczos3,
    through_jpeg,
)
from support.formulas import gelu, layer_norm
from support.published import (
    CONFIG,
    DINO,
    SIGLIP,
    STATS,
    TASK,
    logits_of,
    published_tensors,
    some_policy,
    write_published,
)
from support.published_exports import load_openvla
from support.worlds import change_json


def test_a_saved_policy_comes_back_equal(tmp_path: Path) -> None:
    policy = some_policy()
    policy.save(tmp_path / "new" / "policy")
    restored = load_policy(tmp_path / "new" / "policy")
    assert restored.config == policy.config
    assert restored.tokenizer.ids(TASK) == policy.tokenizer.ids(TASK)
    assert torch.equal(logits_of(restored), logits_of(policy))
    assert all(p.requires_grad and not p.is_meta for p in restored.parameters())
    assert not any(b.is_meta for b in restored.buffers())
    assert not restored.training
    assert sorted(f.name for f in (tmp_path / "new" / "policy").iterdir()) == [
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_half_precision_files_are_rounded_once_and_computed_in_the_configured_type(tmp_path: Path) -> None:
    policy = some_policy()
    policy.save(tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    restored = load_policy(tmp_path)
    for (name, mine), (_, theirs) in zip(restored.named_parameters(), policy.named_parameters(), strict=True):
        assert mine.dtype == torch.float32, name
        assert torch.equal(mine, theirs.bfloat16().float()), name
    assert load_policy(tmp_path, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_the_weights_tell_the_critics_level_not_the_configuration(tmp_path: Path) -> None:
    policy = some_policy()
    policy.add_critic("decision")
    policy.save(tmp_path)
    for level in ("none", "action"):
        change_json(tmp_path / "config.json", lambda c, level=level: c["asyncrl"].update(value_head=level))
        assert load_policy(tmp_path).critic == "decision"


def test_saving_again_does_not_disturb_a_policy_that_reads_the_old_file(tmp_path: Path) -> None:
    some_policy().save(tmp_path)
    first = load_policy(tmp_path)
    before = logits_of(first)
    other = some_policy()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    other.save(tmp_path)
    assert torch.equal(logits_of(first), before)
    assert logits_of(load_policy(tmp_path)).abs().max() == 0


def test_names_in_files_do_not_depend_on_the_version_of_transformers() -> None:
    old = "vision.dino.encoder.layer.0.attention.attention.query.weight"
    assert stable_name(old) == "vision.dino.encoder.layer.0.attention.q_proj.weight"
    assert stable_name("x.attention.output.dense.bias") == "x.attention.o_proj.bias"
    names = {stable_name(n) for n, _ in some_policy().named_parameters()}
    assert {f"vision.dino.encoder.layer.1.attention.{p}_proj.bias" for p in "qkvo"} <= names


def test_a_folder_without_a_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"format": "asyncrl-openvla-oft"}')
    with pytest.raises(CheckpointError, match=r"asyncrl convert \S+ \S+-new`"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="not of an OpenVLA policy"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("model.safetensors", None, r"model\.safetensors is missing"),
        *(("model.safetensors", kept, r"model\.safetensors is truncated") for kept in (0, 5, 2000, -1)),
        ("tokenizer.json", None, r"tokenizer\.json is missing"),
        ("tokenizer.json", 9, r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_a_file_that_is_missing_or_cut_is_named(tmp_path, name: str, kept: int | None, said: str) -> None:
    some_policy().save(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if kept is not None:
        (tmp_path / name).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=said):
        load_policy(tmp_path)


def test_a_configuration_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    some_policy().save(tmp_path)
    change_json(tmp_path / "config.json", lambda fields: fields["asyncrl"].update(llm_widht=1))
    with pytest.raises(ConfigError, match="llm_widht"):
        load_policy(tmp_path)


def slow_timm_tower(w: dict[str, Tensor], picture: Tensor, *, depth: int, heads: int, patch: int) -> Tensor:
    """A timm vision transformer from its tensors, up to block depth - 2: ``[3, H, W]`` to ``[P, D]``."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    side = picture.shape[1] // patch
    cells = [
        picture[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].flatten()
        for r in range(side)
        for c in range(side)
    ]
    x = (
        torch.stack(cells) @ w["patch_embed.proj.weight"].flatten(1).T
        + w["patch_embed.proj.bias"]
        + w["pos_embed"][0]
    )
    prefix = 0
    if "cls_token" in w:
        x, prefix = torch.cat([w["cls_token"][0], w["reg_token"][0], x]), 5
    for i in range(depth - 1):
        name = f"blocks.{i}."
        q, k, v = (
            linear(layer_norm(x, w, name + "norm1"), name + "attn.qkv")
            .reshape(len(x), 3, heads, -1)
            .unbind(1)
        )
        seen = [(q[:, h] @ k[:, h].T / q.shape[-1] ** 0.5).softmax(-1) @ v[:, h] for h in range(heads)]
        x = x + linear(torch.cat(seen, dim=1), name + "attn.proj") * w.get(name + "ls1.scale_factor", 1)
        y = linear(gelu(linear(layer_norm(x, w, name + "norm2"), name + "mlp.fc1")), name + "mlp.fc2")
        x = x + y * w.get(name + "ls2.scale_factor", 1)
    return x[prefix:]


def test_a_published_checkpoint_gives_the_features_of_a_plain_timm_tower(tmp_path: Path) -> None:
    tensors = published_tensors()
    write_published(tmp_path, tensors)
    policy = load_openvla(tmp_path, CONFIG, norm_key="desk")
    frames = torch.randint(
        0, 256, (1, 64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    picture = frames[0].permute(2, 0, 1) / 255
    mean, std = (
        torch.tensor(x)[:, None, None]
        for x in ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
    )
    dino, siglip = (
        {name.removeprefix(tower): t for name, t in tensors.items() if name.startswith(tower)}
        for tower in (DINO, SIGLIP)
    )
    expected = torch.cat(
        [
            slow_timm_tower(dino, (picture - mean) / std, depth=3, heads=3, patch=8),
            slow_timm_tower(siglip, (picture - 0.5) / 0.5, depth=4, heads=2, patch=8),
        ],
        dim=1,
    )
    with torch.no_grad():
        found = policy.vision(frames)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert torch.equal(policy.lm_head.weight, tensors["language_model.lm_head.weight"])
    assert policy.config.norm_stats == {"desk_no_noops": STATS}


def test_statistics_beside_the_weights_win_over_those_in_the_configuration(tmp_path: Path) -> None:
    write_published(tmp_path, published_tensors())
    newer = {"desk_no_noops": {"action": {"q01": [0.0] * 7, "q99": [2.0] * 7}}}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(newer))
    policy = load_openvla(tmp_path, CONFIG, norm_key="desk_no_noops")
    assert policy.config.norm_stats["desk_no_noops"].q99 == (2.0,) * 7
    assert policy.config.norm_stats["desk_no_noops"].mask == (True,) * 7


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
