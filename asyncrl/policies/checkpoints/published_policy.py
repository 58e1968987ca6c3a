"""Open, understand and write a folder in the published OpenVLA layout.

Besides the weights it has `config.json` (with action statistics), `dataset_statistics.json` (which win),
`tokenizer.json`, and files that only other stacks read: they are carried along.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.policies.action_tokens import NormStats
from asyncrl.policies.checkpoints.published_names import (
    TensorMapping,
    dropped_tensors,
    modern_name,
    published_config,
    published_specs,
    to_published,
)
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.tensor_reader import Spec, TensorFiles
from asyncrl.storage.tensor_writer import SHARD_BYTES, write_folder
from asyncrl.storage.weight_files import INDEX

PROPRIO: Final = "proprio_projector."
_REFUSED: Final = {
    "action_head": "a continuous action head (L1 regression or diffusion). It gives actions without "
    "probabilities, and the policy gradient needs the log-probability of every action",
    "noisy_action_projector": "the projector of a diffusion action head, which gives no log-probabilities",
    "vision_backbone": "a vision tower with FiLM (language-modulated features), which asyncrl does "
    "not compute",
}
"""Modules whose files mean that the folder is another kind of policy."""


def refuse_other_heads(folder: Path) -> None:
    """Check that a published folder is of a policy with discrete actions.

    Raises:
        CheckpointError: it has the file of a module that makes it another policy.
    """
    for module, meaning in _REFUSED.items():
        found = sorted(folder.glob(f"{module}--*.pt"))
        if found:
            raise CheckpointError(
                f"{found[0]} is {meaning}. Take a checkpoint that was fine-tuned with discrete action "
                "tokens; if this one was, and the file is a leftover, move the file away."
            )


def find_proprio(folder: Path) -> Path | None:
    """Find the file of the proprioception projector, if there is one.

    Raises:
        CheckpointError: there are several.
    """
    found = sorted(folder.glob(f"{PROPRIO.rstrip('.')}--*.pt"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has {len(found)} proprioception projectors ({', '.join(f.name for f in found)}). "
            "Keep the one that was trained with these weights."
        )
    return found[0] if found else None


def read_proprio(file: Path) -> dict[str, Tensor]:
    """Read the projector: ``proprio_projector.fc1.weight`` ``[D, Q]`` and so on, in the dtype of the file.

    Raises:
        CheckpointError: the file is missing, truncated, or holds something else than tensors.
    """
    return {PROPRIO + name: tensor for name, tensor in read_pt(file).items()}


def read_pt(file: Path) -> dict[str, Tensor]:
    """Read a `.pt` or `.bin` state dict; the `module.` of data-parallel runs is cut from the names.

    Returns:
        Tensors by name, any shape and dtype, as the file has them.

    Raises:
        CheckpointError: the file is missing, truncated, or holds something else than tensors.
    """
    files = TensorFiles(file, rename=lambda name: name.removeprefix("module."))
    return {name: files.read(name) for name in files.names()}


MODEL_TYPE: Final = "openvla"
SECTION: Final = "asyncrl"
"""Entry of an exported config.json: what `OpenVLAOFTConfig` says and the published fields cannot."""
STATISTICS: Final = "dataset_statistics.json"
CRITIC: Final = "value_head."
_OWN: Final = {"config.json", "tokenizer.json", STATISTICS, INDEX}
_CARRIED: Final = (".json", ".py", ".model", ".txt", ".jinja")
_CARRIED_BYTES: Final = 20_000_000


@dataclass(frozen=True, kw_only=True)
class PublishedFolder:
    """What a published folder holds; of the weights only the headers were read."""

    folder: Path
    """Where it is."""
    fields: Mapping[str, Any]
    """Its config.json."""
    statistics: Mapping[str, Any]
    """By data set, as in the files: "action", and what else is there ("proprio")."""
    files: TensorFiles
    """Weights by published name; the proprioception projector's among them if it has a file of its own."""

    @classmethod
    def open(cls, folder: Path) -> PublishedFolder:
        """Read everything but the weights.

        Raises:
            CheckpointError: a file is missing, broken, or of a policy whose actions have no probabilities.
        """
        fields = read_json(folder / "config.json")
        refuse_other_heads(folder)
        files = TensorFiles(folder, rename=modern_name)
        proprio = find_proprio(folder)
        if proprio and not any(name.startswith(PROPRIO) for name in files.names()):
            files.extra |= read_proprio(proprio)
        return cls(folder=folder, fields=fields, statistics=read_statistics(folder, fields), files=files)

    def statistics_key(self, wanted: str) -> str:
        """Find the statistics to scale actions with.

        Args:
            wanted: A key; with "_no_noops" behind it is tried as well. Empty: the only one there is.

        Raises:
            CheckpointError: there is none, or it is not clear which.
        """
        known = sorted(self.statistics)
        if not wanted and len(known) == 1:
            return known[0]
        for key in (wanted, f"{wanted}_no_noops"):
            if key in self.statistics:
                return key
        seen = f"has no action statistics for {wanted!r}" if wanted else f"has {len(known)} action statistics"
        raise CheckpointError(
            f"{self.folder} {seen}, so tokens cannot become actions. Choose one of them with --unnorm-key: "
            f"{', '.join(known) or f'none found ({STATISTICS} is missing)'}."
        )

    def action_stats(self) -> dict[str, NormStats]:
        """Return the action ranges by data set.

        Raises:
            CheckpointError: an entry is incomplete.
        """
        return _action_stats(self.folder, self.statistics)


def read_statistics(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the statistics of config.json and, over them, `dataset_statistics.json`; only those of actions."""
    statistics: dict[str, Any] = dict(fields.get("norm_stats") or {})
    if (folder / STATISTICS).exists():
        statistics |= read_json(folder / STATISTICS)
    return {key: value for key, value in statistics.items() if isinstance(value, dict) and "action" in value}


def _action_stats(folder: Path, statistics: Mapping[str, Any]) -> dict[str, NormStats]:
    try:
        return {key: NormStats.from_published(entry) for key, entry in statistics.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The action statistics in {folder} lack or spoil {error}: tokens cannot become actions. "
            f"Copy config.json and {STATISTICS} again."
        ) from error


def statistics_to_write(config: OpenVLAOFTConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the statistics of a policy with all that is known about its data sets.

    Args:
        config: Its action ranges are what counts.
        known: Raw entries; one whose action ranges are others is not believed.
    """
    written: dict[str, Any] = {}
    for key, stats in config.norm_stats.items():
        raw = known.get(key)
        written[key] = (
            raw if raw is not None and NormStats.from_published(raw) == stats else stats.to_published()
        )
    return written


def conventions_of(fields: Mapping[str, Any]) -> tuple[OpenVLAOFTConfig | None, str]:
    """Read the sizes, conventions and statistics key that an export of ours wrote into its config.json.

    Returns:
        None and "" for a folder from elsewhere.
    """
    section = fields.get(SECTION)
    if not isinstance(section, dict):
        return None, ""
    return OpenVLAOFTConfig.from_json({**section, "norm_key": "", "norm_stats": {}}), section.get(
        "norm_key", ""
    )


# --- writing ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PassThroughFiles:
    """What a policy came from and does not use itself; given back on export."""

    unused: TensorFiles | None = None
    """Published tensors that never matter; those missing here are written as zeros."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The published config.json."""
    statistics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Raw statistics by data set."""
    carried: Path | None = None
    """Folder whose small files other stacks want."""


def write_published(
    folder: Path,
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    rows: Sequence[TensorMapping],
    specs: Mapping[str, Spec],
    natives: Iterable[tuple[str, Tensor]],
    *,
    pass_through: PassThroughFiles,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write the published layout, tensor by tensor; returns the files that only other stacks read.

    Args:
        folder: Created when missing; what it has under the same names is replaced.
        config: Of the policy.
        tokenizer: Of the policy.
        rows: See `published_names.tensor_map`.
        specs: Of the native tensors, in the order in which they come.
        natives: All parameters by stable name, adapters merged, in the order of `specs`, each of its shape
            and dtype there.
        pass_through: What the policy came from.
        shard_bytes: Size above which a further weight file is begun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = specs["lm_head.weight"].dtype
    used = published_specs(rows, specs)
    unused = _unused_specs(config, pass_through.unused, kind)
    stream = chain(to_published(rows, natives), _unused_tensors(unused, pass_through.unused))
    write_folder(folder, used | unused, stream, shard_bytes=shard_bytes)
    statistics = statistics_to_write(config, pass_through.statistics)
    section = {key: value for key, value in config.to_json().items() if key != "norm_stats"}
    fields = _typed(pass_through.fields or published_config(config), config.dtype)
    fields |= {"norm_stats": statistics, SECTION: section}
    write_json(folder / STATISTICS, statistics)
    write_json(folder / "config.json", fields)
    with replacing(folder / "tokenizer.json") as part:
        tokenizer.save(part)
    if pass_through.carried is None:
        return []
    return copy_foreign_files(pass_through.carried, folder)


def _typed(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Say which type the model is opened in: `torch_dtype`, which newer folders call `dtype`."""
    changed = {**fields, "torch_dtype": dtype} | ({"dtype": dtype} if "dtype" in fields else {})
    text = fields.get("text_config")
    if isinstance(text, Mapping):
        known = {name: dtype for name in ("torch_dtype", "dtype") if name in text}
        changed["text_config"] = {**text, **known}
    return changed


def copy_foreign_files(source: Path, folder: Path) -> list[str]:
    """Copy the small files that only other stacks read; returns their names."""
    chosen = [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and file.suffix in _CARRIED
        and file.name not in _OWN
        and file.stat().st_size <= _CARRIED_BYTES
    ]
    for file in chosen:
        with replacing(folder / file.name) as part:
            shutil.copyfile(file, part)
    return [file.name for file in chosen]


def _unused_specs(config: OpenVLAOFTConfig, kept: TensorFiles | None, kind: torch.dtype) -> dict[str, Spec]:
    specs = {name: Spec(kind, shape) for name, shape in dropped_tensors(config).items()}
    if kept is not None:
        shapes = {name: spec.shape for name, spec in specs.items()}
        found = shapes.keys() & kept.names()
        for name in found:
            if kept.spec(name).shape != shapes[name]:
                raise CheckpointError(
                    f"{kept.label}: tensor {name} has shape {list(kept.spec(name).shape)}, expected "
                    f"{list(shapes[name])}. It was kept from a policy of another size: name the right "
                    "--original."
                )
        specs |= {name: Spec(kept.spec(name).dtype, shapes[name]) for name in specs if name in found}
    return specs


def _unused_tensors(specs: Mapping[str, Spec], kept: TensorFiles | None) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        if kept is not None and name in kept.names():
            yield name, kept.read(name)
        else:
            yield name, torch.zeros(spec.shape, dtype=spec.dtype)
