"""Published files written from our models, and published policies read as a test configures them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.policies.lora import is_adapter, merged_tensors
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import SECTION, Original, PublishedOptions, write_policy
from asyncrl.policies.openvla.networks import stable_name
from asyncrl.policies.openvla.policy import Dtype, OpenVLAOFTPolicy, load_policy
from asyncrl.rewards.resnet import PUBLISHED, ResNetReward
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
    """Write ``resnet_rm.pth``, or ``taskemb_resnet_rm.pth`` for a model of a LIBERO suite."""
    config = model.config
    assert config.image_size == 256
    folder.mkdir(parents=True, exist_ok=True)
    write_pth(folder / PUBLISHED[bool(config.tasks)], model.network.state_dict())


def export_world(folder: Path, world: WanWorld) -> None:
    """Write `world` as RLinf's tools read it: bfloat16 ``model-00001.safetensors``, ``Wan2.2_VAE.pth``."""
    vae, full = world.vae.size, VaeConfig.full()
    assert (vae.latents_mean, vae.latents_std) == (full.latents_mean, full.latents_std)
    assert (world.transformer.size.head_dim, world.image_size) == (HEAD_DIM, IMAGE_SIZE)
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
