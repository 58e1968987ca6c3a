"""Simulators whose actions first go through a published policy's action path, to test it without a policy.

    PYTHONPATH=benchmarks asyncrl evaluate expert --simulator action_path:ThroughTokens --trials 20
    PYTHONPATH=benchmarks asyncrl evaluate expert --simulator action_path:ThroughTokens --trials 2 \
        --simulator-settings wrong_gripper=true

What the scripted expert of LIBERO-Spatial chooses is normalised with the statistics of the published
checkpoints, put into 256 bins, decoded, un-normalised, and its gripper turned, as `OpenVLAOFTPolicy` does it
with its own decisions. A fault in statistics, bins or signs shows in the success rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.action_tokens import NormStats, decode, encode, normalise, unnormalise, with_gripper
from asyncrl.simulators.interface import Demonstrator
from asyncrl.simulators.libero.simulator import LiberoSpatial

SPATIAL: Final = NormStats(
    q01=(-0.74547, -0.66161, -0.9375, -0.10714, -0.20679, -0.18429, 0.0),
    q99=(0.9375, 0.87589, 0.93214, 0.10393, 0.17679, 0.14571, 1.0),
    mask=(True,) * 6 + (False,),
)
"""Of the published checkpoints for LIBERO-Spatial (no-op steps removed), to five digits."""


def through_tokens(action: NDArray[np.float32], stats: NormStats, wrong_gripper: bool) -> NDArray[np.float32]:
    """Return what a policy whose tokens mean this action would carry out: ``[A]`` float32."""
    opening = np.float32(action[-1] < 0)  # In the data: 1 open, 0 closed.
    wanted = normalise(np.array([*action[:-1], opening]), stats)
    decoded = unnormalise(decode(torch.from_numpy(encode(wanted))), stats)
    command = with_gripper(decoded, "maniskill" if wrong_gripper else "libero")
    return command.numpy().astype(np.float32)


class ThroughTokens(LiberoSpatial):
    """LIBERO-Spatial, whose expert acts through the tokens of a published policy."""

    def __init__(self, *, wrong_gripper: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._wrong_gripper = wrong_gripper

    @classmethod
    def describe(cls, *, wrong_gripper: bool = False, **settings: Any) -> Any:
        """Say the spec. See `LiberoSuite.describe`."""
        return super().describe(**settings)

    def expert(
        self, place: int, settings: Demonstrator, rng: np.random.Generator
    ) -> Callable[[], NDArray[np.float32]]:
        """Return the suite's expert, through the tokens."""
        choose = super().expert(place, settings, rng)
        return lambda: through_tokens(choose(), SPATIAL, self._wrong_gripper)
