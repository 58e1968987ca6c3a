"""Let torchrun wait for the ranks that a signal ends in order, and end without its traceback.

torchrun gives the ranks 30 s, less than a policy of full size takes to save, and prints a traceback below
their last lines. torchrun loads the entry points of ``torchrun.handlers`` from every installed package; this
one offers no rendezvous, but changes timeout and output if torchrun starts asyncrl's own script.
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
"""Environment variable of torchrun, from torch 2.12: seconds that ranks have after a signal."""
WAIT_SECONDS: Final = 3600  # By default: more than the ranks' own deadlines. A second signal ends them
IMPATIENT_SECONDS: Final = 1  # after a second signal
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
PACKAGE = Path(__file__).resolve().parents[1]
WRONG_SETTINGS: Final = 2  # exit code of a ConfigError
SIGNAL_EXCEPTION: Final = "SignalException"  # torchrun's


def rendezvous_handler() -> Callable[..., NoReturn]:
    """Patch the torchrun process that loads this; the returned rendezvous back-end only raises."""
    if starts_asyncrl(sys.argv):
        sys.excepthook = quiet_after_signals(sys.excepthook)
        os.environ.setdefault(WAIT, str(WAIT_SECONDS))
        try:
            _change_agent()
        except (ImportError, AttributeError) as error:
            print(f"asyncrl: torchrun of this torch ends runs in its own way: {error}", file=sys.stderr)
    return _no_rendezvous


def starts_asyncrl(command: Sequence[str]) -> bool:
    """Return True if a torchrun command starts a script of `torchrun_scripts`, or ``-m asyncrl``."""
    for option, argument in pairwise(command):
        if option in ("-m", "--module") and argument == PACKAGE.name:
            return True
        script = Path(argument)
        if script.suffix == ".sh" and script.resolve().parent == PACKAGE.parent / "torchrun_scripts":
            return True
    return False


def _change_agent() -> None:
    """Patch torchrun's agent: no restart after wrong settings, a line at its last wait, `patient` close."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import PContext

    knows = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)  # The variable `WAIT`.
    PContext.close = patient(PContext.close, None if knows else int(os.environ[WAIT]))
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    agents: Any = LocalElasticAgent
    monitor, barrier = agents._monitor_workers, agents._exit_barrier

    def monitored(agent: Any, *group: Any) -> Any:
        result = monitor(agent, *group)
        if any(failure.exitcode == WRONG_SETTINGS for failure in result.failures.values()):
            agent._remaining_restarts = 0
        return result

    def waited(agent: Any) -> None:
        if agent.get_worker_group().group_world_size > 1:
            seconds = getattr(agent, "_exit_barrier_timeout", 300)
            print(f"asyncrl: done here; torchrun waits up to {seconds:.0f} s for the other hosts", flush=True)
        barrier(agent)

    agents._monitor_workers, agents._exit_barrier = monitored, waited


def patient(close: Callable[[Any, Signals | None, int], None], seconds: int | None) -> Callable[..., None]:
    """Wrap torchrun's `close(ranks, signal, seconds)` so that a second signal keeps the first one's wait."""
    waited = False

    def wait(ranks: Any, death_sig: Signals | None = None, timeout: int = 30) -> None:
        nonlocal waited
        if type(sys.exc_info()[1]).__name__ == SIGNAL_EXCEPTION:
            first = timeout if seconds is None else seconds
            timeout, waited = IMPATIENT_SECONDS if waited else first, True
        close(ranks, death_sig, timeout)

    return wait


def quiet_after_signals(before: _Hook, leave: Callable[[int], Any] = os._exit) -> _Hook:
    """Return an excepthook that ends the process without a traceback after a signal."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        number = getattr(error, "sigval", None)
        if kind.__name__ != SIGNAL_EXCEPTION or number is None:
            before(kind, error, trace)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        leave(128 + int(number))  # As shells report a signal.

    return hook


def _no_rendezvous(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("asyncrl has no rendezvous back-end. Leave --rdzv-backend at its default.")
