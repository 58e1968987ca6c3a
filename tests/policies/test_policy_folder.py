"""Policies as files: our own folder, the published OpenVLA layout, and errors of files that do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.policies.openvla.policy import load_policy
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
