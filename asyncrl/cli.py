"""The command line: `asyncrl COMMAND ...`. Starts fast: a command's code is imported only when it runs."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from asyncrl import __version__
from asyncrl.commands import COMMANDS
from asyncrl.errors import AsyncRLError, ConfigError, end_at_once, first_line, handle_signals
from asyncrl.observability.signals import expect_exit, interrupt, repeat_lost


def usage() -> str:
    """Return the text of `asyncrl --help`, wrapped to a terminal."""
    from asyncrl.observability.terminal import hanging

    rows = "\n".join(hanging(f"  {name:<10} ", about(name)) for name in COMMANDS)
    return (
        f"asyncrl {__version__}: reinforcement learning of robot policies inside world models\n\n"
        f"usage: asyncrl COMMAND [arguments]\n\n{rows}\n\n"
        "`asyncrl COMMAND --help` explains a command. Begin with: asyncrl train"
    )


def about(command: str) -> str:
    """Return description and arguments of a command from its module's docstring, without importing it."""
    spec = find_spec(COMMANDS[command].partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    row = next(line for line in text.splitlines() if line.startswith(f"`asyncrl {command}"))
    call, _, what = row.partition("`: ")
    arguments = call.removeprefix(f"`asyncrl {command}").strip()
    return f"{what.rstrip('.')}{': ' if arguments else ''}{arguments}"


def program(*command: str) -> NoReturn:
    """Run the command line of this process, whose first words are `command`, and end with its code."""
    sys.unraisablehook = repeat_lost
    try:
        try:
            handle_signals(interrupt)
            code = main([*command, *sys.argv[1:]])
        except SystemExit as ended:  # tyro's, after --help or a wrong flag.
            code = int(ended.code or 0)
        finally:
            handle_signals(end_at_once)
    except KeyboardInterrupt as ended:  # Before or behind the command.
        end_at_once(ended.args[0] if ended.args else signal.SIGINT)
        raise
    raise SystemExit(expect_exit(code))


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit code, as `run`."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _answered("", lambda: print(usage())) or (0 if arguments else 2)
    if arguments[0] == "--version":
        return _answered("", lambda: print(f"asyncrl {__version__}"))
    return run(arguments[0], arguments[1:])


def run(command: str, arguments: list[str]) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 invalid input."""
    return _answered(f" {command}", lambda: _call(command, arguments))


def _call(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Perhaps you meant `asyncrl {near[0]}`." if near else f"There are: {', '.join(COMMANDS)}."
        raise ConfigError(f"there is no command {command!r}. {hint}")
    # Read as torch is imported. Threads of several processes on few cores mostly wait for each other.
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    module, function = COMMANDS[command].split(":")
    return int(getattr(import_module(module), function)(arguments) or 0)


def _answered(name: str, action: Callable[[], int | None]) -> int:
    try:
        try:
            return action() or 0
        finally:
            sys.stdout.flush()  # Errors appear here, not while Python ends.
    except AsyncRLError as error:
        sentence, code = str(error), 2 if isinstance(error, ConfigError) else 1
        notes = getattr(error, "__notes__", ())
    except KeyboardInterrupt as ended:
        sentence = "; ".join(["interrupted", *getattr(ended, "__notes__", ())])
        code, notes = 128 + (ended.args[0] if ended.args else signal.SIGINT), ()
    except BrokenPipeError:  # The reader has left, like `head`.
        _give_up_output()
        return NOBODY_READS
    except Exception as error:
        found = leftover(error)
        if not found or os.environ.get(TRACEBACK):
            raise
        (sentence, code), notes = found, getattr(error, "__notes__", ())
        if isinstance(error, OSError) and error.filename is None:
            _give_up_output()
    with contextlib.suppress(OSError, AttributeError, ValueError):
        text = "\n".join((f"asyncrl{name}: {sentence}", *notes))
        print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)
    return code


def _give_up_output() -> None:
    for stream in (sys.stdout, sys.stderr):  # So that it cannot raise while Python ends.
        try:
            stream.flush()
        except (OSError, AttributeError, ValueError):
            with contextlib.suppress(OSError, AttributeError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


NOBODY_READS: Final = 141  # exit code when the output's reader has left: 128 + SIGPIPE
TRACEBACK: Final = "ASYNCRL_TRACEBACK"  # environment variable that shows the traceback of a `leftover`
_OF_THE_INPUT: Final = (
    *(errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.ENOTEMPTY, errno.EXDEV),
)
_OF_THE_HOST: Final = {
    errno.ENOSPC: "Free disk space.",
    errno.EDQUOT: "Free disk space, or have the quota raised.",
    errno.EIO: "The disk reports an error: see `dmesg`.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n 65536.",
    errno.ENFILE: "The host has too many open files.",
    errno.ENOMEM: "Free memory, or make the run smaller.",
    errno.EAGAIN: "Raise the limit of processes: ulimit -u.",
    errno.ESTALE: "The network file system lost the file: run the command again.",
}


def leftover(error: Exception) -> tuple[str, int] | None:
    """Return message and exit code for a library's error that input or host caused; None for a bug."""
    what = first_line(error)
    how = f"Set {TRACEBACK}=1 to see where."
    if isinstance(error, OSError) and error.errno in _OF_THE_HOST:
        return f"{what}. {_OF_THE_HOST[error.errno or 0]}", 1
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_THE_INPUT:
        where = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
        return f"{where[:200]} cannot be used: {error.strerror}. Check the path. {how}", 2
    if isinstance(error, UnicodeError):
        return f"a name or a file is not UTF-8 text ({what}). Write it again. {how}", 2
    if isinstance(error, OverflowError):
        return f"a number is too large to compute with ({what}). Use a smaller one. {how}", 2
    if isinstance(error, RecursionError):
        return f"a file has more levels than can be read ({what}). {how}", 2
    allocation = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch's.
    if isinstance(error, MemoryError) or allocation or type(error).__name__ == "OutOfMemoryError":
        return f"there is not enough memory ({what}). Use smaller numbers or a larger host. {how}", 1
    return None
