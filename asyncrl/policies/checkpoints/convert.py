"""Convert policy folders tensor by tensor: published OpenVLA layout <-> our own.

No policy is built and at most a few tensors are in memory. What a published folder holds and our policy does
not use is kept in ours, so that it can be given back:

    unused.safetensors        published tensors that never matter (see `published_names.dropped_tensors`)
    dataset_statistics.json   as it was, the ranges of proprioception included
    published/                config.json and the small files that only other stacks read
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.policies.checkpoints.adapters import export_adapter, merge_adapter
from asyncrl.policies.checkpoints.conventions import PublishedOptions, config_of
from asyncrl.policies.checkpoints.folder import build_on_meta, check_published, read_config, write_policy
from asyncrl.policies.checkpoints.other_stacks import (
    MissingFile,
    missing_files,
    unpublished_size,
    write_tokenizer_config,
)
from asyncrl.policies.checkpoints.published_names import (
    TensorMapping,
    dropped_tensors,
    native_specs,
    published_specs,
    tensor_map,
    to_native,
)
from asyncrl.policies.checkpoints.published_policy import (
    CRITIC,
    MODEL_TYPE,
    PROPRIO,
    STATISTICS,
    PassThroughFiles,
    PublishedFolder,
    copy_foreign_files,
    read_statistics,
    statistics_to_write,
    write_published,
)
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_reader import Spec, TensorFiles
from asyncrl.storage.tensor_writer import SHARD_BYTES, write_file

UNUSED: Final = "unused.safetensors"
CARRIED: Final = "published"
Layout = Literal["asyncrl", "openvla"]


@dataclass(kw_only=True)
class PolicySource:
    """A policy in a folder of either layout; of its weights only the headers were read."""

    folder: Path
    layout: Layout
    config: OpenVLAOFTConfig
    tokenizer: PromptTokenizer
    files: TensorFiles
    pass_through: PassThroughFiles
    rows: Sequence[TensorMapping]
    specs: Mapping[str, Spec]
    """Of the native tensors, in the order in which `natives` gives them."""
    natives: Callable[[], Iterator[tuple[str, Tensor]]]
    used: int
    """Tensors of the folder that the policy uses."""
    left_out: Sequence[str] = ()
    """Tensors that were found and are not kept."""


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion did."""

    layout: Layout
    """Of the source."""
    config: OpenVLAOFTConfig
    """Of the policy written."""
    used: int
    """Tensors read that the policy uses."""
    kept: Sequence[str] = field(default_factory=tuple)
    """Tensors the policy does not use, kept so that they can be given back."""
    zeros: int = 0
    """Published tensors the policy does not use, written as zeros: nothing is known about them."""
    left_out: Sequence[str] = field(default_factory=tuple)
    """Tensors found and not kept."""
    merged: int = 0
    """Layers with an adapter merged."""
    carried: Sequence[str] = field(default_factory=tuple)
    """Files written that only other stacks read."""
    missing: Sequence[MissingFile] = field(default_factory=tuple)
    """What other stacks need to open the folder and is not in it."""
    unpublished: str = ""
    """Why no code of other stacks builds a policy of this size; empty: it may."""
    nbytes: int = 0
    """Size of the weights written."""


def convert(
    source: Path,
    folder: Path,
    *,
    to: Layout,
    choices: PublishedOptions,
    adapter: Path | None = None,
    original: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Write the policy of one folder into another.

    Args:
        source: Published folder, or one of ours.
        folder: Created when missing; a policy in it is replaced.
        to: Layout to write.
        choices: For a published source.
        adapter: peft folder with the layer names of the source, merged on the way. Not one inside `source`.
        original: Folder that the source was once converted from (or our conversion of it): gives back what
            the policy does not use.
        dtype: Of all numbers written, and what the policy computes in; None: those of the source.
        shard_bytes: Size above which a further weight file is begun.

    Raises:
        CheckpointError: something does not fit; before anything is written.
    """
    if folder.resolve() == source.resolve():
        raise CheckpointError(f"{folder} is the source itself. Choose another folder to write to.")
    if adapter is not None:
        _refuse_inside(source, adapter)
    opened = open_source(source, choices)
    merged = merge_adapter(opened.files, adapter) if adapter else 0
    specs, config = _retyped(opened, dtype)
    pass_through = pass_through_of(original) if original else opened.pass_through
    target = _Target(folder=folder, config=config, specs=specs, shard_bytes=shard_bytes)
    if to == "openvla":
        return _published(target, opened, pass_through, merged)
    _write_keepsakes(folder, config, pass_through)
    write_policy(folder, config, opened.tokenizer, specs, opened.natives(), shard_bytes=shard_bytes)
    return ConversionReport(
        layout=opened.layout,
        config=config,
        used=opened.used,
        kept=_kept(config, pass_through),
        left_out=opened.left_out,
        merged=merged,
        nbytes=sum(spec.nbytes for spec in specs.values()),
    )


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What is written, and where."""

    folder: Path
    config: OpenVLAOFTConfig
    specs: Mapping[str, Spec]
    shard_bytes: int


def _published(
    target: _Target, opened: PolicySource, pass_through: PassThroughFiles, merged: int
) -> ConversionReport:
    config = target.config
    carried = write_published(
        target.folder,
        config,
        opened.tokenizer,
        opened.rows,
        target.specs,
        opened.natives(),
        pass_through=pass_through,
        shard_bytes=target.shard_bytes,
    )
    write_tokenizer_config(target.folder, opened.tokenizer)
    kept = _kept(config, pass_through)
    return ConversionReport(
        layout=opened.layout,
        config=config,
        used=opened.used,
        kept=kept,
        zeros=len(dropped_tensors(config)) - len(kept),
        left_out=opened.left_out,
        merged=merged,
        carried=carried,
        missing=missing_files(target.folder),
        unpublished="" if pass_through.fields.get("auto_map") else unpublished_size(config),
        nbytes=sum(spec.nbytes for spec in published_specs(opened.rows, target.specs).values()),
    )


def _refuse_inside(source: Path, adapter: Path) -> None:
    """Refuse to merge an adapter a second time: beside merged weights its folder records what was merged."""
    if adapter.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"--adapter {adapter} lies inside {source}, whose weights have it merged already: such a folder "
            "(lora_adapter of OpenVLA-OFT's fine-tuning, adapter of a checkpoint) is the record of what was "
            "merged, and merging it again would add it twice. Leave --adapter out; or give the base that it "
            "was trained on as SOURCE and an adapter that was downloaded by itself."
        )


def convert_adapter(source: Path, folder: Path, policy_folder: Path) -> int:
    """Write adapters of ours so that peft puts them on the published model; returns the layers with one.

    Args:
        source: Folder written by `save_adapter`.
        folder: Created when missing.
        policy_folder: Our policy, of the size that the adapters belong to.

    Raises:
        CheckpointError: the adapters are not of a policy of ours.
    """
    config = read_config(policy_folder)
    tokenizer = PromptTokenizer.from_file(policy_folder / "tokenizer.json", pad_id=config.token_count)
    return export_adapter(source, folder, tensor_map(build_on_meta(config, tokenizer)))


def open_source(folder: Path, choices: PublishedOptions) -> PolicySource:
    """Find out what a folder holds and check that it is complete.

    Raises:
        CheckpointError: it is no policy, or something in it is missing, unknown or misshapen.
    """
    if read_json(folder / "config.json").get("model_type") == MODEL_TYPE:
        return _open_published(PublishedFolder.open(folder), choices)
    return _open_own(folder)


def pass_through_of(folder: Path) -> PassThroughFiles:
    """Collect what a published folder, or our conversion of one, holds besides the policy.

    Raises:
        CheckpointError: it is neither, or broken.
    """
    fields = read_json(folder / "config.json")
    if fields.get("model_type") == MODEL_TYPE:
        opened = PublishedFolder.open(folder)
        return PassThroughFiles(
            unused=opened.files, fields=fields, statistics=opened.statistics, carried=folder
        )
    read_config(folder)
    carried = folder / CARRIED
    return PassThroughFiles(
        unused=TensorFiles(folder / UNUSED) if (folder / UNUSED).is_file() else None,
        fields=read_json(carried / "config.json") if carried.is_dir() else {},
        statistics=read_statistics(folder, {}),
        carried=carried if carried.is_dir() else None,
    )


def _open_own(folder: Path) -> PolicySource:
    config = read_config(folder)
    tokenizer = PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count)
    files, policy = TensorFiles(folder), build_on_meta(config, tokenizer)
    files.check({name: spec.shape for name, spec in native_specs(policy).items()})
    names = list(native_specs(policy))
    return PolicySource(
        folder=folder,
        layout="asyncrl",
        config=config,
        tokenizer=tokenizer,
        files=files,
        pass_through=pass_through_of(folder),
        rows=tensor_map(policy),
        specs={name: files.spec(name) for name in names},
        natives=lambda: files.stream(names, what="convert"),
        used=len(names),
    )


def _open_published(opened: PublishedFolder, choices: PublishedOptions) -> PolicySource:
    config = config_of(opened, choices)
    tokenizer = PromptTokenizer.from_file(opened.folder / "tokenizer.json", pad_id=config.token_count)
    policy, files = build_on_meta(config, tokenizer), opened.files
    rows = tensor_map(policy)
    refused = [
        prefix for prefix, wanted in ((PROPRIO, choices.proprio), (CRITIC, choices.critic)) if not wanted
    ]
    left_out = {name for name in files.names() if name.startswith(tuple(refused))}
    used = check_published(files, policy, leave_out=left_out)
    empty = ((name, files.spec(name).empty()) for name in used)
    return PolicySource(
        folder=opened.folder,
        layout="openvla",
        config=config,
        tokenizer=tokenizer,
        files=files,
        pass_through=PassThroughFiles(
            unused=files, fields=opened.fields, statistics=opened.statistics, carried=opened.folder
        ),
        rows=rows,
        specs={name: Spec(t.dtype, tuple(t.shape)) for name, t in to_native(rows, empty)},
        natives=lambda: to_native(rows, files.stream(used, what="convert")),
        used=len(used),
        left_out=sorted(left_out),
    )


def _retyped(source: PolicySource, dtype: torch.dtype | None) -> tuple[dict[str, Spec], OpenVLAOFTConfig]:
    if dtype is None:
        return dict(source.specs), source.config
    specs = {name: Spec(dtype, spec.shape) for name, spec in source.specs.items()}
    return specs, dataclasses.replace(source.config, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _kept(config: OpenVLAOFTConfig, pass_through: PassThroughFiles) -> list[str]:
    if pass_through.unused is None:
        return []
    return [name for name in dropped_tensors(config) if name in pass_through.unused.names()]


def _write_keepsakes(folder: Path, config: OpenVLAOFTConfig, pass_through: PassThroughFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unused, kept = pass_through.unused, _kept(config, pass_through)
    if unused is not None and kept:
        specs = {name: unused.spec(name) for name in kept}
        write_file(folder / UNUSED, specs, ((name, unused.read(name)) for name in kept))
    if pass_through.statistics:
        write_json(folder / STATISTICS, statistics_to_write(config, pass_through.statistics))
    if pass_through.carried is not None:
        carried = folder / CARRIED
        carried.mkdir(exist_ok=True)
        copy_foreign_files(pass_through.carried, carried)
        write_json(carried / "config.json", pass_through.fields)
