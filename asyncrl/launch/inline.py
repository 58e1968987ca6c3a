"""All roles in one process, in turns: the learner's wait for a batch is the actor's time to imagine.

So the lag is exactly --replay.max-lag once that many batches are ahead, and a run repeats itself exactly.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import console, learner_ranks, rendezvous, run_log
from asyncrl.launch.build_actor import build_acting, build_actor, starts_of
from asyncrl.launch.compiler_cache import use_compiler_cache
from asyncrl.launch.environment import EnvironmentFiles, build_environment, with_world_defaults
from asyncrl.launch.learner_start import load_models, start_run
from asyncrl.launch.placement import pick_device
from asyncrl.launch.policies import build_policy
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import process_status
from asyncrl.observability.process_log import logged_to
from asyncrl.observability.signals import StopFlag
from asyncrl.replay.in_process_ports import InProcessActorPort, InProcessLearnerPort
from asyncrl.storage import run_folder
from asyncrl.storage.run_folder import REPLAY
from asyncrl.weights.transports.in_process import build_in_process


def run_inline(config: TrainConfig, stop: StopFlag) -> int:
    """Train without a child process or a socket.

    Raises:
        ConfigError: It was started on several ranks, or something else that cannot work.
    """
    if (ranks := rendezvous.world_size()) > 1:
        raise ConfigError(f"--inline is one process, but torchrun started {ranks}. Leave --inline out.")
    run_folder.check_free(config)
    run_log.check(config)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    use_compiler_cache(config, device)
    asked = config
    config, said = with_world_defaults(asked)
    policy, files = load_models(config, device)
    environment = build_environment(config, device)
    acting = build_acting(config, build_policy(config, device), environment)
    start = start_run(config, policy, files)
    run_dir = start.run_dir
    process_status.publish_as(run_dir, "inline")
    publisher, receiver = build_in_process(device)
    replay = open_run_replay(run_dir / REPLAY, config, start=start.replay)
    # Before the actor introduces itself: groups an earlier one left open are the resume's to give up.
    port = InProcessLearnerPort(replay, version=start.version, imagine=lambda: imagine())
    actor = build_actor(
        config,
        "inline",
        acting,
        starts_of(config, environment),
        InProcessActorPort(replay),
        receiver,
    )

    with (
        logged_to(run_dir / "logs" / "inline.log"),
        run_log.opened(config, start) as log,
        ExitStack() as stack,
    ):
        refits = None
        if config.pace.every:
            from asyncrl.launch.inline_refits import InlineRefits

            assert isinstance(files, EnvironmentFiles)  # `load_models` refuses simulators.
            refits = InlineRefits(config, files, run_dir, device, stack, log.note, log.banner)

        def imagine() -> bool:
            if refits is not None:
                refits.turn(actor)
            return actor.round(0.0)

        world = console.world_line(asked, said)
        for line in (
            console.banner(config, run_dir, "1 process (inline)", str(device), world),
            *console.resumed(config, start.version),
            *console.notes(config),
            *start.notes,
        ):
            log.banner(line)
        try:
            with learner_ranks.learner_group(config, 1, device) as group:
                learner = learner_ranks.build_joined_learner(
                    config,
                    start,
                    port,
                    publisher,
                    log,
                    group,
                    stop_requested=lambda: stop.set,
                    tell=log.banner,
                )
                with console.failure_noted(lambda: console.after_failure(config, run_dir, learner.version)):
                    learner.run()
        finally:
            acting.close()
            port.close()
            start.lock.release()
        log.banner(console.final_summary(config, run_dir, learner.end_reason, start.simulator))
    run_log.compact_at_end(config, run_dir, learner.version, stop_requested=lambda: stop.set)
    return 0
