"""`asyncrl convert SOURCE OUT`: turn policies from and into the Hugging Face layout of OpenVLA."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from asyncrl.config.bounds import AtLeast, Bounded, Positive
from asyncrl.errors import ConfigError
from asyncrl.storage.asset_paths import policy_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.policies.checkpoints.conventions import PublishedOptions
    from asyncrl.policies.checkpoints.convert import ConversionReport

ADAPTER = "adapter_config.json"
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Bounded):
    """Turn a published OpenVLA(-OFT) checkpoint into an asyncrl policy, or a policy into that layout.

    Weights are streamed: a few tensors are in memory, never the policy.
    """

    source: Annotated[str, tyro.conf.Positional]
    """Published folder, asyncrl policy folder, checkpoint, run folder (its newest one), shipped name, or an
    adapter folder of asyncrl with --to openvla."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; new or empty."""
    to: Literal["asyncrl", "openvla"] = "asyncrl"
    """Layout to write. openvla: what other stacks load."""
    unnorm_key: str = ""
    """Action statistics of the published folder, for example libero_spatial; "_no_noops" is tried as well.
    Empty: the only ones there are."""
    convention: Literal["folder", "rlinf", "oft"] = "folder"
    """How the published policy was trained. rlinf: RLinf's checkpoints (no stop token, bicubic resize). oft:
    the official ones and SimpleVLA-RL's (stop token, Lanczos resize, centre crop). folder: what an export of
    asyncrl says about itself, else rlinf."""
    gripper: Literal["folder", "none", "libero", "maniskill"] = "folder"
    """Sign convention of the gripper action. folder: as exported, else libero for statistics libero*,
    maniskill for bridge*, else none."""
    decoding: Literal["folder", "parallel", "autoregressive"] = "folder"
    """parallel: OpenVLA-OFT. autoregressive: OpenVLA. folder: as exported, else parallel."""
    images: Annotated[int, AtLeast(0, "it counts pictures.", "Use 0.", highest=64)] = 0
    """Pictures per decision. 0: as exported, else 1."""
    chunk: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1024)] = 0
    """Steps per decision. 0: as exported, else 8 (autoregressive: 1)."""
    proprio: bool = True
    """Read the proprioception projector (proprio_projector--*.pt) if the published folder has one."""
    critic: bool = True
    """Read the value head (value_head.mlp.*) if the published folder has one."""
    adapter: str = ""
    """peft adapter folder to merge into the weights on the way; its layers are named as in SOURCE. Not one
    that lies inside SOURCE: there it is the record of what was merged."""
    original: str = ""
    """Published folder that SOURCE was once converted from, or that conversion: with --to openvla it gives
    back the tensors that the policy does not use, and the files that only other stacks read."""
    dtype: Literal["source", "bfloat16", "float32"] = "source"
    """Type of the numbers written."""
    shard_gigabytes: Annotated[float, Positive("a file holds something.", "Use 5.", highest=1_000_000)] = 5.0
    """Largest weight file."""


def main(arguments: list[str]) -> int:
    """Convert and say what was done."""
    config = tyro.cli(ConvertConfig, args=arguments, prog="asyncrl convert")
    _check(config)
    began = time.monotonic()
    source = Path(config.source)
    if (source / ADAPTER).is_file() and not (source / "config.json").is_file():
        return _convert_adapter(config, source)
    from asyncrl.policies.checkpoints.convert import convert
    from asyncrl.storage import checkpoint

    folder = policy_folder(config.source)
    if (folder / "state.json").is_file():  # A checkpoint of a run: a damaged one would be passed on.
        for note in checkpoint.verify(folder, policy_only=True).notes:
            print(note)
    done = convert(
        folder,
        config.out,
        to=config.to,
        choices=_choices(config),
        adapter=Path(config.adapter) if config.adapter else None,
        original=Path(config.original) if config.original else None,
        dtype=_dtype(config.dtype),
        shard_bytes=int(config.shard_gigabytes * GB),
    )
    print(report(config, done, time.monotonic() - began))
    return 0


def report(config: ConvertConfig, done: ConversionReport, seconds: float) -> str:
    """What was read, merged, kept and written, as lines."""
    policy = done.config
    kind = "published OpenVLA layout" if done.layout == "openvla" else "asyncrl policy"
    stop = "with" if policy.stop_token else "no"
    lines = [f"read      {config.source}: {kind}, {done.used} tensors that the policy uses"]
    if done.merged:
        lines.append(f"merged    {done.merged} adapters of {config.adapter}")
    if done.kept:
        lines.append(f"kept      {len(done.kept)} tensors that the policy does not use, to give them back")
    if done.zeros:
        lines.append(
            f"zeros     {done.zeros} tensors that the policy does not use (--original gives them back)"
        )
    if done.left_out:
        lines.append(f"left out  {len(done.left_out)} tensors: {', '.join(done.left_out)}")
    lines += [
        f"policy    {policy.chunk} steps of {policy.action_dim} numbers, {stop} stop token, gripper "
        f"{policy.gripper}, critic {policy.value_head}, computes in {policy.dtype}",
        f"actions   scaled with the statistics {policy.norm_key or 'none: they stay in [-1, 1]'}",
        f"wrote     {config.out}: {done.nbytes / GB:.2f} GB in {seconds:.0f} s",
    ]
    return "\n".join(lines)


def _check(config: ConvertConfig) -> None:
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"{config.out} exists and is not an empty folder. Name another folder to write to.")


def _choices(config: ConvertConfig) -> PublishedOptions:
    from asyncrl.policies.checkpoints.conventions import PublishedOptions

    return PublishedOptions(
        norm_key=config.unnorm_key,
        convention=config.convention,
        gripper=config.gripper,
        decoding=config.decoding,
        images=config.images,
        chunk=config.chunk,
        proprio=config.proprio,
        critic=config.critic,
    )


def _dtype(name: str) -> torch.dtype | None:
    import torch

    return None if name == "source" else getattr(torch, name)


def _convert_adapter(config: ConvertConfig, source: Path) -> int:
    from asyncrl.policies.checkpoints.convert import convert_adapter

    if config.to != "openvla":
        raise ConfigError(
            f"{source} is an adapter folder. Give the policy it belongs to as SOURCE and this folder with "
            "--adapter to merge it; or write it for peft and the published model with --to openvla."
        )
    # A checkpoint of a run has its adapters in a folder of its own.
    layers = convert_adapter(
        source, config.out, policy_folder(config.original or str(source.resolve().parent))
    )
    print(f"wrote     {config.out}: adapters of {layers} layers under published names")
    return 0
