"""Compiled blocks: the same gradients, graphs for all that a learner does, and acting at one fixed shape."""

from functools import partialmethod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.policies.acceleration import compile, compile_blocks, enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from support.adapters import TASKS, adapted, move_adapters


def logprobs(policy: OpenVLAOFTPolicy, rows: int) -> Tensor:
    frames = np.random.default_rng(rows).integers(0, 256, (rows, 64, 64, 3), dtype=np.uint8)
    tokens = torch.randint(0, 256, (rows, 8, 7), generator=torch.Generator().manual_seed(rows))
    inputs = policy.preprocess(frames, [TASKS[row % len(TASKS)] for row in range(rows)])
    return policy.evaluate(inputs, {"tokens": tokens}, SamplingParams(temperature=1.0)).logprob


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
def test_no_way_to_call_a_checkpointed_block_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself the compiler stops at 8 graphs, beyond which it runs uncompiled without a word."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch.compiler.reset()
    shallow = TowerConfig(width=24, depth=2, heads=3, mlp=48)
    plain, fast = (adapted(dino=shallow, siglip=shallow, llm_layers=1) for _ in range(2))
    enable_gradient_checkpointing(fast)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        compile_blocks(fast)
        for rows in (4, 3):
            for policy in (plain, fast):
                policy.zero_grad()
                logprobs(policy, rows).square().mean().backward()
            for (name, found), expected in zip(fast.named_parameters(), plain.parameters(), strict=True):
                if expected.grad is not None:
                    torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)
            with torch.no_grad():
                found, expected = (logprobs(policy, rows) for policy in (fast, plain))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_compiled_actor_has_one_graph_for_each_piece_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither fewer rows, nor another prompt, nor new weights are a reason to compile again."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    shallow = TowerConfig(width=24, depth=2, heads=3, mlp=48)
    policy = adapted(dino=shallow, siglip=shallow, llm_layers=2)
    policy.compile_acting(4, TASKS)
    graphs = []
    with torch.inference_mode():
        for rows in (4, 4, 3, 1):
            frames = np.random.default_rng(rows).integers(0, 256, (rows, 64, 64, 3), dtype=np.uint8)
            inputs = policy.preprocess(frames, [TASKS[-1 - row % 2] for row in range(rows)])
            policy.act(inputs, SamplingParams(temperature=1.0), list(range(rows)))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    move_adapters(policy, seed=3)
    with torch.inference_mode():
        policy.act(inputs, SamplingParams(temperature=1.0), [0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs[0]
    assert graphs == [graphs[0]] * 4
    assert graphs[0] == 3  # A block of each vision tower, and a Llama layer: not one for each layer.


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
