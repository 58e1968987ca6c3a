"""Products that are wrong are found before anything is learned from them."""

import pytest
import torch

from asyncrl.devices.tensors import SHARE, SIZES, TOLERANCE, check_matrix_products
from asyncrl.errors import ConfigError

CPU = torch.device("cpu")
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
