"""Pictures of recordings outside memory: in a temporary file, read by row, and drawn as batches on a device.

Letters: F pictures, H W picture size.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.errors import AssetError
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

BLOCK_BYTES: Final = 64 * 2**20  # Pictures moved at a time.
ON_DEVICE: Final = 0.4  # Share of a GPU's free memory that the pictures of one source may take.


def cache_folder() -> Path:
    """Return TMPDIR, else /var/tmp (/tmp is memory on many hosts), else the system's temporary folder."""
    lasting = Path("/var/tmp")  # noqa: S108 - the file in it is made without a name
    if not os.environ.get("TMPDIR") and lasting.is_dir() and os.access(lasting, os.W_OK):
        return lasting
    return Path(tempfile.gettempdir())


class FrameFile:
    """``[F, H, W, 3]`` uint8 in an unnamed temporary file, read like an array; safe for concurrent threads.

    Reads copy rows, without a mapping: memory stays small, and a failing disk is an error of the call.
    """

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.uint8)
        self.nbytes = math.prod(shape)
        self._rows = np.arange(shape[0])
        self._row_bytes = math.prod(shape[1:])
        folder = cache_folder()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if self.nbytes:
                    os.posix_fallocate(file.fileno(), 0, self.nbytes)
                self._handle = os.dup(file.fileno())
        except OSError as error:
            free = shutil.disk_usage(folder).free if folder.is_dir() else 0
            raise AssetError(
                f"The recordings' pictures take {self.nbytes / 1e9:.1f} GB unpacked, and {folder} has "
                f"{free / 1e9:.1f} GB free ({error.strerror}). Set TMPDIR to a folder with more."
            ) from error
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        """Return a copy of rows as NumPy indexes them: ``[..., H, W, 3]`` uint8."""
        rows = np.asarray(self._rows[index])
        flat = rows.reshape(-1)
        frames = np.empty((len(flat), *self.shape[1:]), np.uint8)
        if len(flat):
            breaks = (np.flatnonzero(np.diff(flat) != 1) + 1).tolist()
            for begin, end in pairwise([0, *breaks, len(flat)]):
                self._read(frames[begin:end], int(flat[begin]))
        return frames.reshape(*rows.shape, *self.shape[1:])

    def _read(self, into: NDArray[np.uint8], row: int) -> None:
        left, at = into.data.cast("B"), row * self._row_bytes
        while left:
            count = os.preadv(self._handle, [left], at)
            if not count:
                raise AssetError("The file of unpacked pictures became shorter. Run the command again.")
            left, at = left[count:], at + count

    def write(self, row: int, frames: NDArray[np.uint8]) -> None:
        """Write ``[n, H, W, 3]`` from a row on."""
        if frames.shape[1:] != self.shape[1:] or row + len(frames) > len(self):
            raise ValueError(f"{frames.shape} from row {row} on does not fit into {self.shape}")
        if not frames.size:
            return
        left, at = np.ascontiguousarray(frames).data.cast("B"), row * self._row_bytes
        while left:
            count = os.pwrite(self._handle, left, at)
            left, at = left[count:], at + count


Frames = NDArray[np.uint8] | FrameFile  # [F, H, W, 3] uint8, in memory or in a file.


def blocks(shape: Sequence[int]) -> list[slice]:
    """Cut the rows ``[F, H, W, 3]`` into slices of about `BLOCK_BYTES`, each a multiple of 64 rows.

    Example:
        >>> blocks((130, 512, 512, 3))
        [slice(0, 64, None), slice(64, 128, None), slice(128, 130, None)]
    """
    size = max(1, BLOCK_BYTES // (64 * max(1, math.prod(shape[1:])))) * 64
    return [slice(begin, min(begin + size, shape[0])) for begin in range(0, shape[0], size)]


class BatchSource:
    """Pictures from which batches are drawn, resident on a GPU if they fit there."""

    def __init__(self, frames: Frames, device: torch.device, *, resident: bool = True) -> None:
        self.frames = frames
        self.device = device
        self.resident: Tensor | None = None
        on_gpu = resident and device.type == "cuda"
        if on_gpu and frames.nbytes < ON_DEVICE * torch.cuda.mem_get_info(device)[0]:
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
    """Return frames in the policy's size ``[F, S, S, 3]`` if its resizing is slow, else unchanged; uint8."""
    if policy.config.image_pipeline == "rlinf":
        return frames
    size = policy.config.image_size
    shown = FrameFile((len(frames), size, size, 3))
    for part in blocks(frames.shape):
        shown.write(part.start, policy.place_pictures(frames[part]).cpu().numpy())
    return shown
