"""Child processes whose slow imports are done: one server imports them, and every child is a fork of it."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
"""Its processes have the environment that the tests began with."""
FORKS.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "asyncrl.learner.ranks",
        "asyncrl.learner.fsdp",
        "asyncrl.learner.update",
        "asyncrl.weights.publisher",
        "asyncrl.weights.receiver",
    ]
)
