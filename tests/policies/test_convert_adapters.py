"""Adapters of published models merged on the way in, and ours put on published models, against peft."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.policies.lora import save_adapter
from asyncrl.policies.openvla.export import convert
from asyncrl.policies.openvla.policy import load_policy
from support.adapters import adapted, logits_of, small
from support.published import CONFIG, LLAMA, all_tensors, published_tensors, run_cli, write_published
from support.published_exports import export_openvla


def module_tree(tensors: dict[str, Tensor]) -> nn.Module:
    """Published tensors as the modules that other stacks have: linear layers and convolutions, by name."""
    root = nn.Module()
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0].endswith(".bias")):
        *path, kind = name.split(".")
        place = root
        for part in path[:-1]:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        if kind == "weight" and tensor.ndim in (2, 4) and path[-1] != "embed_tokens":
            bias = tensors.get(".".join([*path, "bias"]))
            if tensor.ndim == 2:
                layer: nn.Module = nn.Linear(*tensor.shape[::-1], bias=bias is not None)
            else:
                layer = nn.Conv2d(3, len(tensor), tensor.shape[2:], stride=tensor.shape[2:])
            place.add_module(path[-1], layer)
        elif not isinstance(place._modules.get(path[-1]), nn.Linear | nn.Conv2d):
            if path[-1] not in dict(place.named_children()):
                place.add_module(path[-1], nn.Module())
            place.get_submodule(path[-1]).register_parameter(kind, nn.Parameter(tensor.clone()))
    root.load_state_dict(tensors)
    return root


PUBLISHED_TARGETS = [
    "qkv",
    "proj",
    "fc1",
    "fc2",
    "fc3",
    "q",
    "kv",
    "q_proj",
    "v_proj",
    "down_proj",
    "lm_head",
]


def published_adapter(folder: Path, tensors: dict[str, Tensor], **settings: object) -> nn.Module:
    """Write random adapters for a published model with peft; returns the model with them."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=PUBLISHED_TARGETS, **settings)  # type: ignore[arg-type]
    wrapped = get_peft_model(module_tree(tensors), config)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return wrapped


def merged_by_peft(wrapped: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in wrapped.merge_and_unload().state_dict().items()}  # type: ignore[operator]


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.1, "init_lora_weights": "gaussian"},
        {"rank_pattern": {r"attn\.qkv": 6}, "alpha_pattern": {r"q_proj": 16, r"blocks\.0\.mlp\.fc1": 2}},
    ],
    ids=["plain", "patterns"],
)
def test_published_adapters_are_merged_as_peft_does(tmp_path: Path, settings: dict[str, object]) -> None:
    tensors = published_tensors()
    wrapped = published_adapter(tmp_path / "adapter", tensors, **settings)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    for layer in (
        "vision_backbone.featurizer.blocks.0.attn.qkv",
        "vision_backbone.fused_featurizer.attn_pool.kv",
    ):
        assert f"base_model.model.{layer}.lora_A.weight" in names
    expected = merged_by_peft(wrapped)
    source = write_published(tmp_path / "in", tensors, config=CONFIG)
    done = convert(source, tmp_path / "ours", adapter=tmp_path / "adapter")
    assert done.merged == len(names) // 2
    convert(tmp_path / "ours", tmp_path / "back")
    found = all_tensors(tmp_path / "back")
    changed = 0
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
        changed += not torch.equal(found[name], tensors[name])
    assert changed == done.merged


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_rslora": True}, "use_rslora"),
        *(({"peft_type": kind}, kind) for kind in ("IA3", "LOHA", "LOKR", "ADALORA", "VERA", "BOFT", "OFT")),
        *(
            ({"init_lora_weights": kind}, f"init_lora_weights {kind}")
            for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        *(
            ({name: value}, rf"of kind 'LORA' \({name}\)")
            for name, value in {
                **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "a_kind_of_tomorrow"), True),
                "bias": "lora_only",
                "target_parameters": ["w"],
                "trainable_token_indices": [3],
                "layer_replication": [[0, 2]],
                "alora_invocation_tokens": [1, 2],
                "arrow_config": {"arrow_top_k": 3},
            }.items()
        ),
        ({"bias": "all"}, "bias"),
        ({"r": None}, "no low-rank adapters that can be read"),
        ({"lora_alpha": 0}, "positive alpha"),
        ({"lora_alpha": True}, "lora_alpha is True, expected float"),
        ({"lora_alpha": "6"}, "lora_alpha is '6'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 5}, "not of floats of rank 5"),
        ({"rank_pattern": {"qkv": 3}}, "not of floats of rank 3"),
        ({"alpha_pattern": {"(": 3}}, "no low-rank adapters"),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    tensors = published_tensors()
    published_adapter(tmp_path / "adapter", tensors)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    source = write_published(tmp_path / "in", tensors, config=CONFIG)
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out", adapter=tmp_path / "adapter")


def test_weights_beside_adapters_are_refused(tmp_path: Path) -> None:
    source = write_published(tmp_path / "in", published_tensors(), config=CONFIG)
    published_adapter(source, published_tensors())
    with pytest.raises(CheckpointError, match=r"holds weights and adapters .*--adapter FOLDER"):
        load_policy(source)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (
            f"{LLAMA}layers.9.mlp.up_proj.lora_A.weight",
            torch.zeros(4, 128),
            r"no low-rank .*layers\.9\..*lora_B",
        ),
        ("projector.fc1.lora_magnitude_vector", torch.zeros(4), "tensors besides lora_A and lora_B"),
        ("projector.fc2.lora_A.weight", torch.zeros(4, 5, dtype=torch.int8), "is not of floats"),
        ("projector.fc2.lora_A.weight", torch.zeros(4, 5), r"adapter of projector\.fc2 with shapes \[4, 5\]"),
    ],
)
def test_adapter_tensors_that_do_not_fit_are_named(tmp_path, name, tensor, said) -> None:
    tensors = published_tensors()
    published_adapter(tmp_path / "adapter", tensors)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": tensor}, file)
    source = write_published(tmp_path / "in", tensors, config=CONFIG)
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out", adapter=tmp_path / "adapter")


def test_adapters_of_another_policy_are_refused(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path / "adapter")
    source = write_published(tmp_path / "in", published_tensors(), config=CONFIG)
    with pytest.raises(CheckpointError, match=r"adapter of llm\.layers.* has none there"):
        convert(source, tmp_path / "out", adapter=tmp_path / "adapter")


def test_our_adapters_are_merged_into_our_folder(tmp_path: Path) -> None:
    trained = adapted()
    save_adapter(trained, tmp_path / "adapter")
    small().save(tmp_path / "start")
    trained.save(tmp_path / "expected")
    convert(tmp_path / "start", tmp_path / "out", adapter=tmp_path / "adapter")
    expected, found = (load_policy(tmp_path / name) for name in ("expected", "out"))
    torch.testing.assert_close(logits_of(found), logits_of(expected), atol=1e-5, rtol=0)
    assert not torch.equal(logits_of(found), logits_of(small()))


@pytest.mark.parametrize("targets", ["all", "language"])
def test_peft_puts_our_exported_adapters_on_the_published_model(tmp_path: Path, targets: str) -> None:
    trained = adapted(targets)
    run = tmp_path / "update_000001"
    small().save(run)
    save_adapter(trained, run / "adapter")
    assert run_cli(run / "adapter", tmp_path / "out") == 0
    assert "PeftModel.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    export_openvla(small(), tmp_path / "plain")
    export_openvla(trained, tmp_path / "trained")
    expected = all_tensors(tmp_path / "trained")
    wrapped = PeftModel.from_pretrained(module_tree(all_tensors(tmp_path / "plain")), str(tmp_path / "out"))  # type: ignore[arg-type]
    found = merged_by_peft(wrapped)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-5, msg=name)
    # and this package itself merges what it exported
    convert(tmp_path / "plain", tmp_path / "own", adapter=tmp_path / "out")
    for name, tensor in all_tensors(tmp_path / "own").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("through_link", [False, True], ids=["plain", "link"])
def test_an_adapter_inside_a_merged_checkpoint_is_not_merged_again(tmp_path, through_link: bool) -> None:
    """OpenVLA-OFT's fine-tuning leaves merged weights, and `lora_adapter/` as the record of it."""
    source = write_published(tmp_path / "SFT", published_tensors(), config=CONFIG)
    published_adapter(source / "lora_adapter", published_tensors())
    adapter = source / "lora_adapter"
    if through_link:
        (tmp_path / "link").symlink_to(adapter)
        adapter = tmp_path / "link"
    with pytest.raises(CheckpointError, match=r"merged already.*add it twice\. Leave --adapter out; or"):
        convert(source, tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()
