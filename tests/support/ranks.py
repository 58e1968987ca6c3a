"""Learner ranks for tests: `run_ranks(function, ...)` calls it in N processes that form a gloo group.

The function is importable; what it returns can be pickled, and is returned in the ranks' order.
"""

import faulthandler
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
"""Its processes are forks of one whose slow imports are done, of the tests' first environment."""
_LEARNER = ("torch.distributed.fsdp", "asyncrl.learner.fsdp", "asyncrl.launch.build", "asyncrl.replay.server")
_LAYERS = ("llama.modeling_llama", "siglip.modeling_siglip")
_LAYERS += ("dinov2_with_registers.modeling_dinov2_with_registers",)
_WEIGHTS = ("asyncrl.weights.publisher", "asyncrl.weights.receiver")
_MODELS = ("asyncrl.policies.openvla.policy", "peft", *(f"transformers.models.{name}" for name in _LAYERS))
FORKS.set_forkserver_preload(["pytest", *_LEARNER, *_WEIGHTS, *_MODELS])


def run_ranks(
    function: Callable[..., Any], *arguments: Any, ranks: int = 2, deadline: float = 60.0
) -> list[Any]:
    """Call `function(*arguments)` on every rank; an error or a missing answer fails with the traceback."""
    answers = FORKS.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes: list[BaseProcess] = [
            FORKS.Process(target=_rank, args=(answers, store, rank, ranks, deadline, function, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            found = dict(pickle.loads(answers.get(timeout=deadline)) for _ in range(ranks))
        except Empty:
            states = ["runs" if one.is_alive() else f"ended with {one.exitcode}" for one in processes]
            raise AssertionError(f"no answer of all {ranks} ranks within {deadline:g} s: {states}") from None
        finally:
            for process in processes:
                process.join(2.0)
                process.kill()
    failed = [text for text in found.values() if isinstance(text, _Failed)]
    assert not failed, "\n".join(map(str, failed))
    return [found[rank] for rank in range(ranks)]


class _Failed(str):
    """A traceback."""


def _rank(
    answers: Any,
    store: str,
    rank: int,
    ranks: int,
    deadline: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    faulthandler.dump_traceback_later(0.8 * deadline)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    try:
        # As bytes: the queue itself would lend tensors from a process that has ended when they are read.
        answers.put(pickle.dumps((rank, function(*arguments))))
    except BaseException:
        answers.put(pickle.dumps((rank, _Failed(f"rank {rank}: {traceback.format_exc()}"))))
        sys.stderr.flush()
    finally:
        dist.destroy_process_group()
