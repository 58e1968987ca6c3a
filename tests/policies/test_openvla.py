"""The OpenVLA-OFT policy at its tiny size: tokens, sampling, wiring, gradients, tokenizer."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import (
    Bounds,
    NormStats,
    action_distribution,
    decode,
    encode,
    entropy_of,
    normalise,
    take_tokens,
    uniforms_for,
    unnormalise,
)
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, TowerConfig
from asyncrl.policies.openvla.networks import DINO_MEAN, DINO_STD, resize
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from asyncrl.policies.openvla.preprocess import PromptTokenizer, build_word_tokenizer

SHORT, LONG = "lift the cube", "put the red cube on the white plate"
AS_IS = SamplingParams(temperature=1.0)
SEVEN = NormStats(q01=(0.0,) * 7, q99=(1.0,) * 7, mask=(True,) * 7)
WITH_STATE = replace(SEVEN, proprio=SEVEN)
FIRST_ID = 31744  # of the action bins in Llama 2's vocabulary of 32000


def tiny(**changes: object) -> OpenVLAOFTPolicy:
    """A tiny policy whose weights are large enough to matter everywhere."""
    torch.manual_seed(0)
    policy = new_policy(OpenVLAOFTConfig.tiny(**changes))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy.eval()


@pytest.fixture(scope="module")
def policy() -> OpenVLAOFTPolicy:
    return tiny(value_head="chunk")


def some_frames(count: int, size: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


# --- tokens -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary_id", "value"),
    [(31999, -0.99608), (31872, 0.0), (31745, 0.99608), (31744, 0.99608), (31998, -0.98824)],
)
def test_a_token_decodes_to_the_published_value(vocabulary_id: int, value: float) -> None:
    assert decode(torch.tensor(vocabulary_id - FIRST_ID)).item() == pytest.approx(value, abs=5e-6)


@pytest.mark.parametrize(
    ("value", "vocabulary_id"), [(-1.0, 31999), (1.0, 31744), (0.999, 31745), (0.0, 31872), (-7.0, 31999)]
)
def test_a_value_encodes_to_the_published_token(value: float, vocabulary_id: int) -> None:
    assert encode(np.array([value], np.float32)).tolist() == [vocabulary_id - FIRST_ID]


def test_encoding_undoes_decoding_except_for_the_bin_without_a_cell() -> None:
    bins = np.arange(256)
    assert encode(decode(torch.from_numpy(bins)).numpy()).tolist() == [1, *range(1, 256)]


def test_unnormalising_follows_the_formula_where_masked() -> None:
    stats = NormStats(q01=(-0.5, -0.2, 0.0), q99=(0.9375, 0.4, 1.0), mask=(True, True, False))
    actions = torch.tensor([[-1.0, 0.0, 0.25], [1.0, 0.5, -0.75]])
    expected = torch.tensor([[-0.5, 0.1, 0.25], [0.9375, 0.25, -0.75]])
    torch.testing.assert_close(unnormalise(actions, stats), expected, atol=1e-6, rtol=0)


def test_proprioception_is_scaled_to_the_range_of_the_data_and_clipped() -> None:
    bounds = Bounds(q01=(-1.0, 0.0, 0.0), q99=(3.0, 0.5, 9.0), mask=(True, True, False))
    found = normalise(np.array([[-1.0, 0.25, 0.75], [9.0, -1.0, 5.0]]), bounds)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[-1.0, 0.0, 0.75], [1.0, -1.0, 1.0]], atol=1e-7)


def test_published_statistics_come_back_with_and_without_proprioception() -> None:
    action = {"q01": [-0.5, 0.0], "q99": [0.5, 1.0], "mask": [True, False]}
    stats = NormStats.from_published({"action": action, "num_transitions": 7})
    assert stats == NormStats(q01=(-0.5, 0.0), q99=(0.5, 1.0), mask=(True, False))
    assert stats.to_published() == {"action": action}
    proprio = {"q01": [0.0], "q99": [2.0]}  # published without a mask
    stats = NormStats.from_published({"action": action, "proprio": proprio})
    assert stats.proprio == Bounds(q01=(0.0,), q99=(2.0,), mask=(True,))
    assert NormStats.from_published(stats.to_published()) == stats


@pytest.mark.parametrize(("gripper", "commands"), [("libero", [-1.0, 1.0]), ("maniskill", [1.0, -1.0])])
def test_the_gripper_leaves_in_the_convention_of_the_simulator(gripper: str, commands: list[float]) -> None:
    stats = NormStats(q01=(-0.5,) * 6 + (0.0,), q99=(0.5,) * 6 + (1.0,), mask=(True,) * 6 + (False,))
    config = OpenVLAOFTConfig.tiny(gripper=gripper, norm_key="libero", norm_stats={"libero": stats})
    tokens = torch.from_numpy(
        encode(np.array([[0, 0, 0, 0, 0, 0, 0.99], [0, 0, 0, 0, 0, 0.99, 0.02]], np.float32))
    )
    actions = OpenVLAOFTPolicy(config).decode(tokens)
    assert actions[:, 6].tolist() == commands  # the first opens the gripper
    assert actions[1, 5].item() == pytest.approx(0.495, abs=0.5 / 255)


# --- sampling -----------------------------------------------------------------


def choose_tokens(logprobs_BKN: Tensor, sampling: SamplingParams, seeds: Sequence[int]) -> Tensor:
    """Sample (or, at temperature 0, take the most likely) tokens: ``[B, K]`` int64."""
    return take_tokens(
        logprobs_BKN, uniforms_for(sampling, seeds, logprobs_BKN.shape[1], logprobs_BKN.device)
    )


def test_sampled_frequencies_match_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -4.0, 1.5, 0.0])
    draws = 20_000
    logprobs = action_distribution(logits.expand(1, draws, 8), AS_IS)
    tokens = choose_tokens(logprobs, AS_IS, [7])
    seen = torch.bincount(tokens.flatten(), minlength=8).double()
    expected = draws * logits.double().exp() / logits.double().exp().sum()
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3  # 99.9 % quantile with 7 degrees of freedom


def test_a_higher_temperature_divides_the_logits() -> None:
    logits = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    for row in (0, 1):
        weights = [math.exp(x / 1.6) for x in logits[row, 2].tolist()]
        expected = torch.tensor([math.log(w / sum(weights)) for w in weights])
        found = action_distribution(logits, SamplingParams(temperature=1.6))[row, 2]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_top_k_only_ever_samples_the_k_most_likely_bins() -> None:
    sampling = SamplingParams(temperature=2.0, top_k=3)
    logits = torch.randn(4, 56, 256, generator=torch.Generator().manual_seed(1))
    logprobs = action_distribution(logits, sampling)
    assert (logprobs.exp() > 0).sum(-1).unique().tolist() == [3]
    best = logits.topk(3).indices
    seen = [choose_tokens(logprobs, sampling, [100 * s, 1, 2, 3]) for s in range(20)]
    assert all((tokens.unsqueeze(-1) == best).any(-1).all() for tokens in seen)
    assert len({tokens[0, 0].item() for tokens in seen}) > 1
    assert (entropy_of(logprobs) <= math.log(3) + 1e-5).all()


def test_a_taken_token_keeps_a_finite_log_prob_under_top_k() -> None:
    logits = torch.arange(256.0).expand(1, 1, 256).clone().requires_grad_()
    logprobs = action_distribution(logits, SamplingParams(temperature=1.0, top_k=2), torch.tensor([[5]]))
    expected = 5 - 255 - math.log1p(math.exp(-1))  # against the two most likely, 255 and 254
    assert logprobs[0, 0, 5].item() == pytest.approx(expected, abs=1e-4)
    (logprobs[0, 0, 5] + entropy_of(logprobs).sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_ends_of_the_uniform_never_pick_an_impossible_bin() -> None:
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(1, 4, 5)
    uniforms = torch.tensor([[0.0, 0.2499, 0.2501, 1 - 2**-53]], dtype=torch.float64)
    assert take_tokens(probabilities.log(), uniforms).tolist() == [[1, 1, 3, 3]]


def test_each_row_draws_from_its_own_seed() -> None:
    together, alone = (
        uniforms_for(AS_IS, seeds, 56, torch.device("cpu")) for seeds in ([3, 2**62 - 1], [2**62 - 1])
    )
    assert together is not None
    assert alone is not None
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])


def test_temperature_zero_takes_the_most_likely_token_and_reports_temperature_one(policy) -> None:
    inputs = policy.preprocess(some_frames(2), [LONG, LONG])
    greedy = policy.act(inputs, SamplingParams(temperature=0.0), [1, 2])
    with torch.no_grad():
        logits = policy.lm_head(policy.readout(inputs))
    best = logits.log_softmax(-1).max(-1)
    assert torch.equal(greedy.sample["tokens"].flatten(1).long(), best.indices)
    torch.testing.assert_close(greedy.logprob.flatten(1), best.values, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": 1.0, "top_k": -1}]
)
def test_sampling_that_cannot_work_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Use"):
        SamplingParams(**bad)  # type: ignore[arg-type]


# --- acting and evaluating ----------------------------------------------------


def test_frames_that_are_not_pictures_are_refused(policy: OpenVLAOFTPolicy) -> None:
    with pytest.raises(ConfigError, match=r"float32\[1, 64, 64, 3\]"):
        policy.preprocess(some_frames(1).astype(np.float32), [LONG])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 tasks"):
        policy.preprocess(some_frames(1), [LONG, LONG])


def test_pictures_or_proprioception_that_are_missing_are_named() -> None:
    two, state = tiny(images=2), tiny(proprio_dim=8)
    with pytest.raises(
        ConfigError, match=r"reads 2 uint8 .* got frames uint8\[1, 64, 64, 3\].*not trained in"
    ):
        two.preprocess(some_frames(1), [LONG])
    with pytest.raises(ConfigError, match=r"uint8\[1, 1, 64"):
        two.preprocess(some_frames(1)[None], [LONG])
    with pytest.raises(ConfigError, match=r"needs 8 numbers .* got none.*not trained in a world"):
        state.preprocess(some_frames(1), [LONG])
    with pytest.raises(ConfigError, match=r"got \[1, 7\]"):
        state.preprocess(some_frames(1), [LONG], np.zeros((1, 7)))


def test_of_more_pictures_than_it_reads_a_policy_takes_the_first() -> None:
    frames = some_frames(3)
    for images in (1, 2):
        policy = tiny(images=images)
        shown = frames[:1] if images == 1 else frames[None, :2]
        of_all, of_few = policy.preprocess(frames[None], [LONG]), policy.preprocess(shown, [LONG])
        assert bool((of_all.pixels == of_few.pixels).all())


# --- wiring -------------------------------------------------------------------


@torch.no_grad()
def test_prompts_of_one_length_need_no_mask(policy: OpenVLAOFTPolicy) -> None:
    both = policy.preprocess(some_frames(2), [SHORT, SHORT])
    embeddings, mask, last_prompt = policy.embed(both)
    assert not both.padded
    assert mask is None
    assert last_prompt == len(policy.tokenizer.ids(SHORT)) + 64 - 1
    assert embeddings.shape[1] == last_prompt + 1 + 56
    assert policy.preprocess(some_frames(2), [SHORT, LONG]).padded


def test_frames_of_another_size_are_resized_to_whole_grey_levels() -> None:
    frames = torch.from_numpy(some_frames(1, 128))
    resized = resize(frames, 64)
    assert resized.shape == (1, 3, 64, 64)
    assert torch.equal(resized, resized.round())
    assert resized.min() >= 0
    assert resized.max() <= 255
    flat = resize(torch.full((1, 100, 100, 3), 77, dtype=torch.uint8), 64)
    assert flat.unique().tolist() == [77.0]
    same = torch.from_numpy(some_frames(1))
    assert torch.equal(resize(same, 64), same.permute(0, 3, 1, 2).float())


def test_dino_sees_the_rounded_statistics_of_imagenet() -> None:
    exact = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    rounded = {name: tuple(torch.tensor(values).bfloat16().tolist()) for name, values in exact.items()}
    assert (rounded["mean"], rounded["std"]) == (DINO_MEAN, DINO_STD)


# --- the critic ---------------------------------------------------------------


def test_logits_and_values_stay_in_full_precision_under_autocast() -> None:
    policy = tiny(value_head="action")
    hidden = torch.randn(2, 56, 128, generator=torch.Generator().manual_seed(0))
    expected = policy.lm_head(hidden), policy.value_of(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = policy.lm_head(hidden), policy.value_of(hidden)
        assert (hidden @ hidden.mT).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["evaluate", "values", "forward"])
def test_the_value_loss_reaches_the_value_head_alone(call: str) -> None:
    policy = tiny(value_head="action")
    inputs = policy.preprocess(some_frames(2), [SHORT, LONG])
    tokens = torch.zeros(2, 8, 7, dtype=torch.int32)
    if call == "values":
        value = policy.values(inputs)
    else:
        value = getattr(policy, call)(inputs, {"tokens": tokens}, AS_IS).value
    assert value is not None
    value.square().sum().backward()
    reached = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {n for n, _ in policy.named_parameters() if n.startswith("value_head.")}


def test_a_policy_without_a_critic_has_no_values() -> None:
    policy = tiny()
    inputs = policy.preprocess(some_frames(1), [LONG])
    assert policy.act(inputs, AS_IS, [1]).value is None
    with pytest.raises(AssertionError):
        policy.values(inputs)


def test_actors_need_everything_that_learns_but_the_critic() -> None:
    policy = tiny(value_head="action")
    policy.vision.requires_grad_(False)
    parameters, tensors = policy.trainable_parameters(), policy.trainable_tensors()
    assert list(parameters) == list(tensors)
    assert all(tensors[name].data_ptr() == p.data_ptr() for name, p in parameters.items())
    assert all(p.requires_grad for p in parameters.values())
    assert not any(t.requires_grad for t in tensors.values())
    critic = {f"value_head.mlp.{i}" for i in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")}
    acting = policy.acting_tensors()
    assert tensors.keys() - acting.keys() == critic
    assert acting.keys() <= tensors.keys()


def test_the_critic_has_its_own_learning_rate_and_groups_hold_everything_once(policy) -> None:
    groups = policy.parameter_groups(lr=1e-5, value_lr=3e-3)
    assert [(g["name"], g["lr"]) for g in groups] == [("policy", 1e-5), ("value", 3e-3)]
    grouped = [id(p) for g in groups for p in g["params"]]
    assert sorted(grouped) == sorted(map(id, policy.parameters()))
    assert [g["name"] for g in tiny().parameter_groups(lr=1e-5, value_lr=3e-3)] == ["policy"]


def test_rotary_frequencies_stay_in_full_precision_when_the_weights_do_not() -> None:
    policy = tiny(value_head="action").to(torch.bfloat16)
    expected = 1 / 10_000 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(policy.llm.rotary_emb.inv_freq, expected, atol=0, rtol=1e-6)
    acted = policy.act(policy.preprocess(some_frames(1), [LONG]), AS_IS, [1])
    assert acted.value is not None
    assert (acted.logprob.dtype, acted.value.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_key": "bridge"}, "not among its statistics"),
        ({"decoding": "autoregressive", "stop_token": True}, "no slots"),
        ({"images": 0}, "at least 1"),
        ({"llm_heads": 3}, "3 heads do not divide a width of 128"),
        ({"llm_heads": 0}, "0 heads do not divide"),
        ({"dino": TowerConfig(width=96, depth=5, heads=5, mlp=192)}, "5 heads do not divide a width of 96"),
        *(({"token_count": count}, f"token_count {count} must be between") for count in (0, 256, 512, 600)),
        *(({"patch_size": size}, f"patch_size {size} between 1 and") for size in (0, 65)),
        *(({"rms_eps": eps}, "rms_eps is") for eps in (0.0, -1e-6, 1.0, 1e30)),
        ({"chunk": 0}, "at least 1"),
        ({"proprio_dim": 8, "norm_key": "a", "norm_stats": {"a": SEVEN}}, "of proprioception the"),
        ({"proprio_dim": 8, "norm_key": "a", "norm_stats": {"a": WITH_STATE}}, "of proprioception the"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OpenVLAOFTConfig.tiny(**changes)


def test_the_prompt_begins_with_bos_and_ends_with_the_colon() -> None:
    tokenizer = PromptTokenizer(build_word_tokenizer(), pad_id=448)
    pieces = [tokenizer.tokenizer.id_to_token(i) for i in tokenizer.ids("Put the RED cube on the plate")]
    expected = "<s> In : What action should the robot take to put the red cube on the plate ? \n Out :"
    assert pieces == expected.split(" ")


def test_short_prompts_are_padded_behind_bos() -> None:
    tokenizer = PromptTokenizer(build_word_tokenizer(), pad_id=448)
    ids, mask = tokenizer.batch(["lift cube", "lift the red cube"])
    assert ids[0, :4].tolist() == [1, 448, 448, tokenizer.ids("lift cube")[1]]
    assert mask[0].tolist() == [1, 0, 0] + [1] * (ids.shape[1] - 3)
    assert mask[1].all()
    assert ids[:, -1].unique().numel() == 1


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(tmp_path: Path) -> None:
    """As they are saved by a stack that had just tokenised a batch."""
    plain, saved = build_word_tokenizer(), build_word_tokenizer()
    saved.enable_truncation(6)
    saved.enable_padding(pad_id=448, pad_token="<PAD>", length=64)
    for name, tokenizer in (("plain", plain), ("saved", saved)):
        (tmp_path / name).write_text(tokenizer.to_str())
    assert json.loads((tmp_path / "saved").read_text())["truncation"]["max_length"] == 6
    read = [PromptTokenizer.from_file(tmp_path / name, pad_id=448) for name in ("plain", "saved")]
    expected, found = (tokenizer.ids("put the red cube on the plate") for tokenizer in read)
    assert found == expected
    assert len(found) > 6
    read[1].save(tmp_path / "again")
    content = json.loads((tmp_path / "again").read_text())
    assert (content["truncation"], content["padding"]) == (None, None)
