"""Every error that a user can meet. Its message names the input, the reason, and the remedy."""

import os
import signal
from collections.abc import Callable
from types import FrameType


class AsyncRLError(Exception):
    """Base of all errors that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A flag, file or placement that cannot work (exit code 2). A `ValueError`, for tyro's box."""


class CheckpointError(ConfigError):
    """A checkpoint or weight file is missing, truncated, or does not fit the model."""


class AssetError(ConfigError):
    """A file or library that the settings need is missing."""


class WireError(AsyncRLError):
    """A message does not follow the wire format."""


class ReplayError(AsyncRLError):
    """The replay cannot serve a request."""


class DiskFull(ReplayError):
    """There is no space for a group, so nothing was written; the replay waits for space."""


class OutOfFiles(ReplayError):
    """No file can be opened now for lack of descriptors; the replay waits for one."""


class CodecMissing(ReplayError):
    """A codec of compressed files is not installed. The files are sound."""


class SampleTimeout(ReplayError):
    """The replay had too few complete, fresh groups before the deadline."""

    def __init__(self, message: str, *, groups: int = 0, episodes: int = 0, decisions: int = 0) -> None:
        super().__init__(message)
        self.groups, self.episodes, self.decisions = groups, episodes, decisions


class WeightSyncError(AsyncRLError):
    """Weights were not exchanged before the deadline."""


class RunError(AsyncRLError):
    """The run as a whole cannot go on."""


class AttemptEnded(RunError):
    """The run was started again, and this process belongs to an earlier start."""

    def __init__(self, who: str, attempt: int) -> None:
        super().__init__(f"{who} belongs to start {attempt} of the run, this process to an earlier one.")
        self.attempt = attempt


def first_line(error: object, longest: int = 200) -> str:
    """Return an error's first line, at most `longest` characters; its type if it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:longest]


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Install a handler for the signals that end a command; SIGHUP stays ignored under `nohup`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def end_at_once(number: int, frame: FrameType | None = None) -> None:
    """Handle a signal: print one line, then end the process (no exit handlers) and its children."""
    try:
        os.write(2, b"\n" * os.isatty(2) + b"asyncrl: interrupted\n")
    finally:
        os._exit(128 + number)
