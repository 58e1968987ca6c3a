"""Every error a user can meet, and what each one means.

    AsyncRLError
    ├── ConfigError          a flag, a configuration file or a placement that cannot work (exit code 2)
    │   ├── CheckpointError  a weight file or checkpoint that is missing, truncated or of the wrong shape
    │   └── AssetError       start states, world-model files or a library to draw with that could not be found
    ├── WireError            a message that does not follow the wire format
    ├── ReplayError          the replay store or its service cannot do what was asked
    │   ├── DiskFull         a group could not be written for lack of space; the replay waits for it
    │   ├── OutOfFiles       nor written or read, for the process may open no more files; likewise
    │   ├── CodecMissing     a compressed file or --codec needs a package that is not installed
    │   └── SampleTimeout    no complete, fresh groups arrived before the deadline
    ├── WeightSyncError      new weights did not arrive in time
    └── RunError             a run cannot go on (an actor died too often, too many bad updates)
        └── AttemptEnded     the run was started again; this process belongs to an earlier start of it

A message says what was set or seen, why it cannot work, and what to do.
"""


class AsyncRLError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A setting that cannot work. A `ValueError`, so that tyro prints it in a box and exits with 2."""


class CheckpointError(ConfigError):
    """A checkpoint or weight file is missing, truncated, or does not fit the model."""


class AssetError(ConfigError):
    """A file or library that what was set needs is not there."""


class WireError(AsyncRLError):
    """A message does not follow the wire format."""


class ReplayError(AsyncRLError):
    """The replay cannot do what was asked."""


class DiskFull(ReplayError):
    """There is no space for a group. Nothing was written; it can be tried again."""


class OutOfFiles(ReplayError):
    """No file can be opened now. Nothing was written, and no file is damaged; it can be tried again."""


class CodecMissing(ReplayError):
    """A codec of compressed files is not installed. The files are sound."""


class SampleTimeout(ReplayError):
    """The replay had too few complete, fresh groups before the deadline."""

    def __init__(self, message: str, *, groups: int = 0, episodes: int = 0, decisions: int = 0) -> None:
        """Say how far the batch is, as far as that is known; see `replay.interface.Filling`."""
        super().__init__(message)
        self.groups, self.episodes, self.decisions = groups, episodes, decisions


class WeightSyncError(AsyncRLError):
    """Weights were not exchanged before the deadline."""


class RunError(AsyncRLError):
    """The run as a whole cannot go on."""


class AttemptEnded(RunError):
    """The run was started again: what this process holds of the earlier start counts no more."""

    def __init__(self, who: str, attempt: int) -> None:
        """Say who told, and which start of the run there is now."""
        super().__init__(f"{who} belongs to start {attempt} of the run, this process to an earlier one.")
        self.attempt = attempt


def first_line(error: object, longest: int = 200) -> str:
    """Shorten an error to its first line, of at most `longest` characters; one without text to its name."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:longest]
