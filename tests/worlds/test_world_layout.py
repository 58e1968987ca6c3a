"""Worlds that an earlier version wrote: converted, they have the same tensors and imagine the same frames."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from asyncrl.cli import main
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.launch.named_models import named_world
from asyncrl.storage import assets
from asyncrl.worlds.files import convert_world
from asyncrl.worlds.opensora.files import open_world as open_opensora
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.files import open_world as open_wan


def write_old(name: str, folder: Path) -> Path:
    """Write a shipped world as version 1 of the layout had it."""
    source = assets.ASSETS / name / "world"
    files = (open_wan if name == "tabletop" else open_opensora)(source)
    folder.mkdir()
    for path in source.rglob("*"):
        if path.is_file() and path.name != "config.json":
            target = "vae.safetensors" if path.parent.name == "vae" else path.name
            (folder / target).write_bytes(path.read_bytes())
    content = {
        "format": "asyncrl-world-1",
        "kind": json.loads((source / "world.json").read_text())["kind"],
        "version": 7,
        "image_size": files.image_size,
        "schedule_steps": files.schedule_steps,
        "transformer": asdict(files.transformer_size),
        "vae": {{"groups": "norm_groups"}.get(key, key): n for key, n in asdict(files.vae_size).items()},
    }
    (folder / "world.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["tabletop", "tabletop_opensora"])
def test_a_world_of_an_earlier_version_is_converted_and_imagines_as_before(name: str, tmp_path: Path) -> None:
    old, new = write_old(name, tmp_path / "old"), tmp_path / "new"
    with pytest.raises(CheckpointError, match=r"earlier version.*asyncrl convert"):
        load(str(old))
    assert main(["convert", str(old), str(new)]) == 0
    shipped, converted = load(name), load(str(new))
    assert (shipped.version, converted.version) == (0, 7)
    state = load_start_states(assets.ASSETS / "tabletop" / "start_states.h5")[0]
    actions = torch.linspace(-0.5, 0.5, 56).reshape(1, 8, 7)
    frames = [
        world.imagine(world.start([state], decisions=1), actions, [3])[0] for world in (shipped, converted)
    ]
    assert torch.equal(*frames)
    for path in (assets.ASSETS / name / "world").rglob("*.safetensors"):
        copied = new / path.relative_to(assets.ASSETS / name / "world")
        assert copied.read_bytes() == path.read_bytes()


def load(name: str):
    named = named_world(name)
    return named.kind.load(named.folder, torch.device("cpu"), ImaginationSettings(steps=1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": "asyncrl-world-2", "kind": "wan"}, "has format 'asyncrl-world-2'"),
        ({"format": "asyncrl-world-1", "kind": "wan"}, "incomplete"),
        ({"format": "asyncrl-world-1", "kind": "dreams"}, "incomplete"),
    ],
)
def test_what_is_no_world_of_an_earlier_version_is_refused(content, words, tmp_path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        convert_world(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
