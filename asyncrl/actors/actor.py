"""The actor: newest weights + start states in, imagined episodes out.

consumes   weights      waits for: version 0           ended by: the learner publishes or leaves, deadline
consumes   grants       waits for: credit              ended by: the learner uses a batch, or the run stops
produces   episodes     never waits: the replay port keeps them until they are durable
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.actors.imagine import Imagination
from asyncrl.actors.slots import Slots, finished_episode
from asyncrl.replay.ports import ActorPort, RunStopped
from asyncrl.weights.interface import ChannelClosed, Receiver
from asyncrl.worlds.start_states import StartStateStream

CREDIT_WAIT = 0.2
"""Seconds an idle actor waits for credit before it looks at its messages and weights again."""
REPORT_EVERY = 2.0
"""Seconds between two reports of the share of time spent waiting."""
WEIGHTS_DEADLINE = 300.0
"""Seconds until the first weights must have arrived; the learner may still be loading its models."""


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """Numbers of one actor."""

    name: str
    slots: int
    group_size: int
    max_decisions: int
    success_threshold: float
    run_seed: int


class Actor:
    """Imagines episodes until the run stops. Weights change only between two decisions."""

    def __init__(
        self,
        imagination: Imagination[Any],
        starts: StartStateStream,
        port: ActorPort,
        receiver: Receiver,
        settings: ActorSettings,
    ) -> None:
        self.imagination = imagination
        self.starts = starts
        self.port = port
        self.receiver = receiver
        self.settings = settings
        self.slots = Slots(settings.slots, run_seed=settings.run_seed)
        self.version = -1
        self._waited = 0.0
        self._reported = time.monotonic()

    def run(self, leaving: Callable[[], bool] = lambda: False) -> None:
        """Imagine until the replay (or, before there are weights, the learner) says that the run is over.

        Args:
            leaving: Asked between two decisions; True ends this actor only.
        """
        try:
            self.version = self.receiver.wait_for_first(WEIGHTS_DEADLINE)
            while not (self.port.stopped or leaving()):
                self.round()
        except (ChannelClosed, RunStopped):
            return

    def round(self, wait: float = CREDIT_WAIT) -> bool:
        """Take news, refill, make one decision in every live slot, hand over what is finished.

        Returns:
            False when there was nothing to imagine: no episode under way or pending, and no credit.
        """
        self.port.serve()
        self._report()
        self.version = self.receiver.swap_into(self.imagination.policy.acting_tensors())
        self._acquire(0.0)
        places = self.slots.fill(self.version)
        if places:
            self.imagination.begin(self.slots, places)
        if not self.slots.live:
            self._idle(wait)
            return bool(self.slots.pending)
        self.imagination.step(self.slots, self.version)
        self._hand_over()
        return True

    def _acquire(self, wait: float) -> None:
        while self.slots.wanted:
            grant = self.port.acquire_group(wait)
            if grant is None:
                return
            self.slots.add_group(grant, self.starts[grant.number], self.settings.group_size)

    def _idle(self, wait: float) -> None:
        """Nothing to imagine: wait for credit, or (holding a grant) for the policy version it asks for."""
        began = time.monotonic()
        if self.slots.pending:
            self.receiver.wait_newer(self.version, wait)
        else:
            self._acquire(wait)
        self._waited += time.monotonic() - began

    def _hand_over(self) -> None:
        sampling, settings = self.imagination.sampling, self.settings
        for index in self.slots.live:
            episode = finished_episode(
                self.slots.slot(index),
                threshold=settings.success_threshold,
                max_decisions=settings.max_decisions,
                group_size=settings.group_size,
                actor=settings.name,
                world_version=self.imagination.world.version,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
            )
            if episode is not None:
                self.slots.clear(index)
                self.port.push(episode)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY:
            self.port.report_waiting(min(1.0, self._waited / (now - self._reported)))
            self._waited, self._reported = 0.0, now
