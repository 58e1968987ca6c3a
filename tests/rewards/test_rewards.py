"""Reward models: published layouts and tensors, slow formulas, tasks and files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.launch.named_models import named_reward
from asyncrl.rewards import resnet
from asyncrl.rewards.interface import deciding_step
from asyncrl.rewards.resnet import (
    GroupedReward,
    ResNetReward,
    RewardConfig,
    RewardNetwork,
    open_reward,
    save_reward,
)
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from support.pth import write_pth

CPU = torch.device("cpu")
TASKS = ("open the drawer", "close the drawer", "push the plate")


def model(tasks: tuple[str, ...] = TASKS, *, rounded: bool = False) -> ResNetReward:
    torch.manual_seed(0)
    config = RewardConfig.tiny(tasks)
    network = RewardNetwork(config).requires_grad_(False)
    for module in network.modules():  # statistics and weights that matter
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean = 0.1 * torch.randn(module.num_features)
            module.running_var = 0.5 + torch.rand(module.num_features)
            module.weight.add_(0.3 * torch.randn(module.num_features))
    return ResNetReward(network, config, rounded=rounded)


def frames_of(batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 8, 64, 64, 3), generator=generator, dtype=torch.uint8)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fly'.*'open the drawer', 'close the drawer', 'push the plate'"):
        model().score(frames_of(1), ["fly"])


def test_a_model_without_tasks_scores_any_task() -> None:
    frames = frames_of(1)
    reward = model(())
    assert torch.equal(reward.score(frames, ["fly"]), reward.score(frames, ["walk"]))


def test_frames_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="64-pixel frames"):
        model().score(torch.zeros(1, 8, 32, 32, 3, dtype=torch.uint8), TASKS[:1])


def test_saved_rewards_score_the_same(tmp_path: Path) -> None:
    reward = model(rounded=True)
    save_reward(tmp_path / "reward", reward)
    loaded = ResNetReward.load(tmp_path / "reward", CPU, ())
    assert (loaded.config, loaded.rounded) == (reward.config, True)
    loaded.rounded = reward.rounded = False
    assert torch.equal(loaded.score(frames_of(1), TASKS[:1]), reward.score(frames_of(1), TASKS[:1]))


def test_broken_reward_files_are_refused_with_tensor_and_shapes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no readable reward model"):
        ResNetReward.load(tmp_path, CPU, ())
    save_reward(tmp_path, model())
    tensors = load_file(tmp_path / "reward.safetensors")
    save_file({**tensors, "fusion_layer.3.bias": torch.zeros(2)}, tmp_path / "reward.safetensors")
    with pytest.raises(CheckpointError, match=r"fusion_layer.3.bias has shape \[2\], the model needs \[1\]"):
        ResNetReward.load(tmp_path, CPU, ())
    del tensors["fusion_layer.3.bias"]
    save_file(tensors, tmp_path / "reward.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor fusion_layer.3.bias of shape \[1\]"):
        ResNetReward.load(tmp_path, CPU, ())


LONG = INSTRUCTIONS["libero_10"]
SPATIAL = INSTRUCTIONS["libero_spatial"]
WIDTHS = (4, 6, 8, 10)


def random_tensors(seed: int, *, embeds: bool = False, normed: bool = False) -> dict[str, Tensor]:
    """A small file of a published layout, written from its description, with random values."""
    generator = torch.Generator().manual_seed(seed)
    trunk = "visual_encoder" if embeds else "net"
    tensors: dict[str, Tensor] = {}

    def normal(name: str, *shape: int) -> None:
        fan = max(1, int(np.prod(shape[1:])))
        tensors[name] = torch.randn(shape, generator=generator) * (2 / fan) ** 0.5

    def layer(name: str, *shape: int, bias: bool = True) -> None:
        normal(f"{name}.weight", *shape)
        if bias:
            tensors[f"{name}.bias"] = 0.2 * torch.randn(shape[0], generator=generator)

    def norm(name: str, channels: int) -> None:
        tensors[f"{name}.weight"] = 0.6 + 0.3 * torch.rand(channels, generator=generator)
        tensors[f"{name}.bias"] = 0.1 * torch.randn(channels, generator=generator)
        tensors[f"{name}.running_mean"] = 0.1 * torch.randn(channels, generator=generator)
        tensors[f"{name}.running_var"] = 0.5 + torch.rand(channels, generator=generator)
        tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)

    layer(f"{trunk}.0.0", WIDTHS[0], 3, 7, 7)
    norm(f"{trunk}.0.1", WIDTHS[0])
    for stage, width in enumerate(WIDTHS, start=1):
        for block in (0, 1):
            name, changes = f"{trunk}.{stage}.{block}", stage > 1 and block == 0
            before = WIDTHS[stage - 2] if changes else width
            layer(f"{name}.conv1", width, before, 3, 3, bias=not normed)
            layer(f"{name}.conv2", width, width, 3, 3, bias=not normed)
            norm(f"{name}.bn1", width)
            norm(f"{name}.bn2", width)
            if changes and normed:
                layer(f"{name}.shortcut.0", width, before, 1, 1, bias=False)
                norm(f"{name}.shortcut.1", width)
            elif changes:
                layer(f"{name}.conv3", width, before, 1, 1)
    if embeds:
        normal("task_embedding.weight", 10, 5)
        layer("fusion_layer.0", 12, WIDTHS[-1] + 5)
        layer("fusion_layer.3", 1, 12)
    else:
        layer("net.7", 1, WIDTHS[-1])
    return tensors


def slow_probability(w: dict[str, Tensor], image_3HW: Tensor, task: int) -> float:
    """The network by its description, whichever of the three it is."""
    trunk = "net" if "net.0.0.weight" in w else "visual_encoder"

    def conv(name: str, x: Tensor, stride: int, padding: int) -> Tensor:
        return torch.nn.functional.conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), stride, padding)

    def norm(name: str, x: Tensor) -> Tensor:
        mean, var, weight, bias = (
            w[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    x = norm(f"{trunk}.0.1", conv(f"{trunk}.0.0", image_3HW[None], 2, 3)).clamp(min=0)
    x = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            name = f"{trunk}.{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            y = norm(f"{name}.bn1", conv(f"{name}.conv1", x, stride, 1)).clamp(min=0)
            y = norm(f"{name}.bn2", conv(f"{name}.conv2", y, 1, 1))
            if f"{name}.conv3.weight" in w:
                x = conv(f"{name}.conv3", x, stride, 0)
            elif f"{name}.shortcut.0.weight" in w:
                x = norm(f"{name}.shortcut.1", conv(f"{name}.shortcut.0", x, stride, 0))
            x = (x + y).clamp(min=0)
    seen = x.mean((2, 3))[0]
    if trunk == "net":
        logit = w["net.7.weight"] @ seen + w["net.7.bias"]
    else:
        both = torch.cat([seen, w["task_embedding.weight"][task]])
        hidden = (w["fusion_layer.0.weight"] @ both + w["fusion_layer.0.bias"]).clamp(min=0)
        logit = w["fusion_layer.3.weight"] @ hidden + w["fusion_layer.3.bias"]
    return float(1 / (1 + torch.exp(-logit[0])))


def some_frames(batch: int, count: int = 2) -> Tensor:
    coarse = torch.randint(0, 256, (batch, count, 8, 8, 3), generator=torch.Generator().manual_seed(5))
    return coarse.repeat_interleave(32, dim=2).repeat_interleave(32, dim=3).to(torch.uint8)


def images_of(frames: Tensor) -> Tensor:
    """``[B, C, H, W, 3]`` uint8 as ``[B, C, 3, H, W]`` in [-1, 1]."""
    return frames.permute(0, 1, 4, 2, 3).double().float() / 255 * 2 - 1


@pytest.mark.parametrize(("embeds", "normed"), [(False, False), (True, False), (False, True)])
def test_each_published_layout_is_told_by_its_tensors_and_scores_as_described(
    tmp_path: Path, embeds: bool, normed: bool
) -> None:
    tensors = random_tensors(2, embeds=embeds, normed=normed)
    write_pth(tmp_path / "epoch_9.pth", tensors)  # whatever it is called
    frames, tasks = some_frames(2), [SPATIAL[7], SPATIAL[2]]
    reward = ResNetReward.load(tmp_path, CPU, SPATIAL)
    assert (reward.config.widths, reward.config.normed_shortcut) == (WIDTHS, normed)
    assert reward.config.tasks == (SPATIAL if embeds else ())
    assert reward.rounded is not normed, "only EVAC's scores are probabilities"
    scores = reward.score(frames, tasks)
    expected = torch.tensor(
        [
            [slow_probability(tensors, image, i) for image in row]
            for row, i in zip(images_of(frames), (7, 2), strict=True)
        ]
    )
    assert 0.01 < expected.min() < expected.max() < 0.99, "random values that tell something"
    if normed:
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    else:
        assert torch.equal(scores, (expected > 0.5).float())
        reward.rounded = False
        torch.testing.assert_close(reward.score(frames, tasks), expected, atol=1e-5, rtol=0)


def test_evacs_network_has_123_tensors_at_the_published_size() -> None:
    with torch.device("meta"):
        network = RewardNetwork(replace(RewardConfig.full(), normed_shortcut=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    # Stem 2 + 5; 8 blocks of 2 + 2 * 5; 3 shortcuts of 1 + 5; head 2.
    assert len(shapes) == 7 + 8 * 12 + 3 * 6 + 2
    assert shapes["net.0.0.bias"] == (64,)
    assert "net.1.0.conv1.bias" not in shapes
    assert shapes["net.4.0.shortcut.0.weight"] == (512, 256, 1, 1)
    assert not any(name.startswith("net.1.") and "shortcut" in name for name in shapes)


def renamed(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}_"] = tensors.pop(name)


def cut(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][..., :-1].clone()


def doubled(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.copy"] = tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, "lacks tensor {name} of shape"),
        (cut, "tensor {name} has shape"),
        (doubled, r"holds {name}\.copy, which the model has no use for"),
    ],
)
@pytest.mark.parametrize(
    ("embeds", "normed", "name"),
    [
        (False, False, "net.3.1.bn2.weight"),
        (True, False, "fusion_layer.3.weight"),
        (False, True, "net.3.0.shortcut.1.weight"),
    ],
)
def test_one_wrong_key_is_refused_by_its_name(tmp_path, change, words, embeds, normed, name) -> None:
    tensors = random_tensors(2, embeds=embeds, normed=normed)
    change(tensors, name)
    write_pth(tmp_path / "resnet_rm.pth", tensors)
    with pytest.raises(CheckpointError, match=words.format(name=name.replace(".", r"\."))):
        ResNetReward.load(tmp_path, CPU, SPATIAL)


def test_of_two_reward_models_under_other_names_none_is_chosen(tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        write_pth(tmp_path / name, random_tensors(3))
    write_pth(tmp_path / "poses.pth", {"net.0.weight": torch.zeros(4, 15)})
    with pytest.raises(CheckpointError, match=r"several reward models: .*a\.pth and .*b\.pth"):
        open_reward(tmp_path)
    (tmp_path / "b.pth").unlink()
    (tmp_path / "a.pth").rename(tmp_path / "a.PTH")
    assert open_reward(tmp_path)[""].config.widths == WIDTHS
    (tmp_path / "newer.pth").write_bytes((tmp_path / "a.PTH").read_bytes()[:999])
    with pytest.raises(CheckpointError, match=r"newer\.pth was not read"):
        open_reward(tmp_path)


def keyword_group(task: str) -> int:
    """The published rule, which looks for words of an instruction."""
    if "basket" in task:
        return 1
    if "stove" in task and "moka pot" in task:
        return 2
    if "black bowl" in task and "bottom drawer" in task:
        return 3
    if "white mug" in task and ("plate" in task or "chocolate pudding" in task):
        return 4
    if "book" in task and "caddy" in task:
        return 5
    assert "microwave" in task
    return 6


def write_groups(folder: Path) -> dict[int, dict[str, Tensor]]:
    tensors = {number: random_tensors(10 + number, embeds=True) for number in range(1, 7)}
    for number, content in tensors.items():
        (folder / f"group_{number}").mkdir(parents=True)
        write_pth(folder / f"group_{number}" / "42.pth", content)
    return tensors


def long_reward(folder: Path) -> GroupedReward:
    named = named_reward("", folder)
    assert named.check(LONG).nbytes > 0
    reward = named.load(CPU, LONG)
    assert isinstance(reward, GroupedReward)
    return reward


def test_every_task_of_libero_long_is_in_the_group_of_the_published_rule() -> None:
    assert list(resnet.LONG_GROUPS) == [keyword_group(task) for task in LONG]


@pytest.mark.parametrize("below", ["", "reward_model"])
def test_a_frame_of_libero_long_is_judged_by_the_network_of_its_task(tmp_path: Path, below: str) -> None:
    tensors = write_groups(tmp_path / below)
    reward, frames = long_reward(tmp_path), some_frames(10)
    for model in reward.models.values():
        model.rounded = False
    scores = reward.score(frames, LONG)
    expected = [
        [slow_probability(tensors[keyword_group(task)], image, number) for image in row]
        for number, (task, row) in enumerate(zip(LONG, images_of(frames), strict=True))
    ]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=0)
    order = [8, 1, 1, 5]  # any order, a task twice, groups that nobody needs
    mixed = reward.score(frames[order], [LONG[i] for i in order])
    torch.testing.assert_close(mixed, scores[order], atol=1e-6, rtol=0)
    assert reward.modules().keys() == set(resnet.GROUPS)


def test_scores_of_libero_long_are_rounded(tmp_path: Path) -> None:
    write_groups(tmp_path)
    scores = long_reward(tmp_path).score(some_frames(10), LONG)
    assert set(scores.unique().tolist()) == {0.0, 1.0}


def test_of_several_checkpoints_of_a_group_the_largest_number_counts(tmp_path: Path) -> None:
    write_groups(tmp_path)
    later = random_tensors(99, embeds=True)
    write_pth(tmp_path / "group_5" / "101.pth", later)
    reward, frames = long_reward(tmp_path), some_frames(1)
    reward.models["group_5"].rounded = False
    found = reward.score(frames, [LONG[0]])[0, 0]
    assert float(found) == pytest.approx(slow_probability(later, images_of(frames)[0, 0], 0), abs=1e-5)
    write_pth(tmp_path / "group_5" / "best.pth", later)
    with pytest.raises(CheckpointError, match=r"group_5 should hold one reward model.*101\.pth, 42\.pth"):
        long_reward(tmp_path)


def test_a_group_that_is_missing_or_another_network_is_refused(tmp_path: Path) -> None:
    write_groups(tmp_path)
    (tmp_path / "group_3" / "42.pth").unlink()
    with pytest.raises(CheckpointError, match=r"group_3 should hold one reward model.*it holds none"):
        long_reward(tmp_path)
    write_pth(tmp_path / "group_3" / "42.pth", random_tensors(0))
    with pytest.raises(CheckpointError, match=r"group_3/42\.pth lacks task_embedding\.weight"):
        long_reward(tmp_path)


def test_tasks_of_another_suite_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path)
    with pytest.raises(CheckpointError, match=r"of libero_10, and the start states are of libero_spatial"):
        ResNetReward.check(tmp_path, SPATIAL)
    with pytest.raises(ConfigError, match=r"does not know the task 'fly'.*moka pots"):
        long_reward(tmp_path).score(some_frames(1), ["fly"])
    with pytest.raises(ConfigError, match="--reward-settings has steps"):
        ResNetReward.check(tmp_path, LONG, steps=1)


def test_groups_in_two_places_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path / "old")
    write_groups(tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"twice, in .*new and in .*old"):
        named_reward("", tmp_path).check(LONG)


def rlinf(scores_NC: np.ndarray, coefficient: float = 5.0) -> tuple[int | None, float]:
    """The decision at which RLinf ends an episode, and the return until then, with relative rewards."""
    before, total = 0.0, 0.0
    for number, decision in enumerate(scores_NC):
        for score in decision:
            total += coefficient * score - before
            before = coefficient * score
        if max(decision) >= 0.9:
            return number, total
    return None, total


def test_a_success_that_relapses_within_a_decision_ends_the_episode_as_in_rlinf_and_is_paid_here() -> None:
    relapse = np.array([[0, 0, 0, 0], [0, 1, 0, 0]], np.float32)
    assert rlinf(relapse) == (1, 0.0), "RLinf ends it without a reward"
    assert deciding_step(relapse, 0.9, 1) == (1, 1), "the step of the success gets the reward"
    assert deciding_step(relapse, 0.9, "last") is None


def test_episodes_end_at_rlinfs_decision_and_last_pays_what_rlinf_pays() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        scores = (rng.random((3, 4)) < 0.12).astype(np.float32)
        end, total = rlinf(scores)
        found, last = deciding_step(scores, 0.9, 1), deciding_step(scores, 0.9, "last")
        assert (None if found is None else found[0]) == end
        if end is not None and total == 5.0:
            assert last == (end, 3), "paid there, paid here"
        elif end is not None:
            assert total == 0.0
            assert last is None or last[0] > end, "not paid by that decision"
        seen.add((end is None, total))
    assert seen == {(True, 0.0), (False, 0.0), (False, 5.0)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_scoring_waits_for_nothing(tmp_path: Path) -> None:
    write_groups(tmp_path / "long")
    (tmp_path / "one").mkdir()
    write_pth(tmp_path / "one" / "evac.pth", random_tensors(4, normed=True))
    device = torch.device("cuda")
    long = ResNetReward.load(tmp_path / "long", device, LONG)
    one = ResNetReward.load(tmp_path / "one", device, SPATIAL)
    frames, tasks = some_frames(4), [LONG[i] for i in (8, 1, 1, 5)]
    there = frames.to(device)
    expected = [long.score(there, tasks).cpu(), one.score(there, tasks).cpu()]  # libraries choose kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [long.score(there, tasks), one.score(there, tasks)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for wanted, scores in zip(expected, found, strict=True):
        torch.testing.assert_close(scores.cpu(), wanted, atol=1e-5, rtol=0)
