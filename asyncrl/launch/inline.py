"""All roles in one process, in turns: the learner's wait for a batch is the actor's time to imagine.

So the lag is exactly --replay.max-lag once that many batches are ahead, and a run repeats itself exactly.
"""

from __future__ import annotations

from asyncrl.actors.actor import Actor
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import console
from asyncrl.launch.build import (
    build_learner,
    check_resumed,
    learner_group,
    load_models,
    start_run,
    use_device,
)
from asyncrl.launch.environment import build_actor, open_backend
from asyncrl.launch.job import Job, read_job
from asyncrl.launch.named_models import build_policy
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import process_status
from asyncrl.observability.background_file import logged_to
from asyncrl.observability.signals import StopFlag, raise_limit
from asyncrl.observability.terminal import steady_console
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.storage import run_folder
from asyncrl.weights.transports.in_process import build_in_process


def run(asked: TrainConfig) -> int:
    """Train without a child process or a socket."""
    if (ranks := read_job().size) > 1:
        raise ConfigError(f"--inline is one process, but torchrun started {ranks}. Leave --inline out.")
    raise_limit()
    with steady_console(), StopFlag().listening() as stop:
        check_resumed(asked)
        console.check_sinks(asked)
        device = use_device(asked)
        models = load_models(asked, device)
        config = models.config
        backend, starts = open_backend(config, build_policy(config, device))
        start = start_run(models)
        process_status.publish_as(start.run_dir, "inline")
        publisher, receiver = build_in_process(device)
        replay = open_run_replay(start.run_dir / run_folder.REPLAY, config, episodes=start.episodes)
        actor: Actor
        # Before the actor introduces itself: groups an earlier one left open are the resume's to give up.
        port = InProcessLearnerPort(replay, version=start.version, imagine=lambda: actor.step(0.0))
        actor = build_actor(config, "inline", backend, starts, port.actor_port(), receiver)
        with logged_to(start.run_dir / "logs" / "inline.log"), console.opened_log(config, start) as log:
            console.introduce(log, asked, models, start, "1 process (inline)")
            try:
                with learner_group(config, Job(), 1, device) as ranks:
                    learner = build_learner(
                        config,
                        start,
                        port,
                        publisher,
                        log.write,
                        ranks,
                        stop_requested=lambda: stop.requested,
                    )
                    with console.failure_noted(config, start.run_dir, learner):
                        learner.run()
            finally:
                backend.close()
                port.close()
                start.lock.release()
            log.banner(console.final_summary(config, start.run_dir, learner.early_end, start.tasks))
    return 0
