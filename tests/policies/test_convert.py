"""`asyncrl convert`: published checkpoints become policies and come back bit for bit; adapters, critics."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.export import convert
from asyncrl.policies.openvla.files import PublishedOptions, open_folder, read_original, read_pt
from asyncrl.policies.openvla.names import published_shapes, tensor_map, to_native, unused_shapes
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, load_policy
from asyncrl.storage.assets import policy_folder
from asyncrl.storage.tensor_files import INDEX
from support import child_environment
from support.published import (
    CONFIG,
    DINO,
    LLAMA,
    SIGLIP,
    STATS,
    TASK,
    all_tensors,
    assert_same,
    logits_of,
    published_tensors,
    run_cli,
    some_policy,
    write_published,
)
from support.published_exports import export_openvla, load_openvla


def in_and_out(source: Path, tmp_path: Path, **settings: object) -> Path:
    convert(source, tmp_path / "ours", **settings)  # type: ignore[arg-type]
    convert(tmp_path / "ours", tmp_path / "back", **settings)  # type: ignore[arg-type]
    return tmp_path / "back"


# --- round trip ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard_bytes", [100_000, 5_000_000_000])
def test_a_published_checkpoint_comes_back_bit_for_bit(tmp_path, dtype, shard_bytes) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in published_tensors().items()}
    tensors[f"{DINO}cls_token"][0, 0, :3] = torch.tensor([-0.0, 0.0, 1.0])
    own = {"auto_map": {"AutoConfig": "x.py"}, "timm_model_ids": ["a", "b"]}
    proprio = {"q01": [0.0] * 8, "q99": [1.0] * 8, "mask": [True] * 8}
    config = dataclasses.replace(CONFIG, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    source = write_published(tmp_path / "in", tensors, config=config, **own)
    action = {"q01": [-0.5] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False], "mean": [0.0] * 7}
    statistics = {"desk_no_noops": {"action": action, "proprio": proprio, "num_transitions": 5}}
    (source / "dataset_statistics.json").write_text(json.dumps(statistics))
    for name in ("preprocessor_config.json", "modeling_prismatic.py"):
        (source / name).write_text("{}")
    back = in_and_out(source, tmp_path, shard_bytes=shard_bytes)
    assert_same(all_tensors(back), tensors)
    assert (shard_bytes > 1e6) == (back / "model.safetensors").exists()
    fields = json.loads((back / "config.json").read_text())
    assert {name: fields[name] for name in own} == own
    assert fields["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert fields["norm_stats"] == json.loads((back / "dataset_statistics.json").read_text()) == statistics
    assert (back / "preprocessor_config.json").is_file()
    assert (back / "modeling_prismatic.py").is_file()


def test_raw_timm_names_of_layer_scales_come_back_as_the_published_ones(tmp_path: Path) -> None:
    tensors = published_tensors()
    raw = {name.replace("scale_factor", "gamma"): tensor for name, tensor in tensors.items()}
    assert raw.keys() != tensors.keys()
    assert_same(
        all_tensors(in_and_out(write_published(tmp_path / "in", raw, config=CONFIG), tmp_path)), tensors
    )


def test_the_full_size_has_the_published_names_shapes_and_numbers() -> None:
    config = OpenVLAOFTConfig.full()
    used = published_shapes(config)
    shapes = used | unused_shapes(config)
    table = {
        DINO: (343, 303_230_976),
        SIGLIP: (342, 427_680_704),
        "projector.": (6, 71_385_600),
        LLAMA: (290, 6_607_605_760),
        "language_model.lm_head.": (1, 131_334_144),
    }
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    for prefix, expected in table.items():
        of_it = [size for name, size in sizes.items() if name.startswith(prefix)]
        assert (len(of_it), sum(of_it)) == expected, prefix
    assert (len(sizes), sum(sizes.values())) == (982, 7_541_237_184)
    assert _numel(used) == 7_541_237_184 - _numel(unused_shapes(config))
    samples = {
        f"{DINO}pos_embed": (1, 256, 1024),
        f"{DINO}reg_token": (1, 4, 1024),
        f"{DINO}patch_embed.proj.weight": (1024, 3, 14, 14),
        f"{DINO}blocks.22.attn.qkv.weight": (3072, 1024),
        f"{DINO}blocks.23.ls2.scale_factor": (1024,),
        f"{SIGLIP}pos_embed": (1, 256, 1152),
        f"{SIGLIP}blocks.26.mlp.fc1.weight": (4304, 1152),
        f"{SIGLIP}attn_pool.kv.weight": (2304, 1152),
        f"{SIGLIP}attn_pool.latent": (1, 1, 1152),
        "projector.fc1.weight": (8704, 2176),
        f"{LLAMA}layers.31.mlp.down_proj.weight": (4096, 11008),
        f"{LLAMA}embed_tokens.weight": (32064, 4096),
        "language_model.lm_head.weight": (32064, 4096),
    }
    assert {name: shapes[name] for name in samples} == samples


def _numel(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def test_what_training_changed_goes_out_with_what_the_original_had_besides(tmp_path: Path) -> None:
    tensors = published_tensors()
    original = write_published(tmp_path / "in", tensors, config=CONFIG)
    convert(original, tmp_path / "ours")
    policy = load_policy(tmp_path / "ours")
    with torch.no_grad():
        policy.projector.fc3.weight.add_(1.0)
    run = tmp_path / "run" / "checkpoints" / "update_000003"
    policy.save(run)
    done = convert(policy_folder(str(tmp_path / "run")), tmp_path / "plain", choices=PublishedOptions())
    assert (done.zeros, done.kept) == (43, 0)
    expected = tensors | {"projector.fc3.weight": tensors["projector.fc3.weight"] + 1.0}
    zeros = {name: torch.zeros(shape) for name, shape in unused_shapes(CONFIG).items()}
    assert_same(all_tensors(tmp_path / "plain"), expected | zeros)
    for number, kept_in in enumerate((original, tmp_path / "ours")):
        out = tmp_path / f"out{number}"
        done = convert(run, out, original=kept_in)
        assert (done.zeros, done.kept) == (0, 43)
        assert_same(all_tensors(out), expected)
    export_openvla(policy, tmp_path / "live", original=read_original(original))
    assert_same(all_tensors(tmp_path / "live"), expected)


def test_another_type_is_rounded_once(tmp_path: Path) -> None:
    tensors = published_tensors()
    source = write_published(tmp_path / "in", tensors, config=CONFIG)
    done = convert(source, tmp_path / "ours", dtype=torch.bfloat16)
    policy = load_policy(tmp_path / "ours")
    assert done.config.dtype == policy.config.dtype == "bfloat16"
    assert torch.equal(policy.lm_head.weight, tensors["language_model.lm_head.weight"].bfloat16())


@pytest.mark.parametrize(
    ("stored", "computed"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_what_a_policy_computes_in_is_kept_whatever_its_numbers_are_stored_in(
    tmp_path: Path, stored: str, computed: str
) -> None:
    config = OpenVLAOFTConfig.from_json(CONFIG.to_json() | {"dtype": computed})
    some_policy(config).save(tmp_path / "ours", dtype=getattr(torch, stored))
    convert(tmp_path / "ours", tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["torch_dtype"], fields["text_config"]["torch_dtype"]) == (computed, computed)
    done = convert(tmp_path / "out", tmp_path / "back")
    assert done.config.dtype == load_policy(tmp_path / "back").config.dtype == computed
    assert {str(t.dtype) for t in all_tensors(tmp_path / "back").values()} == {f"torch.{stored}"}


def test_every_field_of_the_original_that_names_the_type_is_rewritten(tmp_path: Path) -> None:
    some_policy().save(tmp_path / "ours")
    text = {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    original = write_published(
        tmp_path / "in", published_tensors(), dtype="bfloat16", torch_dtype="bfloat16", text_config=text
    )
    convert(tmp_path / "ours", tmp_path / "out", original=original)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["text_config"] == {"model_type": "llama", "dtype": "float32", "torch_dtype": "float32"}
    assert (fields["dtype"], fields["torch_dtype"]) == ("float32", "float32")


# --- the command --------------------------------------------------------------


def write_old(folder: Path, policy: OpenVLAOFTPolicy) -> Path:
    """Write a policy in the layout of asyncrl 0.1, with a published folder's keepsakes."""
    folder.mkdir(parents=True)
    save_file(dict(policy.saved_tensors()), folder / "model.safetensors")
    unused = {n: t for n, t in published_tensors().items() if n in unused_shapes(policy.config)}
    save_file(unused, folder / "unused.safetensors")
    fields = {"format": "asyncrl-openvla-oft", "format_version": 1, **policy.config.to_json()}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "published").mkdir()
    (folder / "published" / "config.json").write_text(json.dumps({"model_type": "openvla", "kept": 1}))
    (folder / "published" / "modeling_prismatic.py").write_text("")
    policy.tokenizer.save(folder / "tokenizer.json")
    return folder


def test_the_command_that_load_policy_names_converts_a_folder_of_asyncrl_0_1(tmp_path, capsys) -> None:
    policy = some_policy(OpenVLAOFTConfig.from_json(CONFIG.to_json() | {"value_head": "action"}))
    source = write_old(tmp_path / "a folder", policy)
    with pytest.raises(CheckpointError, match="asyncrl convert") as refused:
        load_policy(source)
    command = shlex.split(str(refused.value).split("`")[1])
    assert command[:2] == ["asyncrl", "convert"]
    assert run_cli(*command[2:]) == 0
    printed = capsys.readouterr().out
    converted = load_policy(command[3])
    assert converted.config == policy.config
    assert torch.equal(logits_of(converted), logits_of(policy))
    out = Path(command[3])
    kept = {n: t for n, t in published_tensors().items() if n in unused_shapes(CONFIG)}
    assert_same({name: all_tensors(out)[name] for name in kept}, kept)
    assert json.loads((out / "config.json").read_text())["kept"] == 1
    assert (out / "modeling_prismatic.py").is_file()
    for text in ("kept      43 tensors", "statistics desk_no_noops", "GB in"):
        assert text in printed


def test_an_old_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = write_old(tmp_path / "old", some_policy())
    tensors = load_file(source / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor lm_head\.weight"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_published_folder_is_read_as_it_is(tmp_path: Path) -> None:
    source = write_published(tmp_path / "in", published_tensors(), config=CONFIG)
    policy = load_policy(source, options=PublishedOptions(convention="oft"))
    assert policy.config.norm_stats == {"desk_no_noops": STATS}
    assert (policy.config.stop_token, policy.config.image_pipeline) == (True, "oft")
    convert(source, tmp_path / "out", choices=PublishedOptions(convention="oft"))
    assert torch.equal(logits_of(load_policy(tmp_path / "out")), logits_of(policy))


def test_a_saved_policy_keeps_the_class_tokens_position_bit_for_bit(tmp_path: Path) -> None:
    policy = some_policy()
    policy.save(tmp_path / "saved")
    saved, expected = (
        dict(load_policy(tmp_path / "saved").named_parameters()),
        dict(policy.named_parameters()),
    )
    assert expected["vision.dino.embeddings.position_embeddings"][:, 0].abs().max() > 0
    assert all(torch.equal(saved[name], parameter) for name, parameter in expected.items())
    convert(tmp_path / "saved", tmp_path / "export")
    assert all_tensors(tmp_path / "export")[f"{DINO}pos_embed"].shape == (1, 64, 24)
    torch.testing.assert_close(logits_of(load_policy(tmp_path / "export")), logits_of(policy))


def test_what_cannot_work_is_answered_with_code_two(tmp_path, capsys) -> None:
    source = write_published(tmp_path / "in", published_tensors(), config=CONFIG)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    out = tmp_path / "out"
    for arguments, said in (
        ((source, tmp_path / "full"), "exists and is not an empty folder"),
        ((tmp_path / "nothing", out), "does not exist"),
        ((source, out, "--policy-settings", "norm_key=libero_goal"), "desk_no_noops"),
        ((source, out, "--adapter", tmp_path / "no"), "adapter_config.json is missing"),
        ((source, out, "--original", tmp_path / "no"), "config.json is missing"),
    ):
        assert run_cli(*arguments) == 2, arguments
        assert said in capsys.readouterr().err
    assert not out.exists()


def test_several_statistics_ask_for_a_choice(tmp_path: Path) -> None:
    entry = {"action": {"q01": [0.0] * 7, "q99": [1.0] * 7}}
    source = write_published(
        tmp_path / "in", published_tensors(), config=CONFIG, norm_stats={"b_no_noops": entry, "a": entry}
    )
    with pytest.raises(CheckpointError, match=r"has 2 action statistics.*norm_key=KEY: a, b_no_noops"):
        open_folder(source)
    assert open_folder(source, PublishedOptions(norm_key="b")).config.norm_key == "b_no_noops"


@pytest.mark.parametrize(
    ("key", "gripper"), [("libero_goal_no_noops", "libero"), ("desk", "none"), ("libero_10", "libero")]
)
def test_the_statistics_tell_the_gripper_of_a_folder_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, gripper: str
) -> None:
    sizes = {n: v for n, v in vars(CONFIG).items() if n in ("dino", "siglip", "llm_layers")}
    monkeypatch.setattr(
        OpenVLAOFTConfig, "full", lambda **changes: OpenVLAOFTConfig.tiny(**(sizes | changes))
    )
    entry = {"action": {"q01": [0.0] * 7, "q99": [1.0] * 7}}
    source = write_published(tmp_path / "in", published_tensors(), norm_stats={key: entry})
    config = open_folder(source).config
    assert (config.gripper, config.stop_token, config.chunk) == (gripper, False, 8)
    assert open_folder(source, PublishedOptions(gripper="none", chunk=5)).config.gripper == "none"


def test_a_converted_folder_names_what_is_missing_unknown_or_of_the_wrong_type(tmp_path: Path) -> None:
    tensors = published_tensors()
    qkv = f"{DINO}blocks.0.attn.qkv.bias"
    for changed, said in (
        ({qkv: None}, rf"lacks tensor {qkv}"),
        ({"language_model.model.extra": torch.zeros(1)}, r"holds language_model\.model\.extra"),
        ({qkv: torch.zeros(71)}, rf"{qkv} has shape \[71\], the model needs \[72\]"),
        ({qkv: torch.zeros(72, dtype=torch.int8)}, rf"{qkv} is of type I8"),
        ({f"{SIGLIP}norm.bias": torch.zeros(31)}, r"norm\.bias has shape \[31\], the model needs \[32\]"),
    ):
        chosen = {name: t for name, t in (tensors | changed).items() if t is not None}
        source = write_published(tmp_path / "in", chosen, config=CONFIG)
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_and_their_index_must_agree(tmp_path: Path) -> None:
    some_policy().save(tmp_path / "p", shard_bytes=200_000)
    listed = json.loads((tmp_path / "p" / INDEX).read_text())["weight_map"]
    file = listed[f"{LLAMA}layers.0.input_layernorm.weight"]
    fewer = {name: place for name, place in listed.items() if "input_layernorm" not in name}
    assert file in fewer.values()
    for weight_map, said in (
        (listed | {"ghost": file}, rf"{file} differ in ghost"),
        (fewer, r"differ in language_model\.model\.layers\.0\.input_layernorm"),
        ({"x": "../elsewhere.safetensors"}, "no weight_map"),
        (None, "no weight_map"),
    ):
        (tmp_path / "p" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=said):
            load_policy(tmp_path / "p")
    (tmp_path / "p" / INDEX).write_text(json.dumps({"weight_map": listed}))
    (tmp_path / "p" / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        load_policy(tmp_path / "p")


def test_files_are_read_by_the_library_too_and_parameters_share_no_memory(tmp_path: Path) -> None:
    policy = some_policy()
    policy.save(tmp_path)
    expected = {name: p.detach() for name, p in policy.named_parameters()}
    saved = load_file(tmp_path / "model.safetensors")
    assert_same(dict(to_native(tensor_map(expected), saved.items(), CONFIG)), expected)
    export_openvla(policy, tmp_path / "out")
    restored = load_openvla(tmp_path / "out", CONFIG, norm_key="desk")
    for parameter in restored.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.is_contiguous()


MEMORY = """
import sys, torch
from pathlib import Path
from asyncrl.policies.action_tokens import NormStats
sys.path.insert(0, sys.argv[-1])
from support.published_exports import load_openvla
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.policies.openvla.files import PublishedOptions
from asyncrl.policies.openvla.export import convert
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

def peak(name, work):
    def read(key):
        return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])
    open("/proc/self/clear_refs", "w").write("5")
    before = read("VmRSS")
    kept = work()
    print(name, (read("VmHWM") - before) / size)

folder = Path(sys.argv[1])
stats = NormStats(q01=(0.0,) * 7, q99=(1.0,) * 7, mask=(True,) * 7)
sizes = {"llm_width": 512, "llm_layers": 9, "llm_heads": 8, "llm_mlp": 1408}
config = OpenVLAOFTConfig.tiny(norm_key="desk", norm_stats={"desk": stats}, dtype="bfloat16", **sizes)
with torch.device("meta"):
    policy = OpenVLAOFTPolicy(config)
policy.to_empty(device="cpu")
for parameter in policy.parameters():
    torch.nn.init.constant_(parameter, 0.5)
size = 4 * sum(p.numel() for p in policy.parameters())
print("bytes", size)
peak("save", lambda: policy.save(folder / "ours", dtype=torch.float32))
del policy
peak("out", lambda: convert(folder / "ours", folder / "published"))
peak("in", lambda: convert(folder / "published", folder / "again"))
peak("load", lambda: load_policy(folder / "ours", dtype=torch.float32))
peak("half", lambda: load_policy(folder / "ours", dtype=torch.bfloat16))
peak("openvla", lambda: load_openvla(folder / "published", config, norm_key="desk", dtype=torch.float32))
"""


@pytest.mark.slow
def test_weights_are_streamed(tmp_path: Path) -> None:
    """Peaks of resident memory above what was there before, as parts of the weights' size in float32."""
    settings = child_environment() | {
        "MALLOC_MMAP_THRESHOLD_": "65536"
    }  # What is freed is given back at once.
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=settings)
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert found.pop("bytes") > 1e8
    assert found["save"] < 0.2, found  # all tensors at once in float32 would be 1.0
    assert found["out"] < 0.2, found
    assert found["in"] < 0.2, found
    assert 0.9 < found["load"] < 1.2, found  # 1.0 is the policy itself
    assert 0.9 < found["openvla"] < 1.2, found
    assert 0.4 < found["half"] < 0.7, found


# --- critics and side files ---------------------------------------------------


def critic(outputs: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {
        "0.weight": (64, 128),
        "0.bias": (64,),
        "2.weight": (32, 64),
        "2.bias": (32,),
        "4.weight": (outputs, 32),
    }
    return {f"value_head.mlp.{n}": torch.randn(*shape, generator=generator) for n, shape in shapes.items()}


@pytest.mark.parametrize(("outputs", "level"), [(1, "chunk"), (8, "action")])
def test_critics_come_in_and_go_out(tmp_path: Path, outputs: int, level: str) -> None:
    tensors = published_tensors() | critic(outputs)
    source = write_published(tmp_path / "in", tensors, config=CONFIG)
    assert_same(all_tensors(in_and_out(source, tmp_path)), tensors)
    policy = load_policy(tmp_path / "ours")
    assert policy.config.value_head == level
    inputs = policy.preprocess(torch.zeros(1, 64, 64, 3, dtype=torch.uint8).numpy(), [TASK])
    assert policy.values(inputs).shape == (1, outputs)
    done = convert(source, tmp_path / "without", choices=PublishedOptions(critic=False))
    assert sorted(done.left_out) == sorted(critic(1))
    assert load_policy(tmp_path / "without").value_head is None


HALF = {name: t for name, t in critic(1).items() if name != "value_head.mlp.2.bias"}
NOT_DISCRETE = ("action_head", "noisy_action_projector", "vision_backbone")


@pytest.mark.parametrize(
    ("more", "files", "said"),
    [
        (HALF, (), r"lacks tensor value_head\.mlp\.2\.bias"),
        (critic(5), (), r"has 5 rows.*chunk=N"),
        *(({}, (f"{name}--5",), rf"{name}--5_checkpoint\.pt is .*discrete action") for name in NOT_DISCRETE),
        ({}, ("proprio_projector--1", "proprio_projector--2"), "2 proprioception projectors"),
    ],
)
def test_a_folder_that_is_no_policy_of_tokens_is_refused(tmp_path, more, files, said) -> None:
    source = write_published(tmp_path / "in", published_tensors() | more, config=CONFIG)
    for name in files:
        torch.save({"module.fc1.weight": torch.zeros(1)}, source / f"{name}_checkpoint.pt")
    with pytest.raises(CheckpointError, match=said):
        open_folder(source)


def test_the_proprioception_projector_is_read_without_running_code(tmp_path: Path) -> None:
    file = tmp_path / "proprio_projector--10_checkpoint.pt"
    torch.save({"module.fc1.weight": torch.ones(128, 8), "fc2.bias": torch.zeros(128)}, file)
    found = read_pt(file)
    assert found.keys() == {"fc1.weight", "fc2.bias"}
    assert found["fc1.weight"].shape == (128, 8)
    torch.save({"a": Path("x")}, file)
    with pytest.raises(CheckpointError, match="no tensors by name"):
        read_pt(file)
    file.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="was not read"):
        read_pt(file)


def write_proprio(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"fc1.weight": (128, 8), "fc1.bias": (128,), "fc2.weight": (128, 128), "fc2.bias": (128,)}
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    torch.save(
        {f"module.{name}": tensor for name, tensor in tensors.items()},
        folder / "proprio_projector--10_checkpoint.pt",
    )
    return {f"proprio_projector.{name}": tensor for name, tensor in tensors.items()}


def with_proprio_statistics(folder: Path) -> Path:
    source = write_published(folder, published_tensors(), config=CONFIG)
    action = {"q01": [-0.5] * 7, "q99": [0.9] * 7, "mask": [True] * 6 + [False]}
    entry = {"action": action, "proprio": {"q01": [0.0] * 8, "q99": [1.0] * 8}}
    (source / "dataset_statistics.json").write_text(json.dumps({"desk_no_noops": entry}))
    return source


def test_proprioception_and_the_official_conventions_come_in_and_go_out(tmp_path, capsys) -> None:
    source = with_proprio_statistics(tmp_path / "in")
    projector = write_proprio(source)
    flags = ("--policy-settings", "convention=oft", "images=2", "gripper=maniskill")
    assert run_cli(source, tmp_path / "ours", *flags) == 0
    policy = load_policy(tmp_path / "ours")
    chosen = {
        "proprio_dim": 8,
        "images": 2,
        "image_pipeline": "oft",
        "stop_token": True,
        "gripper": "maniskill",
    }
    assert {name: getattr(policy.config, name) for name in chosen} == chosen
    parameters = dict(policy.named_parameters())
    assert_same({name: parameters[name].detach() for name in projector}, projector)
    assert run_cli(tmp_path / "ours", tmp_path / "back") == 0
    assert_same(all_tensors(tmp_path / "back"), published_tensors() | projector)
    assert open_folder(tmp_path / "back").config == policy.config
    capsys.readouterr()
    assert run_cli(source, tmp_path / "without", "--policy-settings", "proprio=false") == 0
    assert "left out  4 tensors: proprio_projector.fc1.bias" in capsys.readouterr().out
    assert load_policy(tmp_path / "without").config.to_json()["proprio_dim"] == 0


def test_an_autoregressive_policy_comes_in_and_goes_out(tmp_path: Path) -> None:
    source = with_proprio_statistics(tmp_path / "in")
    choices = PublishedOptions(convention="oft", decoding="autoregressive")
    convert(source, tmp_path / "ours", choices=choices)
    policy = load_policy(tmp_path / "ours")
    found = {name: policy.config.to_json()[name] for name in ("decoding", "chunk", "stop_token")}
    assert found == {"decoding": "autoregressive", "chunk": 1, "stop_token": False}
    export_openvla(policy, tmp_path / "back", original=read_original(source))
    assert_same(all_tensors(tmp_path / "back"), published_tensors())
    statistics = json.loads((tmp_path / "back" / "dataset_statistics.json").read_text())
    assert statistics == json.loads((source / "dataset_statistics.json").read_text())
    assert open_folder(tmp_path / "back").config == policy.config


def test_the_source_is_not_overwritten(tmp_path: Path) -> None:
    some_policy().save(tmp_path / "p")
    with pytest.raises(ConfigError, match="is the source itself"):
        convert(tmp_path / "p", tmp_path / "." / "p")


@pytest.mark.gpu
def test_weights_are_put_onto_the_gpu(tmp_path: Path) -> None:
    policy = some_policy()
    with torch.no_grad():
        policy.vision.dino.embeddings.position_embeddings[:, 0] = 0  # the published layout has none
    policy.save(tmp_path, shard_bytes=200_000)
    export_openvla(policy, tmp_path / "published")
    loaded = (
        load_policy(tmp_path, device="cuda"),
        load_openvla(tmp_path / "published", CONFIG, norm_key="desk", device="cuda"),
    )
    for restored in loaded:
        assert {p.device.type for p in restored.parameters()} == {"cuda"}
        assert {b.device.type for b in restored.buffers()} == {"cuda"}
        for mine, theirs in zip(restored.parameters(), policy.parameters(), strict=True):
            assert torch.equal(mine.cpu(), theirs)
