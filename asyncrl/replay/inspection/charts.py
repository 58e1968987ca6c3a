"""Named bars in, a picture with one panel per topic out. Pillow only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from asyncrl.replay.inspection.drawing import BLUE, FAINT, INK, PAPER, fitted, font

WIDTH, MARGIN, ROW = 760, 16, 22
"""Pixels: of the picture, around it, and per bar."""
NAMES, NUMBERS = 280, 110
"""Pixels for the names at the left and the numbers at the right."""
TITLE = 30


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a panel."""

    name: str
    value: float
    text: str
    """What stands at the right of the bar."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars of one topic and one unit."""

    title: str
    bars: Sequence[Bar]
    full: float = 0.0
    """Value of a bar over the whole width; 0: the largest one's."""

    @property
    def most(self) -> float:
        """Value of a bar over the whole width; positive."""
        return self.full or max((bar.value for bar in self.bars), default=0.0) or 1.0


def draw_panels(heading: str, panels: Sequence[Panel]) -> Image.Image:
    """Draw panels below each other."""
    heights = [TITLE + ROW * len(panel.bars) + MARGIN for panel in panels]
    picture = Image.new("RGB", (WIDTH, TITLE + 2 * MARGIN + sum(heights)), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN), fitted(heading, WIDTH - 2 * MARGIN, 19), fill=INK, font=font(19))
    top = TITLE + 2 * MARGIN
    for panel, height in zip(panels, heights, strict=True):
        _draw_panel(draw, panel, top)
        top += height
    return picture


def _draw_panel(draw: ImageDraw.ImageDraw, panel: Panel, top: int) -> None:
    draw.text((MARGIN, top), panel.title, fill=INK, font=font(16))
    left, right = MARGIN + NAMES, WIDTH - MARGIN - NUMBERS
    for place, drawn in enumerate(panel.bars):
        y = top + TITLE - 4 + place * ROW
        draw.text((MARGIN, y), fitted(drawn.name, NAMES - 10, 14), fill=INK, font=font(14))
        draw.rectangle((left, y + 2, right, y + ROW - 6), fill=FAINT)
        if drawn.value > 0:
            end = left + max(1, round((right - left) * min(1.0, drawn.value / panel.most)))
            draw.rectangle((left, y + 2, end, y + ROW - 6), fill=BLUE)
        draw.text((right + 10, y), drawn.text, fill=INK, font=font(14))
