"""Draws batches of pictures on the device that a model is fitted on."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.fitting.frame_file import FrameFile, Frames, blocks
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

ON_DEVICE: Final = 0.4
"""Share of a GPU's free memory that the pictures of one source may take there."""


class BatchSource:
    """Pictures from which batches are drawn, on the device where they fit there."""

    def __init__(self, frames: Frames, device: torch.device, *, resident: bool = True) -> None:
        """Move the pictures to a GPU that has room for them; elsewhere every batch is read when it is drawn.

        Args:
            frames: ``[F, H, W, 3]`` uint8.
        """
        self.frames = frames
        self.device = device
        self.resident: Tensor | None = None
        if (
            resident
            and device.type == "cuda"
            and frames.nbytes < ON_DEVICE * torch.cuda.mem_get_info(device)[0]
        ):
            self.resident = torch.empty(frames.shape, dtype=torch.uint8, device=device)
            for part in blocks(frames.shape):
                self.resident[part] = to_device(frames[part], device)

    def take(self, rows: Tensor) -> Tensor:
        """Return the pictures of rows ``[...]`` int64: ``[..., H, W, 3]`` uint8 on the device."""
        if self.resident is not None:
            return self.resident[rows.to(self.device)]
        found = self.frames[rows.cpu().numpy()]
        return to_device(found, self.device) if self.device.type == "cuda" else torch.from_numpy(found)


def shown_to(policy: OpenVLAOFTPolicy, frames: Frames) -> Frames:
    """Return the pictures as the policy is shown them, where that is more work than a batch has time for.

    Args:
        frames: ``[F, H, W, 3]`` uint8.

    Returns:
        ``[F, S, S, 3]`` uint8 of the policy's picture size, or the frames themselves.
    """
    if policy.config.image_pipeline == "rlinf":
        return frames
    size = policy.config.image_size
    shown = FrameFile((len(frames), size, size, 3))
    for part in blocks(frames.shape):
        shown.write(part.start, policy.place_pictures(frames[part]).cpu().numpy())
    return shown
