"""One rank's part of a run, read from top to bottom: meet, check, load, start the children, learn, end.

    rank 0 ──spawns──► replay, and actor-0 when it also imagines
    rank k              see `followers`

The end, in order: the learner tells the replay, which tells the actors; they leave; publisher and replay
close.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.errors import RunError
from asyncrl.launch import balance, endpoints
from asyncrl.launch.children import (
    REPLAY,
    ChildProcesses,
    WatchedPublisher,
    WatchedReplay,
    log_errors,
)
from asyncrl.launch.followers import follow, spawn_actor, spawn_role
from asyncrl.launch.hosts import HostFacts, Stopped, bind_gloo, meet
from asyncrl.launch.job import (
    HOSTS,
    Hosts,
    Job,
    RunInfo,
    pop_failure,
    read_job,
    remember_run,
    run_of_earlier_start,
    share,
)
from asyncrl.launch.own_device import count_gpus
from asyncrl.launch.placement import (
    Placement,
    check_broadcasts,
    check_learner_devices,
    check_pairs,
    check_sizes,
    checked_placement,
    copies_of,
    transport_between,
    transport_of,
)
from asyncrl.observability import process_status, signals
from asyncrl.observability.background_file import logged_to
from asyncrl.observability.console import StatusLine, steady_console
from asyncrl.observability.process_status import Watchdog
from asyncrl.observability.signals import StopFlag, die_with_parent
from asyncrl.storage import run_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.launch.build import LearnerStart
    from asyncrl.launch.evaluator import EvaluatorProcess
    from asyncrl.learner.learner import Learner
    from asyncrl.observability.logger import MetricsLogger
    from asyncrl.weights.publisher import BroadcastPublisher

SHUTDOWN_TIMEOUT_CHILDREN: Final = 4.0
"""Seconds the children have to end by themselves once the run is over."""


def run(config: TrainConfig) -> int:
    """Do this rank's part of a run; raises ConfigError for input that cannot work, before anything starts."""
    job = read_job()
    if job.name:
        die_with_parent(os.getppid())  # torchrun's, which may be killed without ending its ranks.
    signals.raise_limit()
    with steady_console(), StopFlag().listening() as stop:
        try:
            job, hosts = meet(
                config, job, partial(_check_hosts, config, job), stop_requested=lambda: stop.set
            )
        except Stopped:
            return 0
        bind_gloo(hosts.addresses[hosts.of(job.rank)])
        return follow(config, job, hosts, stop) if job.rank else _lead(config, job, hosts, stop)


def _check_hosts(config: TrainConfig, job: Job, hosts: Hosts, facts: list[HostFacts]) -> Hosts:
    """Check on rank 0, before anything is loaded, the placement on these hosts; add their endpoints."""
    hosts = replace(hosts, placement=balance.placement_of_start(config, job, hosts))
    config = replace(config, placement=hosts.placement)
    check_sizes(config.placement, hosts)
    placement = checked_placement(config, hosts.size)
    check_pairs(placement, hosts)
    gpus = {number: host.gpus for number, host in enumerate(facts)} or {0: count_gpus(config.device)}
    check_learner_devices(placement, hosts, gpus)
    copies_of(config, placement, hosts)
    others = {hosts.of(rank) for rank in placement.actors} - {0}
    if others and config.weights.between_hosts == "nccl":
        hosts = replace(hosts, broadcasts=(0, *sorted(others)))
        check_broadcasts(hosts, gpus, config.weights.transport)
    return endpoints.with_addresses(config, job, hosts)


class _Run(NamedTuple):
    """Settings and models of rank 0, checked and loaded before anything is started."""

    config: TrainConfig  # with the world's defaults
    said: WorldDefaults
    placement: Placement
    hosts: Hosts
    start: LearnerStart
    device: torch.device
    transport: str


def _prepare(asked: TrainConfig, job: Job, hosts: Hosts) -> _Run:
    from asyncrl.launch import console
    from asyncrl.launch.build import load_models, start_run, use_device
    from asyncrl.launch.environment import with_world_defaults

    placement = checked_placement(replace(asked, placement=hosts.placement), hosts.size)
    endpoints.check(asked, placement, several_hosts=hosts.several)
    if (again := run_of_earlier_start(job)) is None:
        run_folder.check_free(asked)
    endpoints.check_free(asked, job)
    console.check_sinks(asked)
    device = use_device(asked, job.local_rank)
    transport = transport_of(asked, placement, hosts.ranks(0))
    config, said = with_world_defaults(asked)
    policy, files = load_models(config, device)
    start = start_run(config, policy, files, again)
    remember_run(job, start.run_dir)
    while pop_failure(start.run_dir / HOSTS):
        pass  # Left for the rank 0 of an earlier start, which died before it read them.
    process_status.publish_as(start.run_dir, "learner-0")
    return _Run(config, said, placement, hosts, start, device, transport)


def _lead(asked: TrainConfig, job: Job, hosts: Hosts, stop: StopFlag) -> int:
    from asyncrl.launch import console
    from asyncrl.launch.evaluator import EvaluatorProcess

    run = _prepare(asked, job, hosts)
    config, start, run_dir, placement = run.config, run.start, run.start.run_dir, run.placement
    with (
        logged_to(run_dir / "logs" / "learner-0.log"),
        console.opened_log(config, start, job.size) as log,
        endpoints.opened(hosts, run_dir, start.identity) as (sockets, endpoint),
        ExitStack() as ending,
    ):
        ending.callback(start.lock.release)
        keys = endpoints.keys_of_run(config, run_dir, placement, hosts)
        publisher, between = _open_weights(run, sockets / "weights", keys)
        ending.callback(publisher.close)
        hint = console.join_hint(config, endpoint, keys, waits=not placement.actors)
        _introduce(asked, run, job, hint, log)
        evaluator = EvaluatorProcess(config, run_dir, start.version, log.write_evaluation, job.local_rank)
        ending.callback(log_errors, evaluator.close, log.banner)
        news = partial(_news, run, publisher, (sockets, run_dir / HOSTS), evaluator, stop)
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
            placement=hosts.placement,
            attempt=start.identity.attempt,
            mark=start.identity.mark,
            shown=json.dumps(start.shown) if start.shown else "",
        )
        port = _start(run, job, info, children)
        learner = _train(run, job, port, publisher, children, log)
        if not stop.set and (why := evaluator.finish(learner.version, children.poll)):
            log.banner(why)
        ending.close()
        if line := balance.note_at_end(config, placement, run_dir, start.version):
            log.banner(line)
        log.banner(console.final_summary(config, run_dir, learner.end_reason, start.simulator))
    return 0


def _open_weights(run: _Run, socket: Path, keys: str) -> tuple[BroadcastPublisher, str]:
    """Open the channel of the weights; returns the carrier between hosts too."""
    from asyncrl.weights.publisher import build_publisher

    settings = endpoints.weight_settings(run.config, run.hosts, keys, run.start.identity)
    if between := transport_between(run.config, run.hosts, run.transport):
        settings = replace(settings, store_address=run.hosts.addresses[0])
    timeout = run.config.weights.timeout
    return build_publisher(run.transport, socket, run.device, timeout, settings), between


def _introduce(asked: TrainConfig, run: _Run, job: Job, hint: str, log: MetricsLogger) -> None:
    from asyncrl.launch import console

    config, start = run.config, run.start
    world = console.world_line(asked, run.said)
    log.banner(console.banner(config, start.run_dir, run.placement.summary, str(run.device), world))
    again = f"torchrun started the ranks again ({job.restarts}); on from version {start.version}"
    begun = [*[again] * (job.restarts > 0), *console.resumed(config, start.version)]
    log.banner("\n".join([*begun, hint, *console.notes(config)]))


def _news(
    run: _Run,
    publisher: BroadcastPublisher,
    notices: tuple[Path, ...],
    evaluator: EvaluatorProcess,
    stop: StopFlag,
) -> list[str]:
    """Return lines about actors that joined or left, the wait if none is left, evaluations, and a stop."""
    if why := pop_failure(*notices):
        raise RunError(why)
    lines = publisher.server.pop_events()
    if lines and not (run.placement.actors or publisher.joined):
        timeout = f"{run.config.batch_timeout:g} s (--batch-timeout)"
        lines.append(f"no actor is left: waits up to {timeout} for one to join")
    return [*lines, *evaluator.poll(), *stop.pop_events()]


def _start(run: _Run, job: Job, info: RunInfo, children: ChildProcesses) -> WatchedReplay:
    config, start = run.config, run.start
    children.spawn(partial(spawn_role, REPLAY, "replay_main", config, info, start.replay))
    if 0 in run.placement.actors:
        children.spawn(partial(spawn_actor, config, info, 0))
    share(info, job, config.startup_timeout)
    return WatchedReplay(
        children,
        info.replay_endpoint,
        version=start.version,
        security=endpoints.client_keys(info.keys, "learner"),
        identity=start.identity,
    )


def _train(
    run: _Run,
    job: Job,
    port: WatchedReplay,
    publisher: BroadcastPublisher,
    children: ChildProcesses,
    log: MetricsLogger,
) -> Learner:
    from asyncrl.launch import console
    from asyncrl.launch.build import build_learner, learner_group

    config, start = run.config, run.start
    with learner_group(config, job, len(run.placement.learners), run.device) as ranks:
        learner = build_learner(
            config,
            start,
            port,
            WatchedPublisher(publisher, children),
            log.write,
            ranks,
            stop_requested=children.poll,
            copies=copies_of(config, run.placement, run.hosts),
        )
        with console.failure_noted(config, start.run_dir, learner):
            try:
                learner.run()
            finally:
                for end in (
                    port.stop,
                    publisher.close,
                    partial(children.end, SHUTDOWN_TIMEOUT_CHILDREN),
                    port.close,
                ):
                    log_errors(end, partial(print, file=sys.stderr))
    return learner
