"""Every error that a user can meet. Its message names the input, the reason, and the remedy.

AsyncRLError
├── ConfigError          a flag, a configuration file or a placement that cannot work (exit code 2)
│   ├── CheckpointError  a weight file or checkpoint that is missing, truncated or of the wrong shape
│   └── AssetError       start states, world-model files or a library that could not be found
├── WireError            a message that does not follow the wire format
├── ReplayError          the replay store or its service cannot do what was asked
│   ├── DiskFull         a group could not be written for lack of space; the replay waits for it
│   ├── OutOfFiles       a file could not be opened for lack of descriptors; likewise
│   ├── CodecMissing     a compressed file or --codec needs a package that is not installed
│   └── SampleTimeout    no complete, fresh groups arrived before the deadline
├── WeightSyncError      new weights did not arrive in time
└── RunError             a run cannot go on (an actor died too often, too many bad updates)
    └── AttemptEnded     the run was started again; this process belongs to an earlier start of it
"""


class AsyncRLError(Exception):
    """Base of all errors that asyncrl raises on purpose."""


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
        """Record how much of the batch is there, as in `replay.interface.Filling`."""
        super().__init__(message)
        self.groups, self.episodes, self.decisions = groups, episodes, decisions


class WeightSyncError(AsyncRLError):
    """Weights were not exchanged before the deadline."""


class RunError(AsyncRLError):
    """The run as a whole cannot go on."""


class AttemptEnded(RunError):
    """The run was started again, and this process belongs to an earlier start."""

    def __init__(self, who: str, attempt: int) -> None:
        """Name the sender, and the number of the present start."""
        super().__init__(f"{who} belongs to start {attempt} of the run, this process to an earlier one.")
        self.attempt = attempt


def first_line(error: object, longest: int = 200) -> str:
    """Return an error's first line, at most `longest` characters; without text its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:longest]
