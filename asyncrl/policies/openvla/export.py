"""Convert policy folders tensor by tensor: conventions, adapters, completion for other stacks, model card.

`from_pretrained(..., trust_remote_code=True)` of other stacks reads, besides weights and tokenizer.json:

    AutoConfig, AutoModel   config.json: `auto_map` names classes; the .py with these
    AutoProcessor           preprocessor_config.json, its `auto_map`, the .py
    AutoTokenizer           tokenizer_config.json, which is written where the original has none

The .py are never run. Those that `auto_map` takes from a hub (OWNER/NAME--module.Class) are not checked.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl import __version__
from asyncrl.errors import CheckpointError
from asyncrl.policies.lora import merge_adapter
from asyncrl.policies.openvla import files as policy_files
from asyncrl.policies.openvla import names
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.networks import native_shapes
from asyncrl.policies.openvla.preprocess import BEGIN, END, UNKNOWN, PromptTokenizer
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.tensor_files import INDEX, SHARD_BYTES, Spec, TensorFiles
from asyncrl.storage.untrusted import read_json_lines

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_OWN: Final = {"config.json", "tokenizer.json", "state.json", policy_files.STATISTICS, INDEX}
_CARRIED: Final = (".json", ".py", ".model", ".txt", ".jinja")
_CARRIED_BYTES: Final = 20_000_000


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Result of a conversion."""

    config: OpenVLAOFTConfig  # Of the policy written.
    used: int  # Tensors read that the policy uses.
    kept: int  # Unused tensors of the original, written again.
    zeros: int  # Unused tensors written as zeros.
    left_out: tuple[str, ...]  # Tensors of the source that the options exclude.
    merged: int  # Layers with an adapter merged.
    carried: tuple[str, ...]  # Files copied that only other stacks read.
    missing: list[str]  # Files that other stacks lack.
    nbytes: int  # Size of the weights written.


def convert(
    source: Path,
    folder: Path,
    *,
    choices: policy_files.PublishedOptions | None = None,
    adapter: Path | None = None,
    original: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Write the policy of one folder into another, complete for other stacks.

    Args:
        original: Published folder with the unused tensors and other stacks' files; None: the source itself.
        dtype: Type of all numbers written and of the policy's arithmetic; None: the source's.
    """
    _check_paths(source, folder, adapter)
    opened = open_any(source, choices)
    merged = merge_adapter(opened.files, opened.rows, adapter) if adapter else 0
    specs, config = dict(opened.specs), opened.config
    if dtype is not None:
        specs = {name: Spec(dtype, spec.shape) for name, spec in specs.items()}
        config = dataclasses.replace(config, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    whole = opened.original
    if original is not None:
        whole = _read_old_original(original) if _is_old(original) else policy_files.read_original(original)
    nbytes = policy_files.write_policy(
        folder,
        config,
        opened.tokenizer,
        specs,
        opened.natives(),
        original=whole,
        whole=True,
        shard_bytes=shard_bytes,
    )
    carried = _copy_foreign_files(whole.carried, folder) if whole.carried else []
    _write_tokenizer_config(folder, opened.tokenizer)
    unused = names.unused_shapes(config).keys()
    kept = len(unused & whole.files.names()) if whole.files else 0
    return ConversionReport(
        config=config,
        used=len(opened.used),
        kept=kept,
        zeros=len(unused) - kept,
        left_out=tuple(opened.left_out),
        merged=merged,
        carried=tuple(carried),
        missing=missing_files(folder),
        nbytes=nbytes,
    )


def _check_paths(source: Path, folder: Path, adapter: Path | None) -> None:
    if folder.resolve() == source.resolve():
        raise CheckpointError(f"{folder} is the source itself. Choose another folder to write to.")
    if adapter is not None and adapter.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"--adapter {adapter} lies inside {source}, whose weights have it merged already: such a folder "
            "(lora_adapter of OpenVLA-OFT's fine-tuning, adapter of a checkpoint) is the record of what was "
            "merged, and merging it again would add it twice. Leave --adapter out; or give the base that it "
            "was trained on as SOURCE and an adapter that was downloaded by itself."
        )


# ---- asyncrl 0.1's own layout, kept for one release ----------------------------------------------
#
# config.json, model*.safetensors   by the policy's own names
# unused.safetensors, published/    from the published folder that it was converted from


def open_any(folder: Path, options: policy_files.PublishedOptions | None = None) -> policy_files.PolicyFolder:
    """Open a policy folder of the published or of asyncrl 0.1's layout."""
    fields = read_json(folder / "config.json")
    if not _is_old(folder):
        return policy_files.open_folder(folder, options)
    config = OpenVLAOFTConfig.from_json(
        {key: value for key, value in fields.items() if key not in ("format", "format_version")}
    )
    files, shapes = TensorFiles(folder), native_shapes(config)
    files.check(shapes)
    used = list(files.names())
    return policy_files.PolicyFolder(
        original=_read_old_original(folder),
        config=config,
        tokenizer=PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count),
        rows=names.tensor_map(shapes),
        files=files,
        used=used,
        natives=lambda: files.stream(used, what="convert"),
        specs={name: files.spec(name) for name in used},
    )


def _is_old(folder: Path) -> bool:
    return read_json(folder / "config.json").get("format") == policy_files.OLD_FORMAT


def _read_old_original(folder: Path) -> policy_files.Original:
    carried, unused = folder / "published", folder / "unused.safetensors"
    return policy_files.Original(
        fields=read_json(carried / "config.json") if carried.is_dir() else {},
        statistics=policy_files.read_statistics(folder, {}),
        files=TensorFiles(unused) if unused.is_file() else None,
        carried=carried if carried.is_dir() else None,
    )


# --- other stacks -------------------------------------------------------------


def _copy_foreign_files(source: Path, folder: Path) -> list[str]:
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


def _write_tokenizer_config(folder: Path, tokenizer: PromptTokenizer) -> None:
    if (folder / TOKENIZER_CONFIG).exists():
        return
    kinds = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "pad_token": "<PAD>"}
    known = {kind: text for kind, text in kinds.items() if tokenizer.tokenizer.token_to_id(text) is not None}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}
    write_json(folder / TOKENIZER_CONFIG, fields)


def missing_files(folder: Path) -> list[str]:
    """List the files that `from_pretrained` of other stacks needs and a policy folder lacks."""
    processors = ("preprocessor_config.json", "processor_config.json")
    wanted = [] if model_class(folder) else ["configuration_prismatic.py", "modeling_prismatic.py"]
    if not any((folder / name).is_file() for name in processors):
        wanted += ["preprocessor_config.json", "processing_prismatic.py"]
    classes = [_auto_map(folder / name) for name in ("config.json", *processors, TOKENIZER_CONFIG)]
    own = [one for auto_map in classes for listed in auto_map.values() for one in listed]
    wanted += [f"{one.rpartition('.')[0]}.py" for one in own if "--" not in one]
    lacking = [] if model_class(folder) else ["config.json with auto_map"]
    return lacking + [name for name in dict.fromkeys(wanted) if not (folder / name).is_file()]


def model_class(folder: Path) -> str:
    """Return the first AutoModel class in config.json's auto_map; "" if that has no AutoConfig."""
    classes = _auto_map(folder / "config.json")
    if "AutoConfig" not in classes:
        return ""
    return next((name for name in classes if name.startswith("AutoModel") and name.isidentifier()), "")


def _auto_map(file: Path) -> dict[str, list[str]]:
    auto_map = read_json(file).get("auto_map") if file.is_file() else None
    if not isinstance(auto_map, Mapping):
        return {}
    lists = {name: of if isinstance(of, list) else [of] for name, of in auto_map.items()}
    return {name: [one for one in of if isinstance(one, str)] for name, of in lists.items()}


ADAPTER_LOADING: Final = """\
`peft` puts the adapters of this folder on the published model that training began with:

```python
model = PeftModel.from_pretrained(model, "FOLDER")
```"""


def loading(folder: Path, report: ConversionReport) -> str:
    """Describe how asyncrl and other stacks load an export."""
    own = "```bash\nasyncrl evaluate FOLDER\nasyncrl train --policy FOLDER\n```\n\n"
    if report.missing:
        return (
            f"{own}Other stacks do not open this folder, because it lacks {', '.join(report.missing)}. They "
            "are in the published folder that training began with: copy them, or convert again with "
            "`--original FOLDER`. OpenVLA's code builds the published 7B size only."
        )
    name = model_class(folder)
    return (
        f"{own}With other stacks, which run the code that came with the original (`unnorm_key` is "
        f"`{report.config.norm_key}`):\n\n```python\nfrom transformers import {name}\n\n"
        f'model = {name}.from_pretrained("FOLDER", trust_remote_code=True)\n```'
    )


# --- model card ---

_TEMPLATE: Final = """\
---
{header}
---

# {title}

Vision-language-action policy, written by asyncrl {version} from {source}. {licence}

| | |
|---|---|
| decision | {policy.chunk} steps of {policy.action_dim} numbers, {policy.decoding} |
| inputs | {policy.images} picture(s) of {policy.image_size} pixels ({policy.image_pipeline}), \
{policy.proprio_dim} numbers of proprioception |
| actions | statistics `{policy.norm_key}`, gripper {policy.gripper} |
| critic | {policy.value_head} |
| dtype | {policy.dtype}{rounded} |

{run}

Not measured: other tasks than those it was trained on, and any robot.

## Loading

{loading}
"""
ROUNDED: Final = "; merging rounds adapters, which moves log-probs a little"
NO_RUN: Final = "The source is no checkpoint of a run, so nothing is known here of its training."


def card(
    policy: OpenVLAOFTConfig,
    run: str = NO_RUN,
    *,
    title: str,
    source: str,
    loading: str,
    hub: Mapping[str, str],
    library: str = "transformers",
) -> str:
    """Return the README.md of an export: a header in YAML for a hub, then Markdown.

    Args:
        run: Result of `about_run`, if the source is a checkpoint of a run.
        source: Last part of the converted name, and an adapter that was merged.
        hub: Hub identifiers given by the user: base_model, license.
    """
    from huggingface_hub import ModelCardData

    tags = ["vision-language-action", "openvla" if policy.causal else "openvla-oft", "asyncrl"]
    tags += ["reinforcement-learning"] if run != NO_RUN else []
    given: dict[str, Any] = {name: value for name, value in hub.items() if value}
    header = ModelCardData(
        library_name=library, pipeline_tag="robotics", tags=tags, ignore_metadata_errors=False, **given
    )
    licence = "" if given.get("license") else "No licence is stated here; the original weights have one."
    return _TEMPLATE.format(
        header=header.to_yaml().strip(),
        title=title,
        version=__version__,
        source=source,
        licence=licence,
        policy=policy,
        rounded=ROUNDED if policy.dtype == "bfloat16" else "",
        run=run,
        loading=loading,
    )


def about_run(checkpoint: Path) -> str:
    """Describe training and measured success of a checkpoint in its run's folder; a damaged file raises."""
    return "\n".join(_about_run(checkpoint))


def _about_run(checkpoint: Path) -> Iterator[str]:
    run_dir, progress = checkpoint.parents[1], read_json(checkpoint / "state.json").get("progress")
    version = progress.get("version") if isinstance(progress, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{checkpoint / 'state.json'} does not say which version it is. Copy it again.")
    yield f"## Training\n\nVersion {version}: the policy after {version} updates.\n"
    if (run_dir / "provenance.json").exists():
        start = (read_json(run_dir / "provenance.json").get("starts") or [{}])[-1]
        versions = ", ".join(f"{name} {v}" for name, v in start.get("versions", {}).items())
        commit = str(start.get("commit", ""))[:12] + " with changes" * bool(start.get("dirty"))
        yield f"Run with {versions}; commit {commit}."
    yield "\n## True success, in a simulator\n"
    yield from _measured(
        version, {row["version"]: row for row in read_json_lines(run_dir / "evaluations.jsonl")}
    )


def _measured(version: int, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield "| version | success | 95 % interval (Wilson) | episodes | simulator | temperature |"
        yield "|---|---|---|---|---|---|"
    for measured, row in sorted(rows.items()):
        name = f"**{measured}, this one**" if measured == version else str(measured)
        yield (
            f"| {name} | {row['success']:.1%} | {row['low']:.1%} to {row['high']:.1%} | {row['episodes']} "
            f"| `{row['simulator']}` | {row['temperature']:g} |"
        )
    if version not in rows:
        yield "\nThis version was not measured."
    elif len(rows) > 1 and rows[version]["success"] == max(row["success"] for row in rows.values()):
        yield (
            f"\n**Selected**: the best of {len(rows)} measured versions, by these very episodes, so the "
            "number tends to be too high. `asyncrl evaluate` measures at other starts."
        )
