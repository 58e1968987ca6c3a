"""Frames in, an .mp4 (by PyAV) or .gif (by Pillow) file out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncrl.errors import ConfigError


def can_write_mp4() -> bool:
    """Whether PyAV (the extra `video`) is installed."""
    return find_spec("av") is not None


def write_movie(path: Path, frames: Sequence[Image.Image], *, rate: int) -> None:
    """Write a movie of the kind its suffix says.

    Args:
        path: Ends in .mp4 or .gif.
        frames: At least one, all of one size.
        rate: Frames per second.

    Raises:
        ConfigError: Another suffix, or .mp4 without PyAV.
    """
    if path.suffix == ".gif":
        write_gif(path, frames, rate=rate)
    elif path.suffix == ".mp4":
        write_mp4(path, (np.asarray(frame) for frame in frames), rate=rate)
    else:
        raise ConfigError(f"{path} ends in neither .mp4 nor .gif. Give one of them.")


def write_gif(path: Path, frames: Sequence[Image.Image], *, rate: int) -> None:
    """Write an endless animation; `rate` is in frames per second."""
    kept = Image.Quantize.MAXCOVERAGE  # Keeps the colours of small things; the usual median cut dulls them.
    drawn = [frame.quantize(256, kept) for frame in frames]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=1000 // rate, loop=0)


def write_mp4(
    path: Path, frames: Iterable[NDArray[np.uint8]], *, rate: int, options: dict[str, str] | None = None
) -> None:
    """Write H.264.

    Args:
        path: Of the file.
        frames: ``[H, W, 3]`` uint8 each; with an odd height or width the last row or column is left out.
        rate: Frames per second.
        options: Of the encoder; by default what the encoder takes.

    Raises:
        ConfigError: PyAV is not installed.
    """
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{path} needs the package av. Install it with pip install 'asyncrl[video]', or use .gif."
        ) from None
    with av.open(str(path), "w") as container:
        stream: Any = None
        for frame in frames:
            even = np.ascontiguousarray(frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2])
            if stream is None:
                stream = container.add_stream("libx264", rate=rate, options=options or {})
                stream.height, stream.width, stream.pix_fmt = *even.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        if stream is not None:
            container.mux(stream.encode())
