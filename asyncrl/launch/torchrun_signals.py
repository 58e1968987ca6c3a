"""Let torchrun wait for the ranks that a signal ends in order, and end without its traceback.

torchrun turns Ctrl-C and SIGTERM into an exception, gives the ranks 30 s, in which they save and say how to
go on, and then prints 24 lines of traceback below that. A policy of full size takes longer to save. A rank
cannot change what its parent does; but torchrun loads the entry points of the group ``torchrun.handlers``
from every installed package, meant for rendezvous back-ends. This is one of them: it offers none, and where
torchrun starts asyncrl's own script, and nowhere else, it changes the time and what is printed. Imports
nothing that torchrun has not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Final, NoReturn

WAIT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun, from torch 2.12: seconds that ranks have which a signal ends."""
WAIT_SECONDS: Final = 3600
"""What it is where the user says nothing: more than the ranks' own deadlines. A second signal ends them."""
IMPATIENT_SECONDS: Final = 1
"""What they are at a second signal."""
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
PACKAGE = Path(__file__).resolve().parents[1]
SIGNAL_EXCEPTION: Final = "SignalException"
"""What torchrun raises where a signal came."""


def rendezvous_handler() -> Callable[..., NoReturn]:
    """Prepare the process that loads this, and return a rendezvous back-end that only says what it is."""
    if starts_asyncrl(sys.argv):
        sys.excepthook = quiet_after_signals(sys.excepthook)
        os.environ.setdefault(WAIT, str(WAIT_SECONDS))
        _wait_for_ranks()
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


def _wait_for_ranks() -> None:
    """Let torchrun wait as long as the variable says, which versions before 2.12 do not, and only once."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import PContext

    knows = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    PContext.close = patient(PContext.close, None if knows else int(os.environ[WAIT]))


def patient(close: Callable[[Any, Signals | None, int], None], seconds: int | None) -> Callable[..., None]:
    """Return what ends the ranks of a host as `close` does, but waits for them as a user expects.

    At a second signal torchrun would begin its wait for the first one again.

    Args:
        close: Given the ranks, a signal for them, and the seconds after which they are killed.
        seconds: What these are where a signal came; None: as torchrun says.
    """
    waited = False

    def wait(ranks: Any, death_sig: Signals | None = None, timeout: int = 30) -> None:
        nonlocal waited
        if type(sys.exc_info()[1]).__name__ == SIGNAL_EXCEPTION:
            first = timeout if seconds is None else seconds
            timeout, waited = IMPATIENT_SECONDS if waited else first, True
        close(ranks, death_sig, timeout)

    return wait


def quiet_after_signals(before: _Hook, leave: Callable[[int], Any] = os._exit) -> _Hook:
    """Return what ends the process when an exception reached its top."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        number = getattr(error, "sigval", None)
        if kind.__name__ != SIGNAL_EXCEPTION or number is None:
            before(kind, error, trace)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        leave(128 + int(number))  # As a shell says that a signal ended something.

    return hook


def _no_rendezvous(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("asyncrl has no rendezvous back-end. Leave --rdzv-backend at its default.")
