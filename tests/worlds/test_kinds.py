"""Kinds of worlds: told apart by tensors in one table, refused as policies, each with what it can do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl import registry
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError
from asyncrl.launch.named_models import named_policy, named_world
from asyncrl.worlds import files as kinds
from asyncrl.worlds.files import EVAC_MARK, names_in
from asyncrl.worlds.opensora.world import OpenSoraWorld
from support.tiny_models import WORLDS

TITLES = {"wan": "Wan", "opensora": "OpenSora", "evac": "EVAC"}


def write_tensors(folder: Path, names: tuple[str, ...], file: str = "weights.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.zeros(2) for name in names}, folder / file)
    return folder


def write_wan(folder: Path) -> Path:
    return write_tensors(
        folder, tuple(kinds.WAN_PREFIX + name for name in kinds.WAN_MARKS), "dit.safetensors"
    )


def write_opensora(folder: Path) -> Path:
    return write_tensors(folder, kinds.OPENSORA_MARKS, "ema.safetensors")


def write_evac(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"module": {"_forward_module." + EVAC_MARK: torch.zeros(2)}}, folder / "step.bin")
    return folder


PUBLISHED: dict[str, Callable[[Path], Path]] = {
    "wan": write_wan,
    "opensora": write_opensora,
    "evac": write_evac,
}


def test_the_table_has_the_built_in_worlds() -> None:
    assert kinds.KINDS.keys() == registry.BUILT_IN["world"].keys()
    assert {name: kind.title for name, kind in kinds.KINDS.items()} == TITLES


@pytest.mark.parametrize("kind", TITLES)
def test_a_published_kind_is_told_by_tensors_whatever_the_files_are_called(tmp_path: Path, kind: str) -> None:
    folder = PUBLISHED[kind](tmp_path / "world")
    assert named_world(str(folder)).kind is registry.resolve("world", kind)
    assert kinds.world_title(folder) == TITLES[kind]


def test_what_is_no_world_is_told_for_each_kind_what_was_looked_for(tmp_path: Path) -> None:
    folder = write_tensors(tmp_path / "world", ("patch_embedding.weight", kinds.OPENSORA_MARKS[0]))
    with pytest.raises(CheckpointError) as raised:
        named_world(str(folder))
    for part in (
        "holds weights.safetensors: no world model",
        f"Wan's (no tensor {kinds.WAN_MARKS[1]} in",
        f"OpenSora's (no tensor {kinds.OPENSORA_MARKS[1]} in",
        f"EVAC's (no tensor {EVAC_MARK} in",
    ):
        assert part in str(raised.value)
    with pytest.raises(CheckpointError, match="is neither a shipped world"):
        named_world(str(tmp_path / "nowhere"))


def test_a_checkpoint_that_cannot_be_read_is_named_and_runs_nothing(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "cut.ckpt").write_bytes(b"PK cut")
    torch.save({"state_dict": Harmful()}, folder / "harmful.ckpt")
    with pytest.raises(CheckpointError, match=r"EVAC's \(no tensor .*cut\.ckpt was not read"):
        named_world(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_world_json_of_no_known_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for kind in ("dreams", ["wan"], None):
        (tmp_path / "world.json").write_text(json.dumps({"kind": kind}))
        with pytest.raises(CheckpointError, match="there are: wan, opensora, evac"):
            named_world(str(tmp_path))


@pytest.mark.parametrize("looks", ["like a policy", "like none"])
@pytest.mark.parametrize("source", ["published", "ours"])
@pytest.mark.parametrize("kind", TITLES)
def test_a_world_given_as_policy_is_refused_as_what_it_is(tmp_path, kind, source, looks) -> None:
    folder = tmp_path / "world"
    if source == "published":
        PUBLISHED[kind](folder)
    else:
        WORLDS[kind](folder)
    if looks == "like a policy":
        (folder / "config.json").write_text("{}")
        write_tensors(folder, ("a.weight",), "model.safetensors")
    message = rf"--policy .* is a world model \({TITLES[kind]}'s\)\. Give it as --world\."
    with pytest.raises(CheckpointError, match=message):
        named_policy(str(folder))


def test_what_is_neither_policy_nor_world_is_refused_as_no_policy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"The policy .*holds no config\.json"):
        named_policy(str(write_tensors(tmp_path / "x", ("a.weight",))))


FOURTH_MARK = "fourth.weight"


class FourthWorld(OpenSoraWorld):
    """Draws as OpenSora does."""


def lacks(folder: Path) -> str:
    return "" if FOURTH_MARK in names_in(folder) else f"no tensor {FOURTH_MARK} in its *.safetensors"


def test_a_fourth_kind_is_one_entry_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fourth = kinds.Kind(title="Fourth", world=f"{__name__}:FourthWorld", recogniser=lacks)
    monkeypatch.setitem(kinds.KINDS, "fourth", fourth)
    folder = write_tensors(tmp_path / "world", (FOURTH_MARK,))
    assert named_world(str(folder)).kind is FourthWorld
    with pytest.raises(CheckpointError, match=r"is a world model \(Fourth's\)"):
        named_policy(str(folder))
    other = write_tensors(tmp_path / "other", ("a.weight",))
    with pytest.raises(CheckpointError, match=r"Fourth's \(no tensor fourth\.weight"):
        named_world(str(other))
    (other / "world.json").write_text(json.dumps({"kind": "fourth"}))
    assert named_world(str(other)).kind is FourthWorld


@pytest.mark.parametrize(
    ("kind", "settings", "own", "words"),
    [
        ("wan", {}, {"guidance": 2.0}, "takes none and draws without guidance.*--imagination.steps"),
        ("wan", {"decoder": "tiny"}, {}, "asyncrl fit decoder"),
        ("opensora", {"context": "frames"}, {}, "--imagination.context is frames.*Use --imagination.context"),
        (
            "opensora",
            {"decoder": "tiny"},
            {},
            "--imagination.decoder is tiny.*Use --imagination.decoder full",
        ),
        ("opensora", {}, {"guidance": 2.0}, "takes none and draws without guidance.*--imagination.steps"),
        ("evac", {"context": "frames"}, {}, "--imagination.context is frames.*Use auto or latents"),
        ("evac", {"decoder": "tiny"}, {}, "--imagination.decoder is tiny.*Use full"),
        ("evac", {"steps": 1001}, {}, "--imagination.steps is 1001.*Use 1 to 1000"),
        ("evac", {}, {"guidance": 7.5}, "takes none and draws without guidance.*--imagination.steps"),
        ("evac", {}, {"seed": 1}, "--world-settings has seed, but the world in .* takes none. Leave it out"),
    ],
)
def test_what_a_kind_cannot_do_is_refused_with_the_flag_and_the_alternative(
    tmp_path: Path, kind: str, settings: dict[str, Any], own: dict[str, Any], words: str
) -> None:
    folder, world = tmp_path / "world", registry.resolve("world", kind)
    WORLDS[kind](folder)
    for call in (
        lambda: world.check(folder, ImaginationSettings(**settings), **own),
        lambda: world.load(folder, torch.device("cpu"), ImaginationSettings(**settings), **own),
    ):
        with pytest.raises(AsyncRLError, match=words) as raised:
            call()
        assert isinstance(raised.value, ConfigError | CheckpointError)


def test_evacs_settings_of_earlier_versions_that_change_nothing_are_read(tmp_path: Path) -> None:
    WORLDS["evac"](tmp_path / "world")
    old = {"guidance": 1.0, "guidance_rescale": 0.7, "eta": 1.0}
    registry.resolve("world", "evac").check(tmp_path / "world", ImaginationSettings(), **old)
