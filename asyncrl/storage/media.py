"""Draw frames and text with Pillow; write movies as GIF (Pillow) or H.264 (PyAV, the extra `video`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from asyncrl.errors import ConfigError

PAPER: Final = (255, 255, 255)
INK: Final = (30, 34, 40)
SPACE: Final = 10  # Pixels between the tiles of a page

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def require_png(path: Path) -> None:
    """Check that a picture can be written to `path`."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--out {path} must end in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path} is not in an existing folder. Make {path.parent} first.")


@cache
def font(size: int) -> Font:
    """Return Pillow's typeface, `size` pixels high."""
    return ImageFont.load_default(size)


def enlarged(frame: NDArray[np.uint8], least: int) -> Image.Image:
    """Enlarge a frame ``[H, W, 3]`` uint8 to at least `least` pixels a side by repeating pixels."""
    times = max(1, -(-least // min(frame.shape[:2])))
    return Image.fromarray(frame.repeat(times, 0).repeat(times, 1))


def captioned(picture: Image.Image, lines: list[str], *, edge: tuple[int, int, int]) -> Image.Image:
    """Add lines of text below a picture, with a coloured edge at their left."""
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
    """Shorten a text to `width` pixels at the font size `size`."""
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def in_row(pictures: Sequence[Image.Image], space: int) -> Image.Image:
    """Paste pictures of one size next to each other, `space` pixels apart."""
    width, height = pictures[0].width + space, pictures[0].height
    strip = Image.new("RGB", (len(pictures) * width - space, height), PAPER)
    for place, picture in enumerate(pictures):
        strip.paste(picture, (place * width, 0))
    return strip


def in_columns(columns: Sequence[Sequence[Image.Image]], heads: Sequence[str]) -> Image.Image:
    """Lay tiles out in columns, each under its heading; empty columns are left out."""
    head, space = 26, SPACE
    shown = [(column, text) for column, text in zip(columns, heads, strict=True) if column]
    width = max(tile.width for column, _ in shown for tile in column) + space
    height = max(tile.height for column, _ in shown for tile in column) + space
    rows = max(len(column) for column, _ in shown)
    page = Image.new("RGB", (len(shown) * width + space, head + rows * height + space), PAPER)
    draw = ImageDraw.Draw(page)
    for index, (column, text) in enumerate(shown):
        left = space + index * width
        draw.text((left, 5), fitted(text, page.width - left - space, 15), fill=INK, font=font(15))
        for row, tile in enumerate(column):
            page.paste(tile, (left, head + space // 2 + row * height))
    return page


GREEN: Final = (60, 190, 90)
RED: Final = (200, 70, 60)
_PALETTE_PIXELS: Final = 2_000_000  # Pixels, spread over all frames, that a palette is computed from.
_LAST_SHOWN: Final = 2000  # Milliseconds for which an animation shows its end before it begins again.


def can_write_mp4() -> bool:
    """Return True if PyAV is installed."""
    return find_spec("av") is not None


def require_mp4(path: Path) -> None:
    """Check that a movie can be written."""
    if not can_write_mp4():
        raise ConfigError(
            f"{path} needs the package av. Install it with pip install 'asyncrl[video]', or use .gif."
        )


def movie_suffix() -> str:
    """Return .mp4, or .gif without PyAV."""
    return ".mp4" if can_write_mp4() else ".gif"


def write_movie(path: Path, frames: Iterable[NDArray[np.uint8]], *, rate: int) -> None:
    """Write frames, ``[H, W, 3]`` uint8, as .gif or .mp4 by the suffix, with `rate` per second."""
    if path.suffix.lower() == ".gif":
        write_gif(path, frames, rate=rate)
    elif path.suffix.lower() == ".mp4":
        with Mp4Writer(path, rate=Fraction(rate)) as movie:
            for frame in frames:
                movie.add(frame)
    else:
        raise ConfigError(f"{path} ends in neither .mp4 nor .gif. Give one of them.")


def write_gif(path: Path, frames: Iterable[NDArray[np.uint8]], *, rate: int) -> None:
    """Write an endless animation of ``[H, W, 3]`` uint8 frames, with one palette for steady colours."""
    pictures = list(frames)
    palette = _palette(pictures)
    drawn = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in pictures]
    shown = [1000 // rate] * (len(drawn) - 1) + [_LAST_SHOWN]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=shown, loop=0, optimize=True)


def _palette(frames: list[NDArray[np.uint8]]) -> Image.Image:
    every = max(1, round(math.sqrt(sum(frame.size // 3 for frame in frames) / _PALETTE_PIXELS)))
    chosen = [frame[i % every :: every, i // every % every :: every] for i, frame in enumerate(frames)]
    chosen = [part.reshape(-1, 1, 3) for part in chosen]
    kept = Image.Quantize.MAXCOVERAGE  # Keeps the colours of small objects, unlike the usual median cut.
    return Image.fromarray(np.concatenate(chosen)).quantize(256, kept, kmeans=3)


class Mp4Writer(AbstractContextManager["Mp4Writer"]):
    """Writes a movie in H.264 frame by frame, as a context manager."""

    def __init__(self, path: Path, *, rate: Fraction, options: dict[str, str] | None = None) -> None:
        require_mp4(path)
        import av  # pyright: ignore[reportMissingImports]

        self._container: Any = av.open(str(path), "w")
        self._rate, self._options = rate, options or {}
        self._stream: Any = None

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame ``[H, W, 3]`` of the first one's size; an odd last row or column is left out."""
        import av  # pyright: ignore[reportMissingImports]

        even = np.ascontiguousarray(frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2])
        if self._stream is None:
            self._stream = self._container.add_stream("libx264", rate=self._rate, options=self._options)
            self._stream.height, self._stream.width, self._stream.pix_fmt = *even.shape[:2], "yuv420p"
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._container:
            if self._stream is not None and kind is None:
                self._container.mux(self._stream.encode())
