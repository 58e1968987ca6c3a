"""Tell whether a folder holds an EVAC world as published: by the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.errors import CheckpointError
from asyncrl.storage.tensor_names import header_names

WRAPPED: Final = "_forward_module."
"""Stands in front of all names in DeepSpeed's files."""
MARK: Final = "model.diffusion_model.input_blocks.0.0.weight"
"""A tensor that every published checkpoint of EVAC has."""
PICKLED: Final = (".ckpt", ".pt", ".pth", ".bin")
"""Suffixes of files that torch.save writes."""


def lacks(folder: Path) -> str:
    """Say what a folder lacks to hold an EVAC checkpoint, empty if it holds one. Runs no code of a file."""
    from asyncrl.worlds.safe_pickle import CkptFile  # It needs torch.

    unreadable = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            if path.suffix in PICKLED:
                names = {name.removeprefix(WRAPPED) for name in CkptFile(path).shapes}
            else:
                names = header_names(path) if path.suffix == ".safetensors" else set()
        except CheckpointError as error:
            unreadable.append(str(error))
            continue
        if MARK in names:
            return ""
    looked = f"no tensor {MARK} in its *.ckpt, *.pt, *.pth, *.bin and *.safetensors"
    return "; ".join([looked, *unreadable])
