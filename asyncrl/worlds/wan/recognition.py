"""Tell whether a folder holds a Wan world as published, by the names of its tensors; find its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json
from asyncrl.storage.tensor_names import INDEX, header_names, names_in

WAN_TRANSFORMER: Final = "model-00001.safetensors"
WAN_VAE: Final = "Wan2.2_VAE.pth"
MARKS: Final = ("patch_embedding.weight", "blocks.0.self_attn.q.weight")
"""Tensors that every Wan transformer has, and no other world or policy."""
PIPELINE: Final = "pipe.dit."
"""May stand in front of all names."""
_OWN: Final = ("patch_embedding.", "blocks.", "time_embedding.", "time_projection.", "action_mlp", "head.")
_SHARD: Final = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def lacks(folder: Path) -> str:
    """Say what a folder lacks to hold a Wan transformer, empty if it holds one; torn files count as whole."""
    names = {bare(name) for name in names_in(folder)}
    absent = next((name for name in MARKS if name not in names), "")
    return f"no tensor {absent} in its *.safetensors" if absent else ""


def bare(name: str) -> str:
    """Return a tensor's name without `PIPELINE`."""
    return name.removeprefix(PIPELINE)


def transformer_files(folder: Path) -> list[Path]:
    """Return the files of the published transformer: what the index names, one file, or all shards.

    Under other names, those with tensors of a Wan transformer; nothing where there are none.

    Raises:
        CheckpointError: The index is none, or a shard is missing.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index, "Download it again.").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
            raise CheckpointError(
                f"{index} is not an index of weights: it has no weight_map. Download it again."
            )
        named = sorted(set(weight_map.values()))
        # A name like ../x or /x would lead out of the folder.
        files = [folder / name for name in named if Path(name).name == name]
        if len(files) == len(named) > 0 and all(file.is_file() for file in files):
            return files
    if (folder / WAN_TRANSFORMER).is_file():
        return [folder / WAN_TRANSFORMER]
    group_files = sorted(
        file for file in folder.glob("model-*-of-*.safetensors") if _SHARD.fullmatch(file.name)
    )
    if not group_files:
        named = {path: header_names(path) for path in sorted(folder.glob("*.safetensors"))}
        return [path for path, names in named.items() if any(bare(name).startswith(_OWN) for name in names)]
    counts = {int(match[2]) for file in group_files if (match := _SHARD.fullmatch(file.name))}
    missing = {f"model-{i + 1:05d}-of-{n:05d}.safetensors" for n in counts for i in range(n)}
    if absent := sorted(missing - {file.name for file in group_files}):
        raise CheckpointError(f"{folder} lacks {absent[0]} of its shards. Download it again.")
    return group_files
