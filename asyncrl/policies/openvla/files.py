"""Policy folders in the published OpenVLA layout: open, check, write.

config.json               conventions; `asyncrl` holds those that other stacks do not have
model.safetensors         weights by published names, or shards with an index
tokenizer.json            of the language model
dataset_statistics.json   ranges of actions and proprioception; they override those of config.json
(others)                  read by other stacks only, copied by `convert`
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.action_tokens import NormStats
from asyncrl.policies.openvla import names
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.names import CRITIC, LM_HEAD, PROPRIO, TensorMapping
from asyncrl.policies.openvla.networks import native_shapes
from asyncrl.policies.openvla.preprocess import PromptTokenizer
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.tensor_files import SHARD_BYTES, Spec, TensorFiles, write_folder
from asyncrl.storage.untrusted import Typed, shortened

MODEL_TYPE: Final = "openvla"
ADAPTER: Final = "adapter_config.json"  # Of peft.
SECTION: Final = "asyncrl"  # Entry of config.json: the fields of `OpenVLAOFTConfig`, statistics excepted.
STATISTICS: Final = "dataset_statistics.json"
OLD_FORMAT: Final = "asyncrl-openvla-oft"  # `format` in the config.json of asyncrl 0.1's own layout.
# Modules whose files mark another kind of policy.
_REFUSED: Final = {
    "action_head": "a continuous action head (L1 regression or diffusion). It gives actions without "
    "probabilities, and the policy gradient needs the log-probability of every action",
    "noisy_action_projector": "the projector of a diffusion action head, which gives no log-probabilities",
    "vision_backbone": "a vision tower with FiLM (language-modulated features), which asyncrl does "
    "not compute",
}


@dataclass(frozen=True, kw_only=True)
class PublishedOptions(Typed):
    """Conventions that a published folder may lack; "folder", 0 and "" read them from the folder."""

    norm_key: str = ""  # Statistics to scale actions with; empty: the only ones there are
    convention: Literal["folder", "rlinf", "oft"] = "folder"
    """rlinf: no stop token, bicubic. oft: stop token, Lanczos, centre crop. folder: as saved, else rlinf."""
    gripper: Literal["folder", "none", "libero", "maniskill"] = "folder"
    """folder: as saved by asyncrl, else by the statistics: libero*, bridge*; else none."""
    decoding: Literal["folder", "parallel", "autoregressive"] = "folder"  # folder: as saved, else parallel
    images: int = 0  # Pictures per decision; 0: as saved by asyncrl, else 1
    chunk: int = 0  # Steps per decision; 0: as saved by asyncrl, else 8, or 1 for autoregressive
    proprio: bool = True  # Read the proprioception projector if there is one
    critic: bool = True  # Read the value head if there is one

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Check the names of settings, as in --policy-settings."""
        known = sorted(field.name for field in dataclasses.fields(cls))
        if unknown := sorted(settings.keys() - set(known)):
            raise ConfigError(
                f"--policy-settings has {unknown[0]!r}, but a policy folder takes: {', '.join(known)}."
            )
        try:
            return cls(**settings)
        except ValueError as error:
            raise ConfigError(f"--policy-settings: {error}. Correct it, or leave it out.") from None


@dataclass(frozen=True, kw_only=True)
class Original:
    """The parts of a published folder that the policy does not use."""

    fields: Mapping[str, Any]  # Its config.json; empty if unknown.
    statistics: Mapping[str, Any]  # By data set, as in the files: `action`, and perhaps `proprio` and others.
    files: TensorFiles | None = None  # File that may hold published tensors that never affect the output.
    carried: Path | None = None  # Folder with the files that only other stacks read.


@dataclass(frozen=True, kw_only=True)
class PolicyFolder:
    """An opened policy folder; only the headers of its weights were read."""

    original: Original
    config: OpenVLAOFTConfig
    tokenizer: PromptTokenizer
    rows: Sequence[TensorMapping]
    files: TensorFiles  # Weights; the proprioception projector's among them if it has a file of its own.
    used: Sequence[str]  # Names in `files` that the policy uses.
    natives: Callable[[], Iterator[tuple[str, Tensor]]]  # Streams the policy's tensors by stable name.
    specs: Mapping[str, Spec]  # Dtype and shape of the tensors of `natives`, in its order.
    left_out: Sequence[str] = ()  # Tensors of the folder that the options exclude.


def open_folder(folder: Path, options: PublishedOptions | None = None) -> PolicyFolder:
    """Open a policy folder and check that it is complete."""
    options = options or PublishedOptions()
    original = read_original(folder)
    files = original.files
    assert files is not None
    config = _config(folder, original, files, options)
    tokenizer = PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count)
    refused = tuple(
        prefix for prefix, wanted in ((PROPRIO, options.proprio), (CRITIC, options.critic)) if not wanted
    )
    left_out = {name for name in files.names() if refused and name.startswith(refused)}
    used = _check(files, config, left_out)
    rows = names.tensor_map(native_shapes(config))
    empty = ((name, files.spec(name).empty()) for name in used)
    return PolicyFolder(
        original=original,
        config=config,
        tokenizer=tokenizer,
        rows=rows,
        files=files,
        used=used,
        natives=lambda: names.to_native(rows, files.stream(used, what="load policy"), config),
        specs={name: Spec(t.dtype, tuple(t.shape)) for name, t in names.to_native(rows, empty, config)},
        left_out=sorted(left_out),
    )


def read_original(folder: Path) -> Original:
    """Open a published folder without checking its weights; raises CheckpointError for other folders."""
    fields = read_json(folder / "config.json")
    _refuse_others(folder, fields)
    statistics = read_statistics(folder, fields)
    return Original(fields=fields, statistics=statistics, files=_weights(folder), carried=folder)


def _refuse_others(folder: Path, fields: Mapping[str, Any]) -> None:
    if fields.get("format") == OLD_FORMAT:
        source, out = (shlex.quote(str(path)) for path in (folder, folder.with_name(f"{folder.name}-new")))
        raise CheckpointError(
            f"{folder} has the policy layout of asyncrl 0.1. Convert it once with `asyncrl convert {source} "
            f"{out}`, and give the new folder."
        )
    if fields.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{folder / 'config.json'} is not of an OpenVLA policy (model_type {MODEL_TYPE}). Give a "
            "published OpenVLA or OpenVLA-OFT folder, or one written by asyncrl."
        )
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} holds weights and adapters ({ADAPTER}), and does not say whether they are merged. "
            "Move the adapters to a folder of their own, and merge them if they are not: asyncrl convert "
            "SOURCE OUT --adapter FOLDER."
        )
    for module, meaning in _REFUSED.items():
        if found := sorted(folder.glob(f"{module}--*.pt")):
            raise CheckpointError(
                f"{found[0]} is {meaning}. Take a checkpoint that was fine-tuned with discrete action "
                "tokens; if this one was, and the file is a leftover, move the file away."
            )


def _weights(folder: Path) -> TensorFiles:
    files = TensorFiles(folder, rename=names.modern_name)
    found = sorted(folder.glob(f"{PROPRIO.rstrip('.')}--*.pt"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has {len(found)} proprioception projectors ({', '.join(f.name for f in found)}). "
            "Keep the one that was trained with these weights."
        )
    if found and not any(name.startswith(PROPRIO) for name in files.names()):
        files.include(TensorFiles(found[0], rename=_without_module), PROPRIO)
    return files


def _without_module(name: str) -> str:
    return name.removeprefix("module.")


def read_pt(file: Path) -> dict[str, Tensor]:
    """Read a `.pt` or `.bin` state dict; the prefix `module.` of data-parallel runs is removed."""
    files = TensorFiles(file, rename=_without_module)
    return {name: files.read(name) for name in files.names()}


def _check(files: TensorFiles, config: OpenVLAOFTConfig, left_out: set[str]) -> list[str]:
    position = files.shapes.get(names.POSITIONS, torch.Size()).numel() > config.patches * config.dino.width
    used = names.published_shapes(config, class_position=position)
    unused = names.unused_shapes(config)
    ignored = {name: files.spec(name).shape for name in left_out}
    files.check(used | unused | ignored, optional=unused.keys())
    return [name for name in files.names() if name in used]


# --- conventions --------------------------------------------------------------


def _config(
    folder: Path, original: Original, files: TensorFiles, options: PublishedOptions
) -> OpenVLAOFTConfig:
    saved = original.fields.get(SECTION)
    section = saved if isinstance(saved, dict) else {}
    stats = _action_stats(folder, original.statistics)
    wanted = options.norm_key or str(section.get("norm_key", ""))
    key = "" if section and not (stats or wanted) else _statistics_key(folder, stats, wanted)
    changes: dict[str, Any] = {"norm_key": key, "norm_stats": stats}
    changes |= {"action_dim": len(stats[key].q01)} if key and not section else {}
    if options.convention != "folder":
        stop = options.convention == "oft" and options.decoding != "autoregressive"
        changes |= {"stop_token": stop, "image_pipeline": options.convention}
    if options.decoding != "folder":
        changes |= {"decoding": options.decoding}
        changes |= {"chunk": 1} if options.decoding == "autoregressive" else {}
    changes |= {name: n for name in ("chunk", "images") if (n := getattr(options, name))}
    if options.gripper != "folder":
        changes["gripper"] = options.gripper
    projector = f"{PROPRIO}fc1.weight"
    if projector in files.names():
        changes["proprio_dim"] = files.spec(projector).shape[1] if options.proprio else 0
    if section:
        base = OpenVLAOFTConfig.from_json({**section, "norm_key": "", "norm_stats": {}, "value_head": "none"})
        config = dataclasses.replace(base, **changes)
    else:
        gripper = {"libero": "libero", "bridge": "maniskill"}.get(key.split("_")[0], "none")
        half = LM_HEAD in files.names() and files.spec(LM_HEAD).dtype == torch.bfloat16
        unsaid = {"gripper": gripper, "dtype": "bfloat16" if half else "float32"}
        config = OpenVLAOFTConfig.full(**(unsaid | changes))
    return dataclasses.replace(config, **_critic(files, config, options.critic))


def _critic(files: TensorFiles, config: OpenVLAOFTConfig, wanted: bool) -> dict[str, Any]:
    heads = [f"{CRITIC}mlp.{layer}.weight" for layer in (0, 2, 4)]
    if not wanted or not all(name in files.names() for name in heads):
        return {"value_head": "none"}
    first, second, outputs = (files.spec(name).shape[0] for name in heads)
    if outputs not in (1, config.chunk):
        raise CheckpointError(
            f"{files.label}: {heads[2]} has {outputs} rows, but a critic gives 1 value per decision or "
            f"{config.chunk} (one per step). Use --policy-settings critic=false, or another chunk=N."
        )
    return {"value_head": "chunk" if outputs == 1 else "action", "value_hidden": (first, second)}


def read_statistics(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the action statistics of config.json, overridden by those of `dataset_statistics.json`."""
    statistics = fields.get("norm_stats") or {}
    if not isinstance(statistics, dict):
        raise CheckpointError(
            f"{folder / 'config.json'}: norm_stats is {shortened(statistics)}, expected an object. Copy it "
            "again."
        )
    if (folder / STATISTICS).exists():
        statistics = statistics | read_json(folder / STATISTICS)
    if odd := [
        key for key, entry in statistics.items() if not isinstance(entry, dict) or "action" not in entry
    ]:
        raise CheckpointError(
            f"The statistics in {folder} have {shortened(odd[0])}, which is no data set with an action: "
            f'{{"NAME": {{"action": {{"q01": ..., "q99": ...}}}}}}. Mend config.json or {STATISTICS}.'
        )
    return dict(statistics)


def _action_stats(folder: Path, statistics: Mapping[str, Any]) -> dict[str, NormStats]:
    try:
        return {key: NormStats.from_published(entry) for key, entry in statistics.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The action statistics in {folder} cannot be used ({error}): tokens cannot become actions. "
            f"Copy config.json and {STATISTICS} again."
        ) from error


def _statistics_key(folder: Path, stats: Mapping[str, NormStats], wanted: str) -> str:
    known = sorted(stats)
    if not wanted and len(known) == 1:
        return known[0]
    for key in (wanted, f"{wanted}_no_noops"):
        if key in stats:
            return key
    seen = f"has no action statistics for {wanted!r}" if wanted else f"has {len(known)} action statistics"
    choices = ", ".join(known) or f"none found ({STATISTICS} is missing)"
    raise CheckpointError(
        f"{folder} {seen}, so tokens cannot become actions. Choose one of them with --policy-settings "
        f"norm_key=KEY: {choices}."
    )


# --- writing ------------------------------------------------------------------


def write_policy(
    folder: Path,
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    specs: Mapping[str, Spec],
    natives: Iterable[tuple[str, Tensor]],
    *,
    original: Original | None = None,
    whole: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a policy folder, each file whole or not at all; return the bytes of the weights in use."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = names.tensor_map(specs)
    used = names.published_specs(rows, specs, fold=whole)
    unused = _unused_tensors(config, original, specs["lm_head.weight"].dtype) if whole else {}
    stream = chain(
        names.to_published(rows, natives, fold=whole), ((name, read()) for name, (_, read) in unused.items())
    )
    all_specs = used | {name: spec for name, (spec, _) in unused.items()}
    write_folder(folder, all_specs, stream, shard_bytes=shard_bytes)
    statistics = {key: stats.to_published() for key, stats in config.norm_stats.items()}
    for key, entry in original.statistics.items() if original else ():
        if key in statistics and NormStats.from_published(entry) == config.norm_stats[key]:
            statistics[key] = entry
    fields = dict(original.fields) if original and original.fields else names.published_config(config)
    section = {key: value for key, value in config.to_json().items() if key != "norm_stats"}
    fields = _typed(fields, config.dtype) | {"norm_stats": statistics, SECTION: section}
    if statistics:
        write_json(folder / STATISTICS, statistics)
    else:
        (folder / STATISTICS).unlink(missing_ok=True)
    write_json(folder / "config.json", fields)
    with replacing(folder / "tokenizer.json") as part:
        tokenizer.save(part)
    return sum(spec.nbytes for spec in used.values())


def _typed(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    changed = {**fields, "torch_dtype": dtype} | ({"dtype": dtype} if "dtype" in fields else {})
    text = fields.get("text_config")
    if isinstance(text, Mapping):
        known = {name: dtype for name in ("torch_dtype", "dtype") if name in text}
        changed["text_config"] = {**text, **known}
    return changed


def _unused_tensors(
    config: OpenVLAOFTConfig, original: Original | None, dtype: torch.dtype
) -> dict[str, tuple[Spec, Callable[[], Tensor]]]:
    kept = original.files if original else None
    tensors: dict[str, tuple[Spec, Callable[[], Tensor]]] = {}
    for name, shape in names.unused_shapes(config).items():
        tensors[name] = Spec(dtype, shape), partial(torch.zeros, shape, dtype=dtype)
        if kept is not None and name in kept.names():
            tensors[name] = kept.spec(name), partial(kept.read, name)
            if (found := kept.spec(name).shape) != shape:
                raise CheckpointError(
                    f"{kept.label}: tensor {name} has shape {list(found)}, expected {list(shape)}: it "
                    "is of a policy of another size. Name the right --original."
                )
    return tensors
