"""Folders of OpenSora worlds: round trips, the published layout, what is wrong; the frame autoencoder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.worlds.files import lacks_opensora as lacks
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from asyncrl.worlds.opensora.files import open_world, write_action_range
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import OpenSoraWorld, save_world
from support.opensora import NANO, RANGE, export_opensora, nano_vae, nano_world
from support.published_worlds import listed_shapes, sparse_safetensors
from support.worlds import change_json, cut, load_world

AUTO = ImaginationSettings()
MODEL = "model-00001.safetensors"
INDEX = "model.safetensors.index.json"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder like RLinf-OpenSora-LIBERO-Spatial, small, in three shards."""
    folder = tmp_path / "RLinf-OpenSora-LIBERO-Spatial"
    export_opensora(folder, nano_world(), shard_bytes=30_000)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtype)), name
        assert found[name].dtype == dtype


@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_a_published_world_comes_back_bit_for_bit(tmp_path: Path, shard_bytes: int | None) -> None:
    world, folder = nano_world(), tmp_path / "published"
    export_opensora(folder, world, shard_bytes=shard_bytes)
    loaded = OpenSoraWorld.load(folder, torch.device("cpu"), replace(AUTO, steps=4))
    assert_equal(loaded.transformer.state_dict(), world.transformer.state_dict(), torch.bfloat16)
    assert_equal(loaded.vae.state_dict(), world.vae.state_dict(), torch.bfloat16)
    assert loaded.transformer.size == NANO
    weights = [p for module in loaded.modules().values() for p in module.parameters()]
    assert OpenSoraWorld.check(folder, AUTO).nbytes == sum(p.nbytes for p in weights)
    assert (loaded.image_size, loaded.schedule_steps, loaded.version) == (256, 4, 0)
    assert loaded.action_range == RANGE
    assert OpenSoraWorld.load(folder, torch.device("cpu"), AUTO).schedule_steps == 10
    defaults = OpenSoraWorld.defaults(folder, AUTO)
    assert (defaults.context, defaults.steps) == ("latents", 10)
    assert (defaults.max_decisions, defaults.temperature) == (32, 1.6)


def test_a_world_is_recognised_by_its_tensors_whatever_its_files_are_called(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    export_opensora(folder, nano_world())
    (folder / MODEL).rename(folder / "ema.safetensors")
    (folder / VAE).rename(folder / "vae" / "weights.safetensors")
    save_file({"net.weight": torch.zeros(2)}, folder / "a_reward_model.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no header")
    assert not lacks(folder)
    assert open_world(folder).check() > 0


@pytest.mark.parametrize(
    "name", ["patch_embedding.weight", "x_embedder.proj.weight", "model.layers.0.weight"]
)
def test_other_models_under_the_published_name_are_not_taken_for_one(tmp_path: Path, name: str) -> None:
    save_file({name: torch.zeros(2)}, tmp_path / MODEL)
    assert lacks(tmp_path)
    assert lacks(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"world\.json is missing"):
        open_world(tmp_path)


def test_files_of_the_true_size_are_recognised_and_checked_without_reading_them(tmp_path: Path) -> None:
    sparse_safetensors(tmp_path / MODEL, listed_shapes("stdit3_xl2"))
    (tmp_path / "vae").mkdir()
    with torch.device("meta"):
        vae = {
            name: tensor.shape for name, tensor in FrameVae(FrameVaeConfig.published()).state_dict().items()
        }
    sparse_safetensors(tmp_path / VAE, vae)
    described = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 4}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(described))
    write_action_range(tmp_path, RANGE)
    files = open_world(tmp_path)
    assert (files.transformer_size, files.vae_size) == (STDiT3Config.xl2(), FrameVaeConfig.published())
    assert (files.image_size, files.schedule_steps, files.dtype) == (256, 10, torch.bfloat16)
    assert files.check() == 2 * (907_789_892 + 83_653_863)
    kept, scratch = files.slot_bytes().kept, files.slot_bytes().scratch
    assert kept == 2 * (64 * 2**10 + 1)
    assert 126 * 2**20 < scratch < 256 * 2**20


def test_the_scratch_of_a_slot_counts_keys_and_values_as_they_are(tmp_path: Path) -> None:
    """Of a deep network they are nearly all of it."""
    deep = replace(NANO, depth=16)
    save_world(tmp_path, nano_world(size=deep))
    with torch.device("meta"):
        prefix = STDiT3(deep).prefix(torch.empty(1, 4, 4, 4, 4))
    exact = sum(tensor.nbytes for pair in prefix for tensor in pair)
    one = replace(NANO, depth=1)
    shallow = tmp_path / "shallow"
    save_world(shallow, nano_world(size=one))
    difference = (
        OpenSoraWorld.slot_bytes(tmp_path, AUTO).scratch - OpenSoraWorld.slot_bytes(shallow, AUTO).scratch
    )
    assert difference == exact * 15 // 16
    assert open_world(tmp_path).slot_bytes().shared == 4 * 16 * 4 * 32**2 * 4


def change_transformer(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """Write the transformer again as one file, changed."""

    def breaks(folder: Path) -> None:
        tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        for file in [*folder.glob("*.safetensors"), folder / INDEX]:
            file.unlink()
        change(tensors)
        save_file(tensors, folder / "model-00001.safetensors")

    return breaks


def change_vae(lost: str) -> Callable[[Path], None]:
    return lambda folder: save_file(
        {name: tensor for name, tensor in load_file(folder / VAE).items() if name != lost}, folder / VAE
    )


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name)].clear()


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def described(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / name, change)


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


QKV = "spatial_blocks.1.attn.qkv.bias"
CONV = "decoder.up_blocks.2.resnets.0.conv1.weight"
BROKEN = {
    "missing": (change_transformer(drop(QKV)), rf"lacks tensor {QKV} of shape \[72\]"),
    "added": (change_transformer(add("old.bias", 3)), r"holds old\.bias, which the model has no use for"),
    "misshapen": (
        change_transformer(add(QKV, 70)),
        rf"tensor {QKV} has shape \[70\], the model needs \[72\]",
    ),
    "heads": (
        change_transformer(add("spatial_blocks.0.attn.q_norm.weight", 3)),
        "no STDiT3: a width of 24 with 8 heads",
    ),
    "other axes": (
        change_transformer(add("x_embedder.proj.weight", 3)),
        r"has x_embedder\.proj\.weight of shape \[3\]",
    ),
    "no actions": (change_transformer(drop("action_embedder.fc.0.weight")), "it takes no actions"),
    "actions": (
        change_transformer(add("action_embedder.fc.0.weight", 96, 14)),
        "takes actions of 14 numbers",
    ),
    "channels": (
        described("vae/config.json", lambda c: c.update(latent_channels=16)),
        "the transformer has 4 latent channels, the autoencoder 16",
    ),
    "truncated": (
        lambda folder: cut(next(folder.glob("model-00002*"))),
        r"model-00002-of-0000\d\.safetensors is truncated",
    ),
    "no shard": (
        lambda folder: next(folder.glob("model-00002*")).unlink(),
        r"model-00002-of-0000\d\.safetensors is missing",
    ),
    "vae missing": (
        lambda folder: (folder / "vae").rename(folder / "elsewhere"),
        r"no autoencoder: .*vae is missing",
    ),
    "vae empty": (missing(VAE), r"vae should hold one file .* holds none"),
    "vae twice": (
        lambda folder: save_file(load_file(folder / VAE), folder / "vae" / "another.safetensors"),
        r"vae should hold one file .* holds 2 of them",
    ),
    "vae lacks": (change_vae(CONV), rf"lacks tensor {CONV}"),
    "vae config": (
        described("vae/config.json", lambda c: c.pop("layers_per_block")),
        r"config\.json does not describe an AutoencoderKL \(KeyError\('layers_per_block'\)\)",
    ),
    "vae sizes": (
        described("vae/config.json", lambda c: c.update(block_out_channels=4)),
        r"config\.json does not describe an AutoencoderKL \(TypeError",
    ),
    "vae without config": (missing("vae/config.json"), r"vae/config\.json is missing"),
    "statistics": (
        described("dataset_statistics.json", lambda c: c["action"].pop("q99")),
        r"dataset_statistics\.json should hold .*have 7, 0 and 7 numbers",
    ),
    "no statistics": (missing("dataset_statistics.json"), r"dataset_statistics\.json is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_published_folder_is_named(published: Path, case: str) -> None:
    breaks, words = BROKEN[case]
    breaks(published)
    assert not lacks(published)
    with pytest.raises(CheckpointError, match=words):
        OpenSoraWorld.check(published, AUTO)
    with pytest.raises(CheckpointError, match=words):
        OpenSoraWorld.load(published, torch.device("cpu"), AUTO)


def test_another_scale_in_the_autoencoders_file_is_not_used(published: Path) -> None:
    described("vae/config.json", lambda c: c.update(scaling_factor=0.18215))(published)
    assert open_world(published).vae_size.scale == 0.13025


def test_autoencoders_of_old_versions_of_diffusers_are_read(published: Path) -> None:
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    expected, tensors = load_world(published).vae.state_dict(), load_file(published / VAE)
    for name in list(tensors):
        for today, before in old.items():
            if f".attentions.0.{today}." in name:
                tensors[name.replace(today, before)] = tensors.pop(name)
    assert sum("proj_attn" in name for name in tensors) == 4
    save_file(tensors, published / VAE)
    assert_equal(load_world(published).vae.state_dict(), expected, torch.bfloat16)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        *(
            (described("world.json", change), words)
            for change, words in (
                (lambda c: c.update(kind="wan"), r"world\.json describes 'wan' in format .*reads 'opensora'"),
                (lambda c: c.update(format="other"), "in format 'other'"),
                (lambda c: c.update(format="asyncrl-world-1"), "earlier version, .*asyncrl convert "),
                (lambda c: c.pop("image_size"), r"incomplete \(image_size is missing"),
                (lambda c: c.update(image_size=40), "image_size 40 is no multiple of 16"),
                (lambda c: c.update(image_size=0), "image_size is 0"),
                (lambda c: c.update(schedule_steps=0), "schedule_steps is 0"),
            )
        ),
        *(
            (described("vae/config.json", lambda c, key=key, value=value: c.update({key: value})), words)
            for key, value, words in (
                ("layers_per_block", 10**6, "size that is no size"),
                ("norm_num_groups", 3, "groups must divide every width"),
                ("scaling_factor", 0, "scale must be positive"),
                ("latent_channels", 8, "4 latent channels, the autoencoder 8"),
            )
        ),
        (missing("transformer.safetensors"), "holds no transformer of an OpenSora world"),
    ],
)
def test_what_is_wrong_with_a_folder_of_ours_is_named(tmp_path, breaks, words) -> None:
    save_world(tmp_path, nano_world())
    breaks(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        OpenSoraWorld.check(tmp_path, AUTO)


def frames(count: int) -> Tensor:
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_size_of_the_pieces_changes_nothing(at_once: int) -> None:
    vae, clip = nano_vae(), frames(5)
    latents = vae.encode(clip)
    drawn = vae.decode(latents)
    vae.at_once = at_once
    torch.testing.assert_close(vae.encode(clip), latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vae.decode(latents), drawn, atol=1e-5, rtol=1e-5)


def test_the_published_size_has_the_published_tensors() -> None:
    with torch.device("meta"):
        vae = FrameVae(FrameVaeConfig.published())
    shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    assert (len(shapes), sum(p.numel() for p in vae.parameters())) == (248, 83_653_863)
    assert shapes["encoder.conv_out.weight"] == (8, 512, 3, 3)
    assert shapes["quant_conv.weight"] == (8, 8, 1, 1)
    assert shapes["decoder.mid_block.attentions.0.to_out.0.weight"] == (512, 512)
    assert shapes["decoder.up_blocks.2.resnets.0.conv_shortcut.weight"] == (256, 512, 1, 1)
    assert vae.size.spatial == 8
