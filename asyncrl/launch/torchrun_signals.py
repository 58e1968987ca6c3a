"""Let torchrun end without its traceback when a signal ended the run in order.

torchrun turns Ctrl-C and SIGTERM into an exception, waits for the ranks, which save and say how to go on, and
then prints 24 lines of traceback below that. A rank cannot change what its parent prints; but torchrun loads
the entry points of the group ``torchrun.handlers`` from every installed package, meant for rendezvous
back-ends. This is one of them: it offers none, and where torchrun starts asyncrl's own script, and nowhere
else, it puts a quiet end in the place of the traceback. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
PACKAGE = Path(__file__).resolve().parents[1]


def rendezvous_handler() -> Callable[..., NoReturn]:
    """Prepare the process that loads this, and return a rendezvous back-end that only says what it is."""
    if starts_asyncrl(sys.argv):
        sys.excepthook = quiet_after_signals(sys.excepthook)
    return _no_rendezvous


def starts_asyncrl(command: Sequence[str]) -> bool:
    """Tell whether a torchrun command starts asyncrl: a script of `torchrun_scripts`, or ``-m asyncrl``.

    Args:
        command: ``sys.argv`` of torchrun.
    """
    for option, argument in pairwise(command):
        if option in ("-m", "--module") and argument == PACKAGE.name:
            return True
        script = Path(argument)
        if script.suffix == ".sh" and script.resolve().parent == PACKAGE.parent / "torchrun_scripts":
            return True
    return False


def quiet_after_signals(before: _Hook, leave: Callable[[int], Any] = os._exit) -> _Hook:
    """Return what ends the process when an exception reached its top.

    Args:
        before: Does that for all but signals.
        leave: Ends the process with an exit code.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        number = getattr(error, "sigval", None)
        if kind.__name__ != "SignalException" or number is None:
            before(kind, error, trace)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        leave(128 + int(number))  # As a shell says that a signal ended something.

    return hook


def _no_rendezvous(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("asyncrl has no rendezvous back-end. Leave --rdzv-backend at its default.")
