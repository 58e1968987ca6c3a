"""Acting never makes the host wait for the device."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.policies.action_tokens import NormStats, uniforms_for
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from support.looks import Looks

SHORT, LONG = "lift the cube", "put the red cube on the white plate"
SAMPLINGS = [SamplingParams(temperature=t, top_k=k) for t, k in ((1.0, 0), (0.0, 0), (1.6, 5))]
SEVEN = NormStats(q01=(0.0,) * 7, q99=(1.0,) * 7, mask=(True,) * 7)
COMMON = {
    "norm_key": "a",
    "norm_stats": {"a": replace(SEVEN, proprio=SEVEN)},
    "gripper": "libero",
    "value_head": "chunk",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "oft": {},
    "official": {"stop_token": True, "image_pipeline": "oft", "images": 2, "proprio_dim": 7},
    "openvla": {"decoding": "autoregressive", "chunk": 1},
}
variants = pytest.mark.parametrize("variant", VARIANTS)
tasks_of = pytest.mark.parametrize("tasks", [[LONG, LONG], [SHORT, LONG]], ids=["unpadded", "padded"])


def policy_of(variant: str, **changes: Any) -> OpenVLAOFTPolicy:
    torch.manual_seed(0)
    return new_policy(OpenVLAOFTConfig.tiny(**COMMON, **VARIANTS[variant], **changes)).eval()


def inputs_of(policy: OpenVLAOFTPolicy, tasks: list[str]) -> PolicyInputs:
    shape = (2, policy.config.images, 80, 80, 3)
    frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return policy.preprocess(frames, tasks, np.zeros((2, 7)))


@variants
@tasks_of
def test_the_host_looks_at_no_number(variant: str, tasks: list[str]) -> None:
    policy = policy_of(variant)
    with Looks() as looks:
        inputs = inputs_of(policy, tasks)
    assert len(looks.seen) == 1  # whether all prompts are equally long, asked before they leave the host
    for sampling in SAMPLINGS:
        with Looks() as looks:
            acted = policy.act(inputs, sampling, [1, 2])
            if policy.config.decoding == "parallel":  # transformers looks for packed rows in causal passes
                policy.evaluate(inputs, {"tokens": acted.sample["tokens"]}, sampling)
        assert looks.seen == []


@pytest.mark.gpu
@variants
@tasks_of
def test_the_gpu_is_never_waited_for(variant: str, tasks: list[str]) -> None:
    policy = policy_of(variant, dtype="bfloat16").to("cuda")
    for _ in range(2):  # the first time, libraries begin their work
        policy.act(inputs_of(policy, tasks), SAMPLINGS[0], [1, 2])
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that the mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        inputs = inputs_of(policy, tasks)
        acted = policy.act(inputs, SAMPLINGS[0], [1, 2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = policy.evaluate(inputs, {"tokens": acted.sample["tokens"]}, SAMPLINGS[0])
    torch.testing.assert_close(again.logprob, acted.logprob, atol=0.1, rtol=0)
    torch.testing.assert_close(again.value, acted.value, atol=0.05, rtol=0)


@pytest.mark.gpu
@variants
@tasks_of
@torch.no_grad()
def test_a_whole_decision_can_be_captured_as_one_graph(variant: str, tasks: list[str]) -> None:
    policy = policy_of(variant).to("cuda")
    inputs = inputs_of(policy, tasks)
    uniforms = uniforms_for(SAMPLINGS[0], [1, 2], policy.config.slots, policy.device)
    assert uniforms is not None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = policy.choose(inputs, SAMPLINGS[0], uniforms).tokens
        policy.choose(inputs, SAMPLINGS[0], uniforms)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = policy.choose(inputs, SAMPLINGS[0], uniforms)
    uniforms.fill_(0.5)  # a graph reads its inputs anew
    graph.replay()
    middle = policy.choose(inputs, SAMPLINGS[0], uniforms)
    assert torch.equal(captured.tokens, middle.tokens)
    assert not torch.equal(captured.tokens, first)
    torch.testing.assert_close(captured.logprobs, middle.logprobs, atol=1e-4, rtol=0)
