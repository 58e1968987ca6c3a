"""All roles in one process, in turns: the learner's wait for a batch is the actor's time to imagine.

So the lag is exactly --replay.max-lag once that many batches are ahead, and a run repeats itself exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncrl.actors.actor import Actor
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.errors import ConfigError
from asyncrl.launch import console, learner_ranks
from asyncrl.launch.build import build_acting, build_actor, starts_of
from asyncrl.launch.environment import EnvironmentFiles, build_environment, with_world_defaults
from asyncrl.launch.job import Job, read_job
from asyncrl.launch.learner_start import LearnerStart, load_models, start_run
from asyncrl.launch.named_models import build_policy
from asyncrl.launch.own_device import take_device, use_compiler_cache
from asyncrl.launch.roles import open_run_replay
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.observability import process_status
from asyncrl.observability.background_file import logged_to
from asyncrl.observability.signals import StopFlag
from asyncrl.replay.in_process import InProcessActorPort, InProcessLearnerPort
from asyncrl.storage import run_folder
from asyncrl.storage.run_folder import REPLAY
from asyncrl.weights.transports.in_process import InProcessPublisher, build_in_process

if TYPE_CHECKING:
    from asyncrl.learner.learner import Learner
    from asyncrl.observability.logger import MetricsLogger


class _Turns:
    """What the process does while the learner waits for a batch."""

    actor: Actor

    def __call__(self) -> bool:
        """Imagine for a while. Returns whether there was anything to imagine."""
        return self.actor.step(0.0)


class _Roles(NamedTuple):
    """All of them, in this process."""

    config: TrainConfig
    """With the world's defaults put in."""
    said: WorldDefaults
    device: torch.device
    files: EnvironmentFiles | SimulatorFiles
    start: LearnerStart
    turns: _Turns
    port: InProcessLearnerPort
    publisher: InProcessPublisher


def run_inline(config: TrainConfig, stop: StopFlag) -> int:
    """Train without a child process or a socket."""
    if (ranks := read_job().size) > 1:
        raise ConfigError(f"--inline is one process, but torchrun started {ranks}. Leave --inline out.")
    roles = _build(config)
    asked, config, start = config, roles.config, roles.start
    with (
        logged_to(start.run_dir / "logs" / "inline.log"),
        console.opened_log(config, start) as log,
    ):
        _introduce(asked, roles, log)
        try:
            learner = _learn(roles, stop, log)
        finally:
            roles.turns.actor.backend.close()
            roles.port.close()
            start.lock.release()
        log.banner(console.final_summary(config, start.run_dir, learner.end_reason, start.simulator))
    console.compact_at_end(config, start.run_dir, learner.version, stop_requested=lambda: stop.set)
    return 0


def _build(asked: TrainConfig) -> _Roles:
    """Check everything, load the models, and open or find the run's folder."""
    run_folder.check_free(asked)
    console.check_sinks(asked)
    torch.set_num_threads(asked.learner.threads)
    torch.manual_seed(asked.seed)
    device = take_device(asked.device)
    use_compiler_cache(asked, device)
    config, said = with_world_defaults(asked)
    policy, files = load_models(config, device)
    environment = build_environment(config, device)
    acting = build_acting(config, build_policy(config, device), environment)
    start = start_run(config, policy, files)
    process_status.publish_as(start.run_dir, "inline")
    publisher, receiver = build_in_process(device)
    replay = open_run_replay(start.run_dir / REPLAY, config, start=start.replay)
    turns = _Turns()
    # Before the actor introduces itself: groups an earlier one left open are the resume's to give up.
    port = InProcessLearnerPort(replay, version=start.version, imagine=turns)
    turns.actor = build_actor(
        config,
        "inline",
        acting,
        starts_of(config, environment),
        InProcessActorPort(replay),
        receiver,
    )
    return _Roles(config, said, device, files, start, turns, port, publisher)


def _introduce(asked: TrainConfig, roles: _Roles, log: MetricsLogger) -> None:
    """Say on the console what begins."""
    config, start = roles.config, roles.start
    world = console.world_line(asked, roles.said)
    for line in (
        console.banner(config, start.run_dir, "1 process (inline)", str(roles.device), world),
        *console.resumed(config, start.version),
        *console.notes(config),
    ):
        log.banner(line)


def _learn(roles: _Roles, stop: StopFlag, log: MetricsLogger) -> Learner:
    """Learn until the run ends."""
    config, start = roles.config, roles.start
    with learner_ranks.learner_group(config, Job(), 1, roles.device) as group:
        learner = learner_ranks.build_joined_learner(
            config,
            start,
            roles.port,
            roles.publisher,
            log.write,
            group,
            stop_requested=lambda: stop.set,
            tell=log.banner,
        )
        with console.failure_noted(lambda: console.after_failure(config, start.run_dir, learner.version)):
            learner.run()
    return learner
