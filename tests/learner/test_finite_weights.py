"""Which weights are not finite: all are looked at together, and named one by one where any is not."""

import math

import pytest
import torch
from torch import Tensor

from asyncrl.learner.ranks import LearnerRanks, not_finite


def weights() -> dict[str, Tensor]:
    return {
        "half": torch.full((3, 5), -3e38).bfloat16(),
        "scalar": torch.tensor(2.0),
        "full": torch.tensor([[3.4e38, -3.4e38], [0.0, 1e-45]]),
        "nothing": torch.empty(0, 4),  # A rank's shard may be empty.
    }


def test_the_largest_numbers_are_finite() -> None:
    assert not_finite(weights(), LearnerRanks()) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("names", [["half"], ["scalar"], ["full", "half"]])
def test_one_number_is_enough_to_be_named(names: list[str], number: float) -> None:
    tensors = weights()
    for name in names:
        tensors[name].view(-1)[-1] = number
    assert sorted(not_finite(tensors, LearnerRanks())) == names


def test_shards_that_are_all_empty_are_finite() -> None:
    assert not_finite({"nothing": torch.empty(0, 4)}, LearnerRanks()) == []


class Two(LearnerRanks):
    """A second rank whose tensors are all as `other` says."""

    def __init__(self, other: float) -> None:
        self.other = other

    def max(self, values: Tensor) -> Tensor:
        return torch.maximum(values, torch.full_like(values, self.other))


def test_what_another_rank_found_is_named_here_too() -> None:
    assert not_finite(weights(), Two(1.0)) == list(weights())
