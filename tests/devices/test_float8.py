"""Products of 8-bit numbers: against slow arithmetic, row by row, and in worlds; wrong products are found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.devices.tensors import SHARE, SIZES, TOLERANCE, check_matrix_products
from asyncrl.errors import ConfigError
from asyncrl.launch.conformance import check_world
from asyncrl.records import CHUNK
from asyncrl.storage.assets import start_states_path, world_folder
from asyncrl.worlds import layers
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.files import world_class
from asyncrl.worlds.layers import Float8Linear, check_float8, fits_float8, saved_by_float8, use_float8
from asyncrl.worlds.opensora.world import save_world
from asyncrl.worlds.start_states import load_start_states
from support.opensora import NANO, nano_world
from support.tiny_actor import start
from support.tiny_models import WORLDS

FLOAT8 = ImaginationSettings(precision="float8")
CPU = torch.device("cpu")


def e4m3_values() -> NDArray[np.float64]:
    """All numbers of one sign: three bits of fraction, exponents -6 to 8 and below, without NaN."""
    normal = [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)][:-1]
    return np.array([m / 8 * 2.0**-6 for m in range(8)] + normal)


def nearest(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to `e4m3_values`; of two that are as near, the one whose last bit is 0."""
    values = e4m3_values()
    above = np.searchsorted(values, np.abs(x)).clip(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    middle = (low + high) / 2
    up = (np.abs(x) > middle) | ((np.abs(x) == middle) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def test_a_product_is_that_of_rounded_rows_scaled_back() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    x = torch.randn(3, 5, 64) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    rows, weight = x.flatten(0, 1).double().numpy(), linear.weight.detach().double().numpy()
    scale = np.abs(rows).max(1, keepdims=True) / 448
    of_weight = np.abs(weight).max(1, keepdims=True) / 448
    # The scales are float32, so a number half-way may be rounded to its other neighbour: one step of e4m3.
    product = (nearest(rows / scale) @ nearest(weight / of_weight).T) * scale * of_weight.T
    found = Float8Linear(linear)(x) - linear.bias
    error = np.abs(found.detach().flatten(0, 1).double().numpy() - product)
    assert (error < 2**-7 * np.abs(rows).max(1, keepdims=True)).all()
    assert error.mean() < 2**-9 * np.abs(product).mean()
    exact = rows @ weight.T
    assert np.abs(product - exact).mean() < 0.05 * np.abs(exact).mean()


def test_largest_and_smallest_numbers_stay_finite() -> None:
    x = torch.tensor([[3e38, -1.0, 0.0], [1e-30, 0.0, -1e-30], [0.0, 0.0, 0.0]])
    rounded, scale = layers.to_float8(x)
    back = rounded.float() * scale
    assert back.isfinite().all()
    assert back[0, 0] == pytest.approx(3e38, rel=1e-5)
    assert (back[2] == 0).all()


def test_only_linear_layers_that_fit_are_rounded_and_half_of_their_bytes_go() -> None:
    odd, wide = nn.Linear(32, 7), nn.Linear(32, 64, dtype=torch.bfloat16)
    network = nn.Sequential(wide, nn.LayerNorm(64), nn.ModuleDict({"inner": odd}))
    assert (fits_float8(wide), fits_float8(odd), fits_float8(network[1])) == (True, False, False)
    before, expected = nbytes(network), saved_by_float8(network, torch.bfloat16)
    use_float8(network)
    assert type(network[0]) is Float8Linear
    assert isinstance(network[2], nn.ModuleDict)
    assert network[2]["inner"] is odd
    assert before - nbytes(network) == expected == 32 * 64 - 4 * 64


def nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def write_wide_opensora(folder: Path) -> None:
    """Write a tiny world whose layers are wide enough to be rounded."""
    save_world(folder, nano_world(size=replace(NANO, width=32), image_size=64))


@pytest.mark.parametrize("write", [WORLDS["wan"], write_wide_opensora])
def test_a_world_keeps_what_a_run_rests_on(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)  # Tiny: a CPU multiplies 8-bit numbers a hundred times slower than others.
    world: Any = world_class(tmp_path).load(tmp_path, CPU, FLOAT8)
    assert any(isinstance(layer, Float8Linear) for m in world.modules().values() for layer in m.modules())
    list(check_world(world, [start(number) for number in range(3)]))


@pytest.mark.parametrize("name", ["tabletop", "tabletop_opensora"])
def test_a_world_draws_almost_the_same_with_as_many_bytes_as_were_checked(name: str) -> None:
    folder, chosen = world_folder(name), [replace(some, steps=2) for some in (ImaginationSettings(), FLOAT8)]
    kind = world_class(folder)
    worlds = [kind.load(folder, CPU, settings) for settings in chosen]
    starts = load_start_states(start_states_path("tabletop", name))[:1]
    actions = np.random.default_rng(0).uniform(-1, 1, (1, CHUNK, 7)).astype(np.float32)
    expected, drawn = (w.imagine(w.start(starts), actions, [1])[0].float() for w in worlds)
    error = (drawn - expected).square().mean()
    assert 0 < error < 255**2 / 10**3.5, "35 dB"
    exact, rounded = (sum(map(nbytes, world.modules().values())) for world in worlds)
    checked = [kind.check(folder, settings).nbytes for settings in chosen]
    assert exact - rounded == checked[0] - checked[1] > 0


def test_what_cannot_be_rounded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--imagination.precision is float8, but of an EVAC world"):
        EvacWorld.check(world_folder("tabletop_evac"), FLOAT8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"A100 has compute capability 8.0 and no 8-bit products"):
        check_float8(torch.device("cuda"))


SMALL = (64, 96, 128)


def test_products_that_are_rounded_are_right_and_nobody_elses_random_numbers_change() -> None:
    torch.manual_seed(3)
    first = torch.rand(4)
    torch.manual_seed(3)
    assert 0 < check_matrix_products(CPU, sizes=[SMALL]) < 0.01
    assert torch.equal(torch.rand(4), first)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_one_wrong_tile_is_found(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # In place of `torch.matmul`.
        found = a @ b
        found[32:48, 64:80] = number
        return found

    monkeypatch.setenv(SHARE, "70")
    monkeypatch.setattr(torch, "matmul", wrong)
    with pytest.raises(ConfigError, match=rf"cpu .* wrongly: .* 64 x 96 and 96 x 128.*unset {SHARE} \(it"):
        check_matrix_products(CPU, [SMALL])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_multiplies_right_and_its_errors_are_far_from_the_limit() -> None:
    device = torch.device("cuda", 0)
    assert check_matrix_products(device) < TOLERANCE / 5
    assert all(check_matrix_products(device, sizes=[size]) > 0 for size in SIZES)
