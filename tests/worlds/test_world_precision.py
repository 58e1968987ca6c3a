"""--imagination.precision: which weights of a world of ours are rounded, and what is computed with them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.fitting.wan import ActionScale, take_raw
from asyncrl.launch.conformance import check_world
from asyncrl.records import CHUNK
from asyncrl.storage.assets import start_states_path, world_folder
from asyncrl.worlds.evac.conditions import EvacConfig
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.evac.world import save_world as save_evac
from asyncrl.worlds.files import world_class
from asyncrl.worlds.opensora.world import save_world as save_opensora
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld
from asyncrl.worlds.wan.world import save_world as save_wan
from support.evac import tiny_config, tiny_networks
from support.opensora import nano_world
from support.published_worlds import EXPORTS
from support.tiny_models import start_state
from support.worlds import load_world

SIZE: Final = 32

CPU = torch.device("cpu")
STORED, BF16 = ImaginationSettings(), ImaginationSettings(precision="bf16")
FLOAT8 = ImaginationSettings(precision="float8")


def tiny_wan() -> WanWorld:
    torch.manual_seed(0)
    size = replace(TransformerConfig.tiny(), heads=2, head_dim=24, layers=2, ffn_dim=64, freq_dim=32)
    transformer: Any = ActionWanTransformer(size).eval().requires_grad_(False)
    vae: Any = WanVae(replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4)).eval().requires_grad_(False)
    return WanWorld(transformer, vae, image_size=32, schedule_steps=2)


def tiny_evac(config: EvacConfig) -> EvacWorld:
    return EvacWorld(tiny_networks(config), config)


MADE: Final[dict[str, Callable[[], Any]]] = {
    "wan": tiny_wan,
    "opensora": nano_world,
    "evac": lambda: tiny_evac(replace(tiny_config(), schedule_steps=2)),
}
"""Makes a world of a kind of 32 pixels in float32, which no file was asked for."""
SAVE: Final[dict[str, Callable[[Path, Any], None]]] = {
    "wan": save_wan,
    "opensora": save_opensora,
    "evac": save_evac,
}
EXACT: Final = {
    "wan": {f"transformer.action_mlp{n}.0.{part}" for n in (1, 2) for part in ("weight", "bias")},
    "opensora": {"transformer.rope.freqs"},
    "evac": {f"pose_model.net.{n}.{part}" for n in (0, 2, 4) for part in ("weight", "bias")}
    | {"pose_model.abs_action_mean", "pose_model.abs_action_std"},
}
"""Weights that stay float32."""


@pytest.fixture(params=MADE)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(kind: str, tmp_path: Path) -> Path:
    """A world of ours, whose files are in float32."""
    SAVE[kind](tmp_path / "world", MADE[kind]())
    return tmp_path / "world"


def load(folder: Path, settings: ImaginationSettings) -> Any:
    return world_class(folder).load(folder, CPU, settings)


def check(folder: Path, settings: ImaginationSettings) -> int:
    return world_class(folder).check(folder, settings).nbytes


def weights(world: Any) -> dict[str, Tensor]:
    modules: Mapping[str, nn.Module] = world.modules()
    return {f"{name}.{key}": t for name, module in modules.items() for key, t in module.state_dict().items()}


def drawn(world: Any, starts: list[Any], decisions: int = 2) -> Tensor:
    """Frames of a few decisions that follow one another."""
    state, frames = world.start(starts, decisions=decisions), []
    for number in range(decisions):
        drawing = np.random.default_rng(number)
        actions = drawing.uniform(-1, 1, (len(starts), CHUNK, 7)).astype(np.float32)
        shown, state = world.imagine(state, actions, [10 * number + row for row in range(len(starts))])
        frames.append(shown)
    return torch.cat(frames, dim=1)


def test_stored_is_what_was_saved_to_the_last_bit(kind: str, ours: Path) -> None:
    made, loaded = MADE[kind](), load(ours, STORED)
    expected, found = weights(made), weights(loaded)
    assert found.keys() == expected.keys()
    assert (loaded.version, loaded.image_size) == (made.version, made.image_size)
    defaults = world_class(ours).defaults(ours, STORED)
    assert (defaults.context, defaults.temperature) == ("latents", 0.0)
    assert defaults.steps == getattr(made, "schedule_steps", len(getattr(made, "steps", ())))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert not any(p.requires_grad for module in loaded.modules().values() for p in module.parameters())
    starts = [start_state(number, SIZE) for number in range(2)]
    assert torch.equal(drawn(loaded, starts), drawn(made, starts))


def test_every_weight_is_rounded_but_those_that_would_mean_something_else(kind: str, ours: Path) -> None:
    exact, rounded = weights(load(ours, STORED)), weights(load(ours, BF16))
    assert rounded.keys() == exact.keys()
    assert {name for name, tensor in rounded.items() if tensor.dtype == torch.float32} == EXACT[kind]
    for name, tensor in rounded.items():
        expected = exact[name] if name in EXACT[kind] else exact[name].bfloat16()
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def test_a_published_world_is_what_it_is_with_either(kind: str, tmp_path: Path) -> None:
    EXPORTS[kind](tmp_path / "world")
    stored, rounded = (weights(load(tmp_path / "world", settings)) for settings in (STORED, BF16))
    assert stored.keys() == rounded.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if name.startswith("pose_model.") else torch.bfloat16), name
        assert rounded[name].dtype == tensor.dtype
        assert torch.equal(rounded[name], tensor), name


def test_a_type_that_is_asked_for_is_that_of_all_weights(kind: str, ours: Path) -> None:
    """Fine-tuning spreads them over ranks, which share weights of one type."""
    for dtype in (torch.bfloat16, torch.float32):
        found = weights(load_world(ours, dtype=dtype))
        assert {t.dtype for name, t in found.items() if not name.startswith("pose_model.")} == {dtype}


def test_the_tiny_decoder_is_rounded_too() -> None:
    settings = replace(BF16, decoder="tiny")
    decoder = load(world_folder("tabletop"), settings).modules()["decoder"]
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}


def test_layers_compute_in_bfloat16_but_those_of_exact_weights(kind: str, ours: Path) -> None:
    world, seen = load(ours, BF16), dict[str, torch.dtype]()

    def note(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _layer, _inputs, y: seen.update({name: y.dtype})

    for part, module in world.modules().items():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
                layer.register_forward_hook(note(f"{part}.{name}"))
    drawn(world, [start_state(0, SIZE)], decisions=1)
    exact = {name.rpartition(".")[0] for name in EXACT[kind]}
    assert len(seen) > 20
    for name, dtype in seen.items():
        assert dtype == (torch.float32 if name in exact else torch.bfloat16), name


@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("tabletop", {}, 50),
        ("tabletop", {"context": "frames"}, 50),
        ("tabletop", {"decoder": "tiny"}, 50),
        ("tabletop_opensora", {}, 40),
        ("tabletop_evac", {}, 50),
    ],
)
def test_a_fitted_world_draws_nearly_what_it_draws_in_float32(name, changes, least) -> None:
    starts = load_start_states(start_states_path("tabletop", name))[:2]
    exact, rounded = (
        drawn(load(world_folder(name), replace(settings, steps=4, **changes)), starts).float()
        for settings in (STORED, BF16)
    )
    error = (rounded - exact).square().mean()
    assert 0 < error < 255**2 / 10 ** (least / 10), f"{least} dB"


def test_a_rounded_world_keeps_what_a_run_rests_on(ours: Path) -> None:
    list(check_world(load(ours, BF16), [start_state(number, SIZE) for number in range(3)]))


def test_actions_far_from_zero_are_told_apart(tmp_path: Path) -> None:
    """By a network that was fitted on scaled actions: in bfloat16 1000.25 and 1001.75 are the same number."""
    world = tiny_wan()
    take_raw(world.transformer, ActionScale(gain=np.full(7, 1.0), offset=np.full(7, -1001.0)))
    save_wan(tmp_path, world)
    torch.manual_seed(1)
    latents, times = torch.randn(1, 32, 4, 4, 4), torch.full((1, 4), 500.0)
    near, far = (torch.full((1, 13, 7), number) for number in (1000.25, 1001.75))
    assert torch.equal(near.bfloat16(), far.bfloat16())
    found = []
    for settings in (STORED, BF16):
        network = load(tmp_path, settings).transformer
        with torch.no_grad():
            found.append((network(latents, times, near) - network(latents, times, far)).float())
    exact, rounded = found
    assert (rounded - exact).square().mean() < 0.05 * exact.square().mean()


def test_the_checked_bytes_are_those_that_are_loaded(kind: str, ours: Path) -> None:
    parameters = [p for m in load(ours, BF16).modules().values() for p in m.parameters()]
    assert check(ours, BF16) == sum(p.nbytes for p in parameters)
    assert check(ours, STORED) == 4 * sum(p.numel() for p in parameters)
    kept = sum(p.numel() for p in parameters if p.dtype == torch.float32)
    assert 0 < kept < 0.05 * sum(p.numel() for p in parameters)
    assert check(ours, STORED) - check(ours, BF16) == 2 * sum(p.numel() for p in parameters) - 2 * kept


@pytest.mark.parametrize("name", ["tabletop", "tabletop_opensora"])
def test_beside_8_bit_products_a_world_of_ours_stays_in_float32(name: str) -> None:
    folder = world_folder(name)
    dtypes = {p.dtype for m in load(folder, FLOAT8).modules().values() for p in m.parameters()}
    assert dtypes == {torch.float32}
