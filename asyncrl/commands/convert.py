"""`asyncrl convert SOURCE OUT`: turn policies from and into the Hugging Face layout of OpenVLA."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import tyro

from asyncrl.config.bounds import AtLeast, Bounded, Positive
from asyncrl.config.often_used import CONVERT
from asyncrl.config.short_help import answer_help
from asyncrl.errors import ConfigError
from asyncrl.storage.asset_paths import policy_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.launch.model_card import Layout
    from asyncrl.policies.checkpoints.conventions import PublishedOptions
    from asyncrl.policies.checkpoints.convert import ConversionReport
    from asyncrl.policies.openvla.config import OpenVLAOFTConfig
    from asyncrl.storage.hub import Hub

ADAPTER = "adapter_config.json"
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Bounded):
    """Turn a published OpenVLA(-OFT) checkpoint into an asyncrl policy, or a policy into that layout.

    Weights are streamed: a few tensors are in memory, never the policy.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Published folder, asyncrl policy folder, checkpoint, run folder (its newest one), shipped name, or an
    adapter folder of asyncrl with --to openvla."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
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
    base_model: str = ""
    """Hub identifier of the model that training began with, for the card; empty: it is not said."""
    license: str = ""
    """Licence of the policy for the card, as hubs write it (mit, apache-2.0); empty: none is stated."""
    push: str = ""
    """Repository OWNER/NAME of a model hub to send OUT to, once it is written and checked. Without it nothing
    is sent."""
    private: bool = False
    """Make the repository of --push private, if it is new."""


ARGUMENTS: Final = ConvertConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str], hub: Hub | None = None) -> int:
    """Convert and say what was done; `hub` stands for the real one of --push."""
    arguments = answer_help(arguments, lambda: CONVERT.text(ConvertConfig(source="", out=Path())))
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl convert")
    _check(config)
    began = time.monotonic()
    source = Path(config.source)
    if (source / ADAPTER).is_file() and not (source / "config.json").is_file():
        return _convert_adapter(config, source, hub)
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
    _write_card(config, folder, done.config, config.to, **_of_others(config, done))
    print(report(config, done, time.monotonic() - began))
    if config.push:
        from asyncrl.policies.checkpoints.conventions import PublishedOptions
        from asyncrl.policies.checkpoints.convert import open_source

        open_source(config.out, PublishedOptions())
    _push(config, hub)
    return 0


def _of_others(config: ConvertConfig, done: ConversionReport) -> dict[str, str]:
    """What the card says of other stacks."""
    from asyncrl.policies.checkpoints.other_stacks import by_reader, model_class

    if config.to != "openvla":
        return {}
    told = {"missing": by_reader(list(done.missing)), "unpublished": done.unpublished}
    return told | {"model_class": model_class(config.out)}


def _write_card(
    config: ConvertConfig, folder: Path, policy: OpenVLAOFTConfig, layout: Layout, **told: str
) -> None:
    """Write the model card into the folder."""
    from asyncrl.launch.model_card import CardFacts, write_card
    from asyncrl.launch.model_facts import trained_policy

    source = Path(config.source)
    facts = CardFacts(
        title=(config.push or config.out.resolve().name).split("/")[-1],
        layout=layout,
        source=source.resolve().name,
        policy=policy,
        trained=trained_policy(folder),
        merged=Path(config.adapter).name,
        repo=config.push,
        base_model=config.base_model,
        license=config.license,
        **told,
    )
    write_card(config.out, facts)


def _push(config: ConvertConfig, hub: Hub | None) -> None:
    if config.push:
        from asyncrl.storage.hub import push

        push(config.out, config.push, private=config.private, tell=print, hub=hub)


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
    if done.carried:
        lines.append(f"carried   {', '.join(done.carried)}")
    lines += [
        f"policy    {policy.chunk} steps of {policy.action_dim} numbers, {stop} stop token, gripper "
        f"{policy.gripper}, critic {policy.value_head}, computes in {policy.dtype}",
        f"actions   scaled with the statistics {policy.norm_key or 'none: they stay in [-1, 1]'}",
        f"wrote     {config.out}: {done.nbytes / GB:.2f} GB in {seconds:.0f} s",
    ]
    return "\n".join([*lines, *missing(done)])


def missing(done: ConversionReport) -> list[str]:
    """What other stacks do not find in the folder written, and how to give it, as lines."""
    from asyncrl.policies.checkpoints.other_stacks import by_reader

    if done.unpublished:
        return [f"missing   other stacks cannot build {done.unpublished}. asyncrl opens the folder"]
    if not done.missing:
        return []
    return [
        f"missing   {by_reader(list(done.missing))}",
        "          without them these of other stacks do not open the folder (from_pretrained with "
        "trust_remote_code=True). The published folder that training began with has them: --original FOLDER "
        "carries them over, or copy them (of config.json its auto_map)",
    ]


def _check(config: ConvertConfig) -> None:
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"{config.out} exists and is not an empty folder. Name another folder to write to.")
    if config.private and not config.push:
        raise ConfigError("--private is for the repository of --push, which is not set. Leave it out.")
    if config.push:
        from asyncrl.storage.hub import check_repo

        check_repo(config.push)


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


def _convert_adapter(config: ConvertConfig, source: Path, hub: Hub | None) -> int:
    from asyncrl.policies.checkpoints.convert import convert_adapter
    from asyncrl.policies.checkpoints.folder import read_config

    if config.to != "openvla":
        raise ConfigError(
            f"{source} is an adapter folder. Give the policy it belongs to as SOURCE and this folder with "
            "--adapter to merge it; or write it for peft and the published model with --to openvla."
        )
    # A checkpoint of a run has its adapters in a folder of its own.
    folder = policy_folder(config.original or str(source.resolve().parent))
    layers = convert_adapter(source, config.out, folder)
    _write_card(config, source.resolve().parent, read_config(folder), "adapter")
    print(f"wrote     {config.out}: adapters of {layers} layers under published names")
    _push(config, hub)
    return 0
