"""Open policy folders of asyncrl 0.1's own layout, to convert them; kept for one release.

config.json, model*.safetensors   by the policy's own names
unused.safetensors, published/    kept from the published folder that it was converted from
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.policies.openvla import names
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import OLD_FORMAT, Original, PolicyFolder, read_statistics
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.storage.atomic import read_json
from asyncrl.storage.tensor_files import TensorFiles

_UNUSED, _CARRIED = "unused.safetensors", "published"
_KEYS: Final = ("format", "format_version")


def is_old(folder: Path) -> bool:
    """Return True if a folder has the layout of asyncrl 0.1."""
    return read_json(folder / "config.json").get("format") == OLD_FORMAT


def open_folder(folder: Path) -> PolicyFolder:
    """Open a folder of asyncrl 0.1's layout and check that it is complete."""
    fields = read_json(folder / "config.json")
    if fields.get("format_version") != 1:
        raise CheckpointError(f"{folder} was written by another version of asyncrl. Update asyncrl.")
    config = OpenVLAOFTConfig.from_json({key: v for key, v in fields.items() if key not in _KEYS})
    files, rows = TensorFiles(folder), names.tensor_map(config)
    published = names.published_shapes(config, class_position=True)
    empty = ((name, torch.empty(shape, device="meta")) for name, shape in published.items())
    files.check({name: tuple(t.shape) for name, t in names.to_native(rows, empty, config)})
    used = list(files.names())
    return PolicyFolder(
        original=read_original(folder),
        config=config,
        tokenizer=PromptTokenizer.from_file(folder / "tokenizer.json", pad_id=config.token_count),
        rows=rows,
        files=files,
        used=used,
        natives=lambda: files.stream(used, what="convert"),
        specs={name: files.spec(name) for name in used},
    )


def read_original(folder: Path) -> Original:
    """Open the parts that were kept from the published folder."""
    carried, unused = folder / _CARRIED, folder / _UNUSED
    return Original(
        fields=read_json(carried / "config.json") if carried.is_dir() else {},
        statistics=read_statistics(folder, {}),
        files=TensorFiles(unused) if unused.is_file() else None,
        carried=carried if carried.is_dir() else None,
    )
