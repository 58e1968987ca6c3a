"""Draw frames and text on pictures, by Pillow.

Dimension letters: H and W image size in pixels.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from asyncrl.errors import ConfigError

PAPER: Final = (255, 255, 255)
INK: Final = (30, 34, 40)
FAINT: Final = (222, 226, 230)
BLUE: Final = (66, 114, 184)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def require_png(path: Path) -> None:
    """Refuse a name that no picture can be written to.

    Raises:
        ConfigError: It does not end in .png, or its folder does not exist.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--out {path} must end in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path} is not in an existing folder. Make {path.parent} first.")


@cache
def font(size: int) -> Font:
    """Return the typeface that comes with Pillow, `size` pixels high."""
    return ImageFont.load_default(size)


def enlarged(frame: NDArray[np.uint8], width: int) -> Image.Image:
    """Make a frame at least `width` pixels wide by repeating pixels, so that nothing is smoothed over.

    Args:
        frame: ``[H, W, 3]`` uint8.
        width: In pixels.
    """
    times = max(1, -(-width // frame.shape[1]))
    return Image.fromarray(frame.repeat(times, 0).repeat(times, 1))


def captioned(picture: Image.Image, lines: list[str], *, edge: tuple[int, int, int]) -> Image.Image:
    """Put text below a picture and a coloured edge at its left, so that nothing in it is covered."""
    size, space = 13, 5
    height = picture.height + len(lines) * (size + space) + space
    whole = Image.new("RGB", (picture.width, height), PAPER)
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    draw.rectangle((0, picture.height, space - 1, height), fill=edge)
    for index, line in enumerate(lines):
        at = (2 * space, picture.height + space // 2 + index * (size + space))
        draw.text(at, fitted(line, picture.width - 3 * space, size), fill=INK, font=font(size))
    return whole


def fitted(text: str, width: int, size: int) -> str:
    """Shorten a text until it is at most `width` pixels wide at the font size `size`."""
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."
