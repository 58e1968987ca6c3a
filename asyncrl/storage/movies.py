"""Write movies as GIF, by Pillow, or as H.264, by PyAV (the extra `video`).

Dimension letters: H and W image size in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

GREEN: Final = (60, 190, 90)
"""Red, green and blue of what marks a success."""
RED: Final = (200, 70, 60)
"""Red, green and blue of what marks a failure."""


def can_write_mp4() -> bool:
    """Return whether PyAV is installed."""
    return find_spec("av") is not None


def require_mp4(path: Path) -> None:
    """Refuse a movie that cannot be written.

    Raises:
        ConfigError: PyAV is not installed.
    """
    if not can_write_mp4():
        raise ConfigError(
            f"{path} needs the package av. Install it with pip install 'asyncrl[video]', or use .gif."
        )


def movie_suffix() -> str:
    """Return the suffix of the better kind of movie that can be written: .mp4, or .gif without PyAV."""
    return ".mp4" if can_write_mp4() else ".gif"


def write_movie(path: Path, frames: Iterable[NDArray[np.uint8]], *, rate: int) -> None:
    """Write a movie of the kind its suffix says.

    Args:
        path: Ends in .mp4 or .gif.
        frames: ``[H, W, 3]`` uint8 each, at least one, all of one size.
        rate: Frames per second.

    Raises:
        ConfigError: Another suffix, or .mp4 without PyAV.
    """
    if path.suffix == ".gif":
        write_gif(path, frames, rate=rate)
    elif path.suffix == ".mp4":
        write_mp4(path, frames, rate=rate)
    else:
        raise ConfigError(f"{path} ends in neither .mp4 nor .gif. Give one of them.")


def write_gif(path: Path, frames: Iterable[NDArray[np.uint8]], *, rate: int) -> None:
    """Write an endless animation of 256 colours per frame.

    Args:
        path: Of the file.
        frames: ``[H, W, 3]`` uint8 each, at least one, all of one size.
        rate: Frames per second.
    """
    from PIL import Image

    kept = Image.Quantize.MAXCOVERAGE  # Keeps the colours of small things; the usual median cut dulls them.
    drawn = [Image.fromarray(frame).quantize(256, kept) for frame in frames]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=1000 // rate, loop=0, optimize=True)


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
    require_mp4(path)
    import av  # pyright: ignore[reportMissingImports]

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
