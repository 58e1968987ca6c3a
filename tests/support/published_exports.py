"""Published files written from our models, and published policies read as a test configures them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from asyncrl.errors import CheckpointError
from asyncrl.policies.checkpoints.folder import Dtype, check_published, fill_policy
from asyncrl.policies.checkpoints.published_names import native_specs, tensor_map, to_native
from asyncrl.policies.checkpoints.published_policy import (
    CRITIC,
    PROPRIO,
    PassThroughFiles,
    PublishedFolder,
    write_published,
)
from asyncrl.policies.lora import merged_tensors
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.rewards.files import PUBLISHED
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.rewards.model import ResNetReward
from asyncrl.storage.tensor_reader import Spec
from asyncrl.storage.tensor_writer import SHARD_BYTES, write_pth, write_tensors
from asyncrl.worlds.wan.published_world import HEAD_DIM, IMAGE_SIZE, published_transformer, published_vae
from asyncrl.worlds.wan.recognition import WAN_TRANSFORMER, WAN_VAE
from asyncrl.worlds.wan.vae import VaeConfig
from asyncrl.worlds.wan.world import WanWorld


def load_openvla(
    folder: str | Path,
    config: OpenVLAOFTConfig,
    *,
    norm_key: str,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
) -> OpenVLAOFTPolicy:
    """Read a published OpenVLA or OpenVLA-OFT checkpoint.

    Args:
        folder: Shards with `model.safetensors.index.json`, or one `model.safetensors`; `config.json`,
            `tokenizer.json`, and `dataset_statistics.json` if there is one.
        config: Sizes and conventions, usually ``OpenVLAOFTConfig.full(gripper="libero")``; its statistics are
            replaced by those of the folder.
        norm_key: Statistics to scale actions with; `norm_key` + "_no_noops" is tried as well.
        device: Where the weights go.
        dtype: What they become.

    A critic that `config` asks for and the folder does not hold begins with random weights.

    Raises:
        CheckpointError: a file or tensor is missing, unknown, truncated or misshapen, or no `norm_key`.
    """
    opened = PublishedFolder.open(Path(folder))
    key = opened.statistics_key(norm_key)
    config = dataclasses.replace(config, norm_key=key, norm_stats=opened.action_stats())
    tokenizer = PromptTokenizer.from_file(opened.folder / "tokenizer.json", pad_id=config.token_count)
    with torch.device("meta"):
        policy = new_policy(config, tokenizer)
    rows, files = tensor_map(policy), opened.files
    side = set() if any(row[1].startswith(PROPRIO) for row in rows) else set(files.extra)
    wanted = check_published(files, policy, leave_out=side)
    stream = to_native(rows, files.stream(wanted, what="load policy"))
    return fill_policy(policy, stream, device, dtype, critic=any(n.startswith(CRITIC) for n in files.names()))


def export_openvla(
    policy: OpenVLAOFTPolicy,
    folder: str | Path,
    *,
    pass_through: PassThroughFiles | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the published layout, all its tensors included, in `config.dtype`; adapters are merged.

    Args:
        policy: Any device.
        folder: Created when missing.
        pass_through: What the policy came from (`pass_through_of` reads it); without, the
            tensors that never matter are zeros, and the files that only other stacks read are missing.
        shard_bytes: Size above which a further weight file is begun.
    """
    write_published(
        Path(folder),
        policy.config,
        policy.tokenizer,
        tensor_map(policy),
        {name: Spec(policy.config.torch_dtype, spec.shape) for name, spec in native_specs(policy).items()},
        merged_tensors(policy),
        pass_through=pass_through or PassThroughFiles(),
        shard_bytes=shard_bytes,
    )


def export_reward(folder: Path, model: ResNetReward) -> None:
    """Write ``resnet_rm.pth``, or ``taskemb_resnet_rm.pth`` for a model of a LIBERO suite.

    Raises:
        CheckpointError: The model was fitted on other tasks, or on images of another size.
    """
    config = model.config
    if (config.tasks and config.tasks not in SUITES.values()) or config.image_size != 256:
        raise CheckpointError(
            f"a reward model of {len(config.tasks)} tasks at {config.image_size} pixels cannot be written "
            "in the published layout, which always means a LIBERO suite and 256 pixels. Use save_reward."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_pth(folder / PUBLISHED[bool(config.tasks)], model.network.state_dict())


def export_world(folder: Path, world: WanWorld) -> None:
    """Write `world` as RLinf's tools read it: bfloat16 ``model-00001.safetensors``, ``Wan2.2_VAE.pth``.

    Raises:
        CheckpointError: The published layout cannot say what this world is: another head size, other latents.
    """
    size, vae = world.transformer.size, world.vae.size
    full = VaeConfig.full()
    same = (vae.latents_mean, vae.latents_std) == (full.latents_mean, full.latents_std)
    if size.head_dim != HEAD_DIM or not same or world.image_size != IMAGE_SIZE:
        raise CheckpointError(
            f"a world with heads of {size.head_dim} channels, {vae.z_dim} latent channels and "
            f"{world.image_size} pixels cannot be written in the published layout, which always means "
            f"{HEAD_DIM}, {full.z_dim} with their statistics, and {IMAGE_SIZE}. Use save_world."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WAN_TRANSFORMER, published_transformer(world))
    write_pth(folder / WAN_VAE, published_vae(world))
