"""What OpenVLA-OFT stores beside its weights: `.pt` files in, the proprioception projector's tensors out.

Supervised OFT training writes one file per extra module, `proprio_projector--50000_checkpoint.pt` and others.
They are pickles of tensors: read with `weights_only`, never written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError

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
    """File of the proprioception projector, if there is one.

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
    """Tensors of the projector as ``proprio_projector.fc1.weight`` ``[D, proprio_dim]`` and so on.

    Raises:
        CheckpointError: the file is missing, truncated, or holds something else than tensors.
    """
    return {PROPRIO + name: tensor for name, tensor in read_pt(file).items()}


def read_pt(file: Path) -> dict[str, Tensor]:
    """Tensors of a `.pt` or `.bin` state dict, without the `module.` that data-parallel training puts before.

    Raises:
        CheckpointError: the file is missing, truncated, or holds something else than tensors.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing. Download or copy the checkpoint again.")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # on broken files the unpickler raises whatever it stumbles upon
        raise CheckpointError(
            f"{file} cannot be read as tensors ({type(error).__name__}). Copy it again; files that "
            "hold other objects are refused, because reading them could run a stranger's code."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} is not a state dict of tensors. Copy it again.")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
