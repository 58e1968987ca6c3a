"""A movie has one palette: what rests keeps its colour, and small coloured things keep theirs."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from asyncrl.storage.media import write_gif


def table_with_a_moving_cube(frames: int) -> np.ndarray:
    """A grey table with soft shades, on which a red square of 6 pixels moves: ``[F, 64, 64, 3]``."""
    rows, columns = np.mgrid[:64, :64]
    table = np.full((64, 64, 3), (74, 70, 66), np.uint8)
    table[:20] = (40 + rows[:20] + columns[:20])[..., None].astype(np.uint8)  # An arm of many greys.
    movie = np.repeat(table[None], frames, 0)
    for number, frame in enumerate(movie):
        frame[40:46, number : number + 6] = (200, 30, 30)
        frame[50:54, 30:34] = (250, 240, 20) if number == 5 else (74, 70, 66)  # It flashes once.
        frame[22:26] = (number * 5, 255 - number * 5, 128)  # Something whose colour changes all the time.
    return movie


def test_a_movie_keeps_steady_and_small_colours_with_one_palette(tmp_path: Path) -> None:
    write_gif(tmp_path / "movie.gif", table_with_a_moving_cube(48), rate=10)
    with Image.open(tmp_path / "movie.gif") as gif:
        shown, shown_for = [], []
        for frame in ImageSequence.Iterator(gif):
            shown.append(np.asarray(frame.convert("RGB")))
            shown_for.append(frame.info["duration"])
    assert len(shown) == 48
    assert shown_for == [100] * 47 + [2000], "its end can be read before it begins again"
    assert np.abs(shown[5][52, 32].astype(int) - (250, 240, 20)).max() <= 12
    greys = {tuple(frame[60, 60].tolist()) for frame in shown}
    assert len(greys) == 1
    assert np.abs(np.subtract(greys.pop(), (74, 70, 66))).max() <= 4
    for number, frame in enumerate(shown):
        assert np.abs(frame[43, number + 3].astype(int) - (200, 30, 30)).max() <= 12
    content = (tmp_path / "movie.gif").read_bytes()
    heads = [i for i in range(len(content) - 10) if content[i] == 0x2C and content[i - 9 : i - 7] == b"!\xf9"]
    assert content[10] & 0x80, "a global palette"
    local = sum(content[i + 9] >> 7 for i in heads)  # The flag of a local colour table in a frame's header.
    assert not local, f"{local} frames have a palette of their own"
