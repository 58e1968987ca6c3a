"""Read the movies of a LeRobot v3 folder, from front to back: a file holds several episodes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.datasets.pictures import Placing
from asyncrl.storage.regular_files import open_regular


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    from av.error import FFmpegError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except ConfigError:
        raise
    except (FFmpegError, OSError, ValueError, TypeError, IndexError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read ({first_line(error)}). Download or write the data set again."
        ) from error


class Movie:
    """One camera's movie, opened at its first frame."""

    def __init__(self, path: Path, size: tuple[int, int], rate: float, placing: Placing) -> None:
        """Open it.

        Args:
            size: Height and width that its frames must have, in pixels.
            rate: Frames per second.
        """
        import av  # pyright: ignore[reportMissingImports]

        self.path = path
        self._size, self._rate, self._placing = size, rate, placing
        with _reading(path):
            # A handle instead of a name: what the file says can then lead to no other file.
            self._raw = io.FileIO(open_regular(path), "rb")
            try:
                self._container: Any = av.open(self._raw, format="mp4")
                stream = self._container.streams.video[0]
                self._check(stream.height, stream.width)
                stream.thread_type = "AUTO"
                self._frames: Iterator[Any] = self._container.decode(stream)
            except BaseException:
                self._raw.close()
                raise
        self._frame: Any = None
        self._at = -1.0
        """Seconds of the frame that was decoded last."""

    def read(self, begin: float, steps: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        """Decode some frames of an episode.

        Args:
            steps: ``[n]`` of the episode, rising.
            into: ``[n, H, W, 3]`` of the placed frames, which are written to it.
        """
        with _reading(self.path):
            for place, step in enumerate(steps.tolist()):
                into[place] = self._placing.place(self._frame_at(begin + step / self._rate))

    def _frame_at(self, seconds: float) -> NDArray[np.uint8]:
        tolerance = 0.5 / self._rate
        while self._at < seconds - tolerance:
            self._frame = next(self._frames, None)
            if self._frame is None or self._frame.time is None:
                raise ValueError(f"it has no frame at {seconds:.3f} s")
            self._at = float(self._frame.time)
        if self._at > seconds + tolerance:
            raise ValueError(f"it has no frame at {seconds:.3f} s, the next is at {self._at:.3f} s")
        self._check(self._frame.height, self._frame.width)
        return self._frame.to_ndarray(format="rgb24")

    def _check(self, height: int, width: int) -> None:
        if (height, width) != self._size:
            raise ValueError(
                f"its frames have {height} x {width} pixels, but meta/info.json says "
                f"{self._size[0]} x {self._size[1]}"
            )

    def close(self) -> None:
        """Close the file."""
        self._container.close()
        self._raw.close()
