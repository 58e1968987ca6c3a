"""A rank's part of a run, read from top to bottom: meet, then lead (check, load, learn, end) or follow.

    rank 0 ──spawns──► replay, and actor-0 when it also imagines
    rank k              see `followers`

The end, in order: the learner notifies the replay, which notifies the actors; the publisher closes; actors
and replay have a few seconds to end. Functions of rank 0 import torch and the models, which ranks that only
supervise an actor do not need.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import endpoints
from asyncrl.launch import job as job_store
from asyncrl.launch.children import REPLAY, ChildProcesses, log_errors
from asyncrl.launch.followers import follow, spawn_actor, spawn_role
from asyncrl.launch.hosts import HostFacts, bind_gloo, meet
from asyncrl.launch.job import Hosts, Job, RunInfo
from asyncrl.launch.placement import Placement, check_on_hosts, checked_placement, copies_of, transport_of
from asyncrl.observability import process_status
from asyncrl.observability.background_file import logged_to
from asyncrl.observability.process_status import Watchdog
from asyncrl.observability.signals import StopFlag, die_with_parent, raise_limit
from asyncrl.observability.terminal import StatusLine, steady_console
from asyncrl.replay.client import ZmqLearnerPort
from asyncrl.storage import run_folder

if TYPE_CHECKING:
    from asyncrl.launch.build import LearnerStart, LoadedModels
    from asyncrl.launch.evaluator import EvaluatorProcess
    from asyncrl.learner.learner import Learner
    from asyncrl.observability.logger import MetricsLogger
    from asyncrl.weights.publisher import BroadcastPublisher

SHUTDOWN_TIMEOUT_CHILDREN: Final = 4.0  # Seconds the children have to end by themselves once the run is over


def run(config: TrainConfig) -> int:
    """Do this rank's part of a run; raises ConfigError for input that cannot work, before anything starts."""
    job = job_store.read_job()
    if job.name:
        die_with_parent(os.getppid())  # torchrun's, which may be killed without ending its ranks.
    raise_limit()
    with steady_console(), StopFlag().listening() as stop:
        try:
            job, hosts = meet(
                config, job, partial(_check_hosts, config, job), stop_requested=lambda: stop.requested
            )
            bind_gloo(hosts.addresses[hosts.of(job.rank)])
            if job.rank:
                return follow(config, job, hosts, stop)
        except job_store.Stopped:
            return 0
        return lead(config, job, hosts, stop)


def _check_hosts(config: TrainConfig, job: Job, hosts: Hosts, facts: list[HostFacts]) -> Hosts:
    """Check on rank 0, before anything is loaded, the placement on these hosts; add their endpoints."""
    from asyncrl.devices.tensors import count_gpus

    gpus = {number: host.gpus for number, host in enumerate(facts)} or {0: count_gpus(config.device)}
    placement, hosts = check_on_hosts(config, hosts, gpus)
    if not hosts.several and job_store.run_of_earlier_start(job) is None:
        run_folder.check_free(config)  # Before its ports are found taken.
    endpoints.check(config, placement, hosts, job)
    return endpoints.with_addresses(config, hosts)


# ---- rank 0 ----------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Settings and models of rank 0, checked and loaded before anything is started."""

    job: Job
    hosts: Hosts
    placement: Placement
    transport: str
    models: LoadedModels
    start: LearnerStart

    @property
    def config(self) -> TrainConfig:
        return self.models.config


def _prepare(asked: TrainConfig, job: Job, hosts: Hosts) -> _Run:
    from asyncrl.launch import console
    from asyncrl.launch.build import check_resumed, load_models, start_run, use_device

    placement = checked_placement(asked, hosts.size)
    again = job_store.run_of_earlier_start(job)
    check_resumed(asked, again)
    console.check_sinks(asked)
    device = use_device(asked, job.local_rank)
    transport = transport_of(asked, placement, hosts.ranks(0))
    models = load_models(asked, device)
    start = start_run(models, again)
    job_store.remember_run(job, start.run_dir)
    while job_store.pop_failure(start.run_dir / job_store.HOSTS):
        pass  # Left for the rank 0 of an earlier start, which died before it read them.
    process_status.publish_as(start.run_dir, "learner-0")
    return _Run(job, hosts, placement, transport, models, start)


def lead(asked: TrainConfig, job: Job, hosts: Hosts, stop: StopFlag) -> int:
    """Do the part of rank 0."""
    from asyncrl.launch import console
    from asyncrl.launch.evaluator import EvaluatorProcess

    run = _prepare(asked, job, hosts)
    config, start, run_dir, placement = run.config, run.start, run.start.run_dir, run.placement
    with (
        logged_to(run_dir / "logs" / "learner-0.log"),
        console.opened_log(config, start) as log,
        endpoints.opened(hosts, run_dir, start.identity) as (sockets, endpoint),
        ExitStack() as ending,
    ):
        ending.callback(start.lock.release)
        keys = endpoints.keys_of_run(config, run_dir, placement, hosts)
        publisher, between = _open_weights(run, sockets / "weights", keys)
        ending.callback(publisher.close)
        again = f"torchrun started the ranks again ({job.restarts}); on from version {start.version}"
        hint = console.join_hint(config, endpoint, keys, waits=not placement.actors)
        lines = [again] * (job.restarts > 0)
        console.introduce(log, asked, run.models, start, placement.summary, lines, [hint])
        evaluator = EvaluatorProcess(config, run_dir, start.version, log.write_evaluation, job.local_rank)
        ending.callback(log_errors, evaluator.close, log.banner)
        news = partial(_news, run, publisher, (sockets, run_dir / job_store.HOSTS), evaluator, stop)
        children = ChildProcesses(stop, log.banner, news)
        ending.callback(children.end, 0.0)
        ending.callback(Watchdog(run_dir, log.banner).close)
        ending.callback(StatusLine(run_dir).close)
        info = RunInfo(
            run_dir=str(run_dir),
            replay_endpoint=endpoint,
            weights_endpoint=publisher.endpoint,
            sockets=str(sockets),
            checkpoint=str(start.checkpoint or ""),
            pull_endpoint=publisher.pull_endpoint,
            hosts_transport=between,
            keys=keys,
            attempt=start.identity.attempt,
            mark=start.identity.mark,
            tasks=list(start.tasks),
        )
        learner = _train(run, info, publisher, children, log)
        if not stop.requested and (why := evaluator.finish(learner.version, children.poll)):
            log.banner(why)
        ending.close()
        if line := console.balance(config, placement, run_dir, start.version):
            log.banner(line)
        log.banner(console.final_summary(config, run_dir, learner.early_end, start.tasks, log.seconds))
    return 0


def _open_weights(run: _Run, socket: Path, keys: str) -> tuple[BroadcastPublisher, str]:
    from asyncrl.weights.publisher import BroadcastPublisher

    settings = endpoints.weight_settings(run.config, run.hosts, keys, run.start.identity)
    # Empty: other hosts fetch the weights.
    between = run.transport if run.hosts.broadcasts and run.transport != "shared_memory" else ""
    if between:
        settings = replace(settings, store_address=run.hosts.addresses[0])
    timeout, device = run.config.weights.timeout, run.models.policy.device
    return BroadcastPublisher(run.transport, socket, device, timeout, settings), between


def _news(
    run: _Run,
    publisher: BroadcastPublisher,
    notices: tuple[Path, ...],
    evaluator: EvaluatorProcess,
    stop: StopFlag,
) -> list[str]:
    with suppress(OSError):  # The host may clean TMPDIR, which also gives its name to others.
        endpoints.restore_folder(notices[0], run.start.identity)
    if why := job_store.pop_failure(*notices):
        raise RunError(why)
    lines = publisher.server.pop_events()
    if lines and not (run.placement.actors or publisher.joined):
        timeout = f"{run.config.batch_timeout:g} s (--batch-timeout)"
        lines.append(f"no actor is left: waits up to {timeout} for one to join")
    return [*lines, *evaluator.poll(), *stop.pop_events()]


def _train(
    run: _Run, info: RunInfo, publisher: BroadcastPublisher, children: ChildProcesses, log: MetricsLogger
) -> Learner:
    from asyncrl.launch import console
    from asyncrl.launch.build import build_learner, learner_group

    config, start, placement = run.config, run.start, run.placement
    children.spawn(partial(spawn_role, REPLAY, "roles:replay_main", config, info, start.episodes))
    if 0 in placement.actors:
        children.spawn(partial(spawn_actor, config, info, 0))
    job_store.share(info, run.job, config.startup_timeout)
    port = ZmqLearnerPort(
        info.replay_endpoint,
        version=start.version,
        security=endpoints.client_keys(info.keys, "learner"),
        identity=start.identity,
        poll=children.poll,
    )
    device = run.models.policy.device
    with learner_group(config, run.job, len(placement.learners), device) as ranks:
        learner = build_learner(
            config,
            start,
            port,
            publisher,
            log.write,
            ranks,
            stop_requested=children.poll,
            show=console.pictures(config, start.run_dir, log),
            copies=copies_of(config, placement, run.hosts),
        )
        with console.failure_noted(config, start.run_dir, learner):
            try:
                learner.run()
            finally:
                end_children = partial(children.end, SHUTDOWN_TIMEOUT_CHILDREN)
                for end in (port.stop, publisher.close, end_children, port.close):
                    log_errors(end, partial(print, file=sys.stderr))
    return learner


# ---- all roles in one process ----------------------------------------------------------------------


def run_inline(asked: TrainConfig) -> int:
    """Train without a child process or a socket, in turns: the learner's wait is the actor's time to imagine.

    So the lag is exactly --replay.max-lag once that many batches are ahead, and a run repeats itself exactly.
    """
    from asyncrl.launch import build, console
    from asyncrl.launch.environment import build_actor, open_backend
    from asyncrl.launch.named_models import build_policy
    from asyncrl.launch.roles import open_run_replay
    from asyncrl.replay.inline_ports import InProcessLearnerPort
    from asyncrl.weights.transports.in_process import build_in_process

    if (ranks := job_store.read_job().size) > 1:
        raise ConfigError(f"--inline is one process, but torchrun started {ranks}. Leave --inline out.")
    raise_limit()
    with steady_console(), StopFlag().listening() as stop:
        build.check_resumed(asked)
        console.check_sinks(asked)
        device = build.use_device(asked)
        models = build.load_models(asked, device)
        config = models.config
        backend, starts = open_backend(config, build_policy(config, device))
        start = build.start_run(models)
        process_status.publish_as(start.run_dir, "inline")
        publisher, receiver = build_in_process(device)
        replay = open_run_replay(start.run_dir / run_folder.REPLAY, config, episodes=start.episodes)
        # Before the actor introduces itself: groups an earlier one left open are the resume's to give up.
        port = InProcessLearnerPort(replay, version=start.version, imagine=lambda: actor.step(0.0))
        actor = build_actor(config, "inline", backend, starts, port.actor_port(), receiver)
        with logged_to(start.run_dir / "logs" / "inline.log"), console.opened_log(config, start) as log:
            console.introduce(log, asked, models, start, "1 process (inline)")
            try:
                with build.learner_group(config, Job(), 1, device) as ranks:
                    learner = build.build_learner(
                        config,
                        start,
                        port,
                        publisher,
                        log.write,
                        ranks,
                        stop_requested=lambda: stop.requested,
                        show=console.pictures(config, start.run_dir, log),
                    )
                    with console.failure_noted(config, start.run_dir, learner):
                        learner.run()
            finally:
                backend.close()
                port.close()
                start.lock.release()
            log.banner(
                console.final_summary(config, start.run_dir, learner.early_end, start.tasks, log.seconds)
            )
    return 0
