"""`asyncrl` and `python -m asyncrl`: prepare the process, then import and run the command."""

import _signal  # pyright: ignore[reportMissingImports]  # Built in: `signal` takes a millisecond to import.


def start(*command: str) -> None:
    """Run this process's command line, which begins with `command`; a signal prints one line."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Python's own shows a traceback.
    import os
    import sys

    from asyncrl.errors import end_at_once, handle_signals

    handle_signals(end_at_once)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # Closed: the next file would take its number, and get what is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    from asyncrl.cli import program

    program(*command)


if __name__ == "__main__":
    start()
