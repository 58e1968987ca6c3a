"""Published files written from our models, and published policies read as a test configures them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.errors import CheckpointError
from asyncrl.policies.lora import is_adapter, merged_tensors
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import SECTION, Original, PublishedOptions, write_policy
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.policies.openvla.policy import Dtype, OpenVLAOFTPolicy, load_policy
from asyncrl.rewards.files import PUBLISHED
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.rewards.resnet import ResNetReward
from asyncrl.storage.tensor_files import SHARD_BYTES, Spec, write_tensors
from asyncrl.worlds.wan.files import HEAD_DIM, IMAGE_SIZE, WAN_TRANSFORMER, WAN_VAE, vae_name
from asyncrl.worlds.wan.transformer import transformer_name
from asyncrl.worlds.wan.vae import VaeConfig
from asyncrl.worlds.wan.world import WanWorld
from support import ROOT
from support.pth import write_pth


def section_of(config: OpenVLAOFTConfig) -> dict[str, object]:
    """Return sizes and conventions as asyncrl saves them, without those of the statistics."""
    return {key: value for key, value in config.to_json().items() if key not in ("norm_stats", "norm_key")}


def load_openvla(
    folder: str | Path,
    config: OpenVLAOFTConfig,
    *,
    norm_key: str,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
) -> OpenVLAOFTPolicy:
    """Read a published checkpoint of the sizes and conventions in `config`: they go into its config.json."""
    file = Path(folder) / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {SECTION: section_of(config)}))
    return load_policy(
        folder,
        device=device,
        dtype=dtype,
        options=PublishedOptions(norm_key=norm_key, proprio=bool(config.proprio_dim)),
    )


def export_openvla(
    policy: OpenVLAOFTPolicy,
    folder: str | Path,
    *,
    original: Original | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the published layout, all its tensors included, in `config.dtype`; adapters are merged."""
    dtype = policy.config.torch_dtype
    own = {stable_name(name): p for name, p in policy.named_parameters() if not is_adapter(name)}
    write_policy(
        Path(folder),
        policy.config,
        policy.tokenizer,
        {name: Spec(dtype, tuple(p.shape)) for name, p in own.items()},
        merged_tensors(policy),
        original=original,
        whole=True,
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
    transformer, autoencoder = world.transformer.state_dict(), world.vae.state_dict()
    bfloat16 = {TRANSFORMER_NAMES[name]: tensor.to(torch.bfloat16) for name, tensor in transformer.items()}
    write_tensors(folder / WAN_TRANSFORMER, bfloat16)
    write_pth(folder / WAN_VAE, {VAE_NAMES[name]: tensor.float() for name, tensor in autoencoder.items()})


def _published_names(listed: str, rename: Callable[[str], str]) -> dict[str, str]:
    """Our name -> published name of all tensors of a list in tests/data."""
    rows = (ROOT / "tests" / "data" / f"{listed}.txt").read_text().splitlines()
    return {rename(name): name for name in (row.partition(" ")[0] for row in rows)}


TRANSFORMER_NAMES = _published_names("wan_action_transformer", transformer_name)
VAE_NAMES = _published_names("wan_vae", vae_name)
