"""The rounds of --pace.every in a run with --inline: the fitter takes its turn between two updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import Imagination
from asyncrl.config.run import TrainConfig
from asyncrl.launch import refits
from asyncrl.launch.environment import EnvironmentFiles
from asyncrl.launch.fitter import metrics_of
from asyncrl.observability import metrics_pace as m
from asyncrl.observability.metrics import Metric
from asyncrl.pace import rounds
from asyncrl.weights import packing


class InlineRefits:
    """Makes a round as soon as the actor holds the policy version that it is about."""

    def __init__(
        self,
        config: TrainConfig,
        files: EnvironmentFiles,
        run_dir: Path,
        device: torch.device,
        stack: ExitStack,
        note: Callable[[dict[Metric, float]], None],
        tell: Callable[[str], None],
    ) -> None:
        """Begin behind the rounds that the run has.

        Args:
            config: Of the run.
            files: Of what it imagines with.
            run_dir: Its folder.
            device: Of all models.
            stack: Ends the simulators.
            note: Given what stands in every later row.
            tell: Given a line per round.
        """
        self._config, self._run_dir, self._note, self._tell = config, run_dir, note, tell
        self._fitter = refits.open_fitter(config, files, run_dir, device, stack)
        self._seen = -1
        """Policy version of the last turn."""

    def turn(self, actor: Actor) -> None:
        """Make the round of the policy version that the learner has just published, if it is due."""
        acting = actor.acting
        assert isinstance(acting, Imagination)
        version = actor.receiver.swap_into(lambda: dict(acting.policy.acting_tensors()))
        if version == self._seen:
            return
        self._seen = version
        if self._fitter.due(version):
            self._tell(f"refit: {self._fitter.round(version, acting.policy)}")
        present = self._fitter.present
        if present.version > acting.version:
            tensors = refits.tensors_of(self._config, present, acting.world.device)
            packing.fill(dict(acting.refreshed_tensors()), tensors)
            acting.note_refreshed(present.version)
        if made := rounds.read(self._run_dir):
            spent = sum(row.episodes for row in made)
            self._note({**metrics_of(made[-1], spent), m.WORLD_VERSION: float(present.version)})
