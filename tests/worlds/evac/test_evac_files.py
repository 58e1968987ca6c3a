"""Folders of EVAC worlds: ours, and the published layout written with random values."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.storage.tensor_files import header_names, write_tensors
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.files import PREFIXES, open_evac, published_tensors
from asyncrl.worlds.evac.world import EvacWorld, save_world
from asyncrl.worlds.files import convert_world
from support.evac import (
    PUBLISHED,
    SMALL,
    checkpoint,
    pose_file,
    some_actions,
    start_state,
    tiny_config,
    tiny_networks,
)
from support.published_worlds import listed_shapes
from support.worlds import change_json, cut, load_world

SETTINGS = ImaginationSettings()
TINY = tiny_config()


@pytest.fixture(scope="module")
def small() -> EvacNetworks:
    return tiny_networks(SMALL)


class Callback:
    """Stands for an object of a training framework."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (write_it, (self.path,))


def write_it(path: str) -> None:
    Path(path).write_text("this ran")


def lightning(folder: Path, tensors: dict[str, Tensor], proof: Path | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    content: dict[str, Any] = {
        "epoch": 281,
        "global_step": 34800,
        "state_dict": tensors,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3), "step": 4}}, "param_groups": [{}]}],
        "hyper_parameters": {"lr": 5e-5, (1, 2): {"set": {3, 4}}},
    }
    if proof is not None:
        content["callbacks"] = {"EMA": Callback(str(proof)), "more": [Callback(str(proof))]}
    path = folder / "epoch=281-step=34800.ckpt"
    torch.save(content, path)
    return path


def published_folder(folder: Path, networks: EvacNetworks, **changed: Tensor | None) -> Path:
    tensors: dict[str, Tensor | None] = {**checkpoint(networks), **changed}
    lightning(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    torch.save(pose_file(networks), folder / "action_predictor.pth")
    return folder


def equal_networks(one: EvacNetworks, other: EvacNetworks) -> None:
    for name, module in one.by_name().items():
        theirs = other.by_name()[name].state_dict()
        assert module.state_dict().keys() == theirs.keys()
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor.float(), theirs[key].float()), (name, key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(kind="wan"), "describes 'wan'"),
        (lambda c: c.update(format="asyncrl-world-9"), "asyncrl-world-9"),
        (lambda c: c.update(format="asyncrl-world-1"), "earlier version.*asyncrl convert"),
        (lambda c: c.pop("unet"), "incomplete .no unet"),
        (lambda c: c.update(camera=3), "incomplete or impossible"),
        (lambda c: c["camera"].update(colour=1), "colour"),
        (lambda c: c["camera"].update(focal=0), "focal length"),
        (lambda c: c.pop("domain"), "no domain"),
        (lambda c: c["unet"].update(groups=5), "multiple of 5"),
        (lambda c: c["unet"].update(head_dim=0), "multiple of 0"),
        (lambda c: c["action_resampler"].update(head_dim=0), "incomplete or impossible"),
        (lambda c: c["image_encoder"].update(heads=3), "multiple of 3"),
        (lambda c: c.pop("version"), "version"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    save_world(tmp_path, EvacWorld(tiny_networks(TINY), TINY))
    change_json(tmp_path / "world.json", change)
    with pytest.raises(CheckpointError, match=message):
        open_evac(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cond_stage_model.safetensors", r"lacks tensor cond_stage_model\.latents"),
        ("model.diffusion_model.safetensors", r"model\.diffusion_model\.safetensors is missing"),
    ],
)
def test_a_missing_file_of_ours_is_named(tmp_path: Path, name: str, words: str) -> None:
    save_world(tmp_path, EvacWorld(tiny_networks(TINY), TINY))
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=words):
        EvacWorld.check(tmp_path, SETTINGS)


def test_a_folder_of_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    said = r"world\.json of kind 'evac'.*model\.diffusion_model\.input_blocks"
    with pytest.raises(CheckpointError, match=said):
        open_evac(tmp_path)


def test_saved_files_have_the_published_names_of_tensors(tmp_path: Path) -> None:
    networks = tiny_networks(TINY)
    save_world(tmp_path, EvacWorld(networks, TINY))
    found = {f"{path.stem}.{name}" for path in tmp_path.glob("*.safetensors") for name in header_names(path)}
    ours = {name for name in checkpoint(networks) if name.startswith(tuple(PREFIXES.values()))}
    poses = {f"pose_model.{name}" for name in networks.pose_model.state_dict()}
    assert found == (ours - {"embedder.model.visual.proj"}) | poses


def test_a_world_of_an_earlier_version_is_converted_and_imagines_as_before(tmp_path: Path) -> None:
    world, old = EvacWorld(tiny_networks(TINY), TINY, version=7), tmp_path / "old"
    old.mkdir()
    for name, module in world.modules().items():
        write_tensors(old / f"{name}.safetensors", nn.Module.state_dict(module))
    config = asdict(TINY)
    config["autoencoder"] |= {"multipliers": (1, 1, 2, 2)}  # of widths, which format 1 did not have
    content = {"format": "asyncrl-world-1", "kind": "evac", "version": 7, "config": config}
    (old / "world.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"earlier version.*asyncrl convert"):
        open_evac(old)
    convert_world(old, tmp_path / "new")
    converted = load_world(tmp_path / "new")
    assert (converted.version, converted.config) == (7, TINY)
    equal_networks(world.networks, converted.networks)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        ["world.json", *(f"{prefix}safetensors" for prefix in PREFIXES.values())]
    )


def test_the_expected_names_are_those_of_the_published_files() -> None:
    with torch.device("meta"):
        wanted = published_tensors(EvacNetworks(PUBLISHED))
    files = {
        "unet": "evac_unet",
        "autoencoder": "evac_autoencoder",
        "action_resampler": "evac_action_resampler",
        "image_resampler": "evac_image_resampler_8",
    }
    for part, file in files.items():
        assert {name: tuple(tensor.shape) for name, tensor in wanted[part].items()} == listed_shapes(file)


def test_a_published_checkpoint_is_read_and_runs_nothing(tmp_path: Path, small: EvacNetworks) -> None:
    folder = published_folder(tmp_path / "world", small)
    proof = tmp_path / "proof"
    lightning(folder, checkpoint(small), proof)
    files = open_evac(folder)
    assert files.config == SMALL
    assert files.dtype == torch.bfloat16
    loaded = load_world(folder, dtype=torch.float32)
    equal_networks(small, loaded.networks)
    assert not proof.exists()
    assert EvacWorld.defaults(folder, SETTINGS).max_decisions == 32
    with pytest.raises(Exception, match=r"Unsupported|weights_only|GLOBAL"):  # what PyTorch says of the file
        torch.load(folder / "epoch=281-step=34800.ckpt", weights_only=True)


def test_a_published_world_draws_in_bfloat16(tmp_path: Path, small: EvacNetworks) -> None:
    folder = published_folder(tmp_path, small)
    world = EvacWorld.load(folder, torch.device("cpu"), ImaginationSettings(steps=1))
    kinds = {n: next(m.parameters()).dtype for n, m in world.modules().items()}
    assert kinds.pop("pose_model") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    # At the published 256 pixels a CPU takes a minute or two in this type.
    world = EvacWorld(world.networks, replace(world.config, image_size=64), steps=1)
    frames, state = world.imagine(world.start([start_state(1, size=64)], decisions=1), some_actions(1), [1])
    assert frames.shape == (1, 8, 64, 64, 3)
    assert state.finite.all()


def test_a_file_of_deepspeed_is_read(tmp_path: Path, small: EvacNetworks) -> None:
    wrapped = {f"_forward_module.{name}": tensor for name, tensor in checkpoint(small).items()}
    torch.save({"module": wrapped, "optimizer": Callback(str(tmp_path / "proof"))}, tmp_path / "EnerV.pt")
    torch.save(pose_file(small), tmp_path / "pose.pth")
    equal_networks(small, load_world(tmp_path, dtype=torch.float32).networks)
    assert not (tmp_path / "proof").exists()


def test_the_image_encoder_may_lie_in_openclip_s_own_file(tmp_path: Path, small: EvacNetworks) -> None:
    tensors = checkpoint(small)
    tower = {n.removeprefix("embedder.model."): tensors.pop(n) for n in list(tensors) if "embedder." in n}
    lightning(tmp_path, tensors)
    torch.save(pose_file(small), tmp_path / "pose.pth")
    with pytest.raises(
        CheckpointError, match=r"embedder\.model\.visual\.conv1\.weight.*open_clip_pytorch_model"
    ):
        open_evac(tmp_path)
    torch.save(tower, tmp_path / "open_clip_pytorch_model.bin")
    equal_networks(small, load_world(tmp_path, dtype=torch.float32).networks)


KEYS = [
    "model.diffusion_model.middle_block.0.emb_layers.1.bias",
    "first_stage_model.decoder.up.1.upsample.conv.weight",
    "cond_stage_model.layers.0.0.to_kv.weight",
    "image_proj_model.norm_out.weight",
    "embedder.model.visual.transformer.resblocks.1.attn.in_proj_weight",
]
SIZES = ["latents", "proj_in.weight"]  # Sizes are read from them.
ODD = [f"{prefix}odd.weight" for prefix in list(PREFIXES.values())[:-1]] + ["model_ema.decay"]
WRONG: list[tuple[str, Tensor | None, str]] = [
    *((key, None, f"lacks tensor {key} of shape") for key in KEYS),
    *((f"cond_stage_model.{key}", None, f"lacks tensor cond_stage_model.{key}") for key in SIZES),
    *((key, torch.zeros(3, 5), rf"tensor {key} has shape \[3, 5\], the model needs") for key in KEYS),
    *((key, torch.zeros(2), f"holds {key}, which the model has no use for") for key in ODD),
]


@pytest.mark.parametrize(("key", "tensor", "words"), WRONG)
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path, small, key, tensor, words) -> None:
    folder = published_folder(tmp_path, small, **{key: tensor})
    with pytest.raises(CheckpointError, match=words):
        EvacWorld.check(folder, SETTINGS)


CHUNKS_OF_16 = replace(SMALL, image_resampler=replace(SMALL.image_resampler, queries=256))
CHECKPOINT = "epoch=281-step=34800.ckpt"


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (
            lambda folder: published_folder(folder, tiny_networks(CHUNKS_OF_16)),
            r"image_proj_model\.latents has 256 tokens.*chunks of 8",
        ),
        (
            lambda folder: (folder / "action_predictor.pth").unlink(),
            "no model of the hand's poses.*15 inputs",
        ),
        (
            lambda folder: (folder / "other.ckpt").write_bytes((folder / CHECKPOINT).read_bytes()),
            "several EVAC checkpoints",
        ),
        (lambda folder: cut(folder / CHECKPOINT), r"epoch=281-step=34800\.ckpt was not read"),
    ],
)
def test_what_is_wrong_with_a_published_folder_is_named(tmp_path, small, breaks, words) -> None:
    breaks(published_folder(tmp_path, small))
    with pytest.raises(CheckpointError, match=words):
        open_evac(tmp_path)


def test_other_files_beside_a_checkpoint_do_not_matter(tmp_path: Path, small: EvacNetworks) -> None:
    folder = published_folder(tmp_path, small)
    torch.save({"x": torch.ones(2)}, folder / "old_reward.pth", _use_new_zipfile_serialization=False)
    torch.save({"model_state_dict": {"net.0.weight": torch.ones(2, 15)}}, folder / "resnet_rm.pth")
    assert open_evac(folder).config == SMALL
