"""Reward models: published tensors, slow formulas, tasks and files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork, save_reward

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


def some_frames(batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 8, 64, 64, 3), generator=generator, dtype=torch.uint8)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fly'.*'open the drawer', 'close the drawer', 'push the plate'"):
        model().score(some_frames(1), ["fly"])


def test_a_model_without_tasks_scores_any_task() -> None:
    frames = some_frames(1)
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
    assert torch.equal(loaded.score(some_frames(1), TASKS[:1]), reward.score(some_frames(1), TASKS[:1]))


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
