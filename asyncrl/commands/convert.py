"""`asyncrl convert SOURCE OUT`: choose conventions, merge adapters, export for other stacks with a card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import torch
import tyro

from asyncrl import registry
from asyncrl.config.bounds import Bounded
from asyncrl.config.help import ShortHelp
from asyncrl.errors import ConfigError
from asyncrl.launch.named_models import run_of
from asyncrl.policies.lora import export_adapter
from asyncrl.policies.openvla.files import PublishedOptions, open_folder
from asyncrl.storage import checkpoint
from asyncrl.storage.assets import policy_folder
from asyncrl.storage.atomic import write_text

if TYPE_CHECKING:
    from asyncrl.policies.openvla.config import OpenVLAOFTConfig
    from asyncrl.policies.openvla.export import ConversionReport

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Bounded):
    """Write a policy in the published OpenVLA(-OFT) layout: conventions chosen, adapters merged, complete.

    Weights are streamed: a few tensors are in memory, never the policy.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Published folder, checkpoint, run folder (its newest one), shipped name, policy or world folder of
    asyncrl 0.1, or an adapter folder of asyncrl, which is written for peft and the published model."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write; new or empty."""
    policy_settings: tuple[str, ...] = ()
    """Settings that a published SOURCE lacks: key=value, as for `asyncrl train`."""
    adapter: str = ""
    """peft adapter folder to merge; with the layer names of the published model or of
    asyncrl. Not one inside SOURCE: that is the record of a merge."""
    original: str = ""
    """Published folder that training began with: provides the tensors that the policy does not use, and the
    files that only other stacks read."""
    dtype: Literal["source", "bfloat16", "float32"] = "source"
    """Type of the numbers written."""
    base_model: str = ""
    """Hub identifier of the model that training began with, for the card; empty: none is stated."""
    license: str = ""
    """Licence of the policy for the card, as hubs write it (mit, apache-2.0); empty: none is stated."""


HELP: Final = ShortHelp(
    command="asyncrl convert",
    usage="SOURCE OUT [--flags]",
    groups={"What is written": "original dtype", "What a published folder lacks": "policy_settings adapter"},
    examples=["asyncrl convert runs/mine EXPORT --original PUBLISHED"],
)


def main(arguments: list[str]) -> int:
    """Convert and print a report."""
    config = HELP.parse(ConvertConfig, arguments, shown=ConvertConfig(source="", out=Path()))
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"{config.out} exists and is not an empty folder. Name another folder to write to.")
    source = Path(config.source)
    if (source / "world.json").is_file():
        from asyncrl.worlds.files import convert_world

        convert_world(source, config.out)
        print(f"wrote the world of {source} in the layout of this version to {config.out}")
        return 0
    if (source / "adapter_config.json").is_file() and not (source / "config.json").is_file():
        _convert_adapter(config, source)
    else:
        _convert(config)
    return 0


def _convert(config: ConvertConfig) -> None:
    from asyncrl.policies.openvla.export import convert, loading

    began = time.monotonic()
    folder = policy_folder(config.source)
    if (folder / "state.json").is_file():  # A checkpoint of a run: a damaged one would be passed on.
        checkpoint.verify(folder, policy_only=True)
    training = _training(folder)
    done = convert(
        folder,
        config.out,
        choices=PublishedOptions.of(registry.keywords("--policy-settings", config.policy_settings)),
        adapter=Path(config.adapter) if config.adapter else None,
        original=Path(config.original) if config.original else None,
        dtype=None if config.dtype == "source" else getattr(torch, config.dtype),
    )
    _write_card(config, training, done.config, loading=loading(config.out, done))
    print(report(config, done, time.monotonic() - began))


def _convert_adapter(config: ConvertConfig, source: Path) -> None:
    from asyncrl.policies.openvla.export import ADAPTER_LOADING

    checkpoint = source.resolve().parent
    policy = open_folder(policy_folder(config.original or str(checkpoint)))
    training = _training(checkpoint)
    layers = export_adapter(source, config.out, policy.rows)
    _write_card(config, training, policy.config, loading=ADAPTER_LOADING, library="peft")
    print(f"wrote     {config.out}: adapters of {layers} layers under published names")


def _training(folder: Path) -> dict[str, Any]:
    from asyncrl.policies.openvla.export import about_run

    run = run_of(str(folder)) if (folder / "state.json").is_file() else None
    return {} if run is None else {"run": about_run(folder)}


def _write_card(
    config: ConvertConfig, training: dict[str, Any], policy: OpenVLAOFTConfig, **loading: Any
) -> None:
    from asyncrl.policies.openvla.export import card

    merged = f", with the adapter `{Path(config.adapter).name}` merged" if config.adapter else ""
    text = card(
        policy,
        title=config.out.resolve().name,
        source=f"`{Path(config.source).resolve().name}`{merged}",
        hub={"base_model": config.base_model, "license": config.license},
        **training,
        **loading,
    )
    write_text(config.out / "README.md", text)


def report(config: ConvertConfig, done: ConversionReport, seconds: float) -> str:
    """Format the tensors read, merged, kept and written, as lines."""
    policy = done.config
    stop = "with" if policy.stop_token else "no"
    optional = {
        f"merged    {done.merged} adapters of {config.adapter}": done.merged,
        f"kept      {done.kept} tensors that the policy does not use": done.kept,
        f"zeros     {done.zeros} tensors that the policy does not use (--original has them)": done.zeros,
        f"left out  {len(done.left_out)} tensors: {', '.join(done.left_out)}": done.left_out,
        f"carried   {', '.join(done.carried)}": done.carried,
    }
    lines = [
        f"read      {config.source}: {done.used} tensors that the policy uses",
        *(line for line, wanted in optional.items() if wanted),
        f"policy    {policy.chunk} steps of {policy.action_dim} numbers, {stop} stop token, gripper "
        f"{policy.gripper}, critic {policy.value_head}, computes in {policy.dtype}",
        f"actions   scaled with the statistics {policy.norm_key or 'none: they stay in [-1, 1]'}",
        f"wrote     {config.out}: {done.nbytes / GB:.2f} GB in {seconds:.0f} s",
    ]
    if done.missing:
        lines.append(
            f"missing   {', '.join(done.missing)}: other stacks do not open the folder without. --original "
            "FOLDER carries them over from the published folder that training began with"
        )
    return "\n".join(lines)
