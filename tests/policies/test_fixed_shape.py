"""Acting at one fixed shape: the same decisions as at any shape."""

from functools import partialmethod

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.policies.acceleration import compile
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy

TASKS = ["put the red cube on the white plate", "lift it"]
SAMPLING = SamplingParams(temperature=1.3, top_k=20)
SMALL = {
    "dino": TowerConfig(width=24, depth=3, heads=3, mlp=48),
    "siglip": TowerConfig(width=32, depth=3, heads=2, mlp=40),
    "llm_layers": 2,
}


def policy_of(**changes: object) -> OpenVLAOFTPolicy:
    torch.manual_seed(3)
    return new_policy(OpenVLAOFTConfig.tiny(**SMALL, **changes)).eval()


def frames(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, 64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "changes", [{}, {"decoding": "autoregressive", "chunk": 1}], ids=["parallel", "autoregressive"]
)
@pytest.mark.parametrize(
    "tasks",
    [pytest.param(TASKS, id="two lengths"), pytest.param(TASKS[1:], id="one length", marks=pytest.mark.slow)],
)
def test_a_compiled_policy_decides_the_same_for_any_number_of_rows(changes, tasks, monkeypatch) -> None:
    """The blocks are traced for real and run as they are: building kernels would take a minute."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    plain, fast = policy_of(**changes), policy_of(**changes)
    compile(fast, 3, tasks)
    for rows in (1, 3):
        chosen = [tasks[row % len(tasks)] for row in range(rows)]
        seeds = list(range(5, 5 + rows))
        expected = plain.act(plain.preprocess(frames(rows), chosen), SAMPLING, seeds)
        acted = fast.act(fast.preprocess(frames(rows), chosen), SAMPLING, seeds)
        assert torch.equal(acted.sample["tokens"], expected.sample["tokens"])
        torch.testing.assert_close(acted.logprob, expected.logprob, atol=1e-5, rtol=0)
        assert acted.logprob.shape[0] == rows


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler: what it imports, and products that stay float32
def test_a_captured_policy_decides_the_same_and_follows_its_weights() -> None:
    plain, fast = policy_of().cuda(), policy_of().cuda()
    compile(fast, 3, TASKS)
    for scale in (1.0, 1.5):
        with torch.no_grad():
            for policy in (plain, fast):
                policy.lm_head.weight.mul_(scale)  # in place, as new weights arrive
        for seeds in ([1, 2], [3, 4]):
            acted = [p.act(p.preprocess(frames(2), TASKS), SAMPLING, seeds) for p in (plain, fast)]
            assert torch.equal(acted[0].sample["tokens"], acted[1].sample["tokens"])
            torch.testing.assert_close(acted[0].logprob, acted[1].logprob, atol=1e-4, rtol=0)


def test_more_rows_than_it_was_compiled_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    policy = policy_of()
    compile(policy, 1, TASKS)
    with pytest.raises(ConfigError, match=r"2 rows .* compiled for 1"):
        policy.act(policy.preprocess(frames(2), TASKS), SAMPLING, [1, 2])
