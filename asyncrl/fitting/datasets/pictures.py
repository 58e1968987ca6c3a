"""Bring stored pictures to the size and orientation that models are shown.

Letters: H W stored picture size, S side of what is shown.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.bounds import PIXELS
from asyncrl.errors import ConfigError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP")
"""Of files with one picture."""
FILE_BYTES: Final = 64 * 2**20
"""Largest file with one picture."""


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What becomes of every picture."""

    image_size: int = 0
    """``S``; 0: pictures keep their size."""
    aspect: Literal["stretch", "crop", "pad"] = "stretch"
    flip: Literal["none", "vertical", "both"] = "none"

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of what becomes of a picture of ``height`` x ``width`` pixels."""
        if self.image_size:
            return self.image_size, self.image_size
        side = {"stretch": 0, "crop": min(height, width), "pad": max(height, width)}[self.aspect]
        return (side, side) if side else (height, width)

    def place(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return ``[S, S, 3]`` uint8 of ``[H, W, 3]``, or of its own size. Resizing averages, then filters.

        Example:
            >>> Placing(image_size=2, aspect="crop").place(np.full((4, 8, 3), 9, np.uint8)).shape
            (2, 2, 3)
        """
        from PIL import Image

        if self.flip != "none":
            picture = picture[::-1] if self.flip == "vertical" else picture[::-1, ::-1]
        picture = _squared(picture, self.aspect)
        height, width = self.size_of(*picture.shape[:2])
        if picture.shape[:2] == (height, width):
            return np.ascontiguousarray(picture)
        image = Image.fromarray(np.ascontiguousarray(picture))
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)).copy()


def _squared(picture: NDArray[np.uint8], aspect: str) -> NDArray[np.uint8]:
    height, width = picture.shape[:2]
    if aspect == "stretch" or height == width:
        return picture
    if aspect == "crop":
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        return picture[top : top + side, left : left + side]
    side = max(height, width)
    padded = np.zeros((side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = picture
    return padded


def decoded(content: bytes, size: Sequence[int] = ()) -> NDArray[np.uint8]:
    """Read a file with one picture, of any of `FORMATS`.

    Args:
        size: Height and width that it must have; none: any up to `PIXELS`.

    Returns:
        ``[H, W, 3]`` uint8.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            found = (image.height, image.width)
            if max(found) > PIXELS or (size and found != tuple(size)):
                wanted = f"{size[0]} x {size[1]}" if size else f"at most {PIXELS} x {PIXELS}"
                raise ValueError(f"a picture has {found[0]} x {found[1]} pixels, expected {wanted}")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture cannot be read ({error})") from error


def check_resizable(height: int, width: int, placing: Placing, where: str) -> None:
    """Refuse pictures that are stored larger than any that is read."""
    if not 0 < max(height, width, *placing.size_of(height, width)) <= PIXELS or not min(height, width):
        raise ConfigError(
            f"{where} has pictures of {height} x {width} pixels, but at most {PIXELS} x {PIXELS} are read. "
            "Write the data set with smaller ones."
        )
