"""Does one rank's part of a run: it learns, looks after an actor, or both.

    rank 0 ──spawns──► replay, and actor-0 when it also imagines
    rank k              see `followers`

The end, in order: the learner tells the replay, which tells the actors; they leave; publisher and replay
close.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WorldDefaults
from asyncrl.errors import RunError
from asyncrl.launch import balance, endpoints, networks, rendezvous
from asyncrl.launch.children import (
    REPLAY,
    ChildProcesses,
    WatchedPublisher,
    WatchedReplay,
    log_errors,
)
from asyncrl.launch.followers import follow, spawn_actor, spawn_role
from asyncrl.launch.host_facts import HostFacts, check_broadcasts, check_devices
from asyncrl.launch.host_weights import transport_between, transport_of
from asyncrl.launch.hosts import Hosts
from asyncrl.launch.meeting import Stopped, meet
from asyncrl.launch.own_device import take_device
from asyncrl.launch.placement import (
    Placement,
    check_pairs,
    check_sizes,
    checked_placement,
    copies_of,
)
from asyncrl.launch.rendezvous import HOSTS, RunInfo
from asyncrl.observability import process_status, signals
from asyncrl.observability.console import StatusLine, steady_console
from asyncrl.observability.process_log import logged_to
from asyncrl.observability.signals import StopFlag, die_with_parent
from asyncrl.observability.watchdog import Watchdog
from asyncrl.storage import run_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.launch.evaluator import EvaluatorProcess
    from asyncrl.launch.learner_start import LearnerStart
    from asyncrl.learner.learner import Learner
    from asyncrl.observability.logger import MetricsLogger
    from asyncrl.weights.publisher import BroadcastPublisher
    from asyncrl.weights.server import ServerSettings

SHUTDOWN_TIMEOUT_CHILDREN = 4.0
"""Seconds the children have to end by themselves once the run is over."""


def run(config: TrainConfig) -> int:
    """Do this rank's part of a run.

    Raises:
        ConfigError: Something that cannot work; nothing was started.
        AsyncRLError: The run failed.
    """
    if (torchrun := rendezvous.torchrun_pid()) is not None:
        die_with_parent(torchrun)
    signals.raise_limit()
    with steady_console(), StopFlag().listening() as stop:
        if config.inline:
            from asyncrl.launch.inline import run_inline

            return run_inline(config, stop)
        rendezvous.check_address()
        try:
            hosts = meet(config, partial(_checked, config), stop_requested=lambda: stop.set)
        except Stopped:
            return 0
        networks.bind_gloo(hosts.addresses[hosts.of(rendezvous.rank())])
        if rendezvous.rank() == 0:
            return _learn(config, hosts, stop)
        return follow(config, hosts, stop)


def _checked(config: TrainConfig, hosts: Hosts, facts: list[HostFacts]) -> Hosts:
    """Check on rank 0, before anything is loaded, what the ranks shall do on these hosts."""
    hosts = replace(hosts, placement=balance.placement_of_start(config, hosts))
    config = balance.with_placement(config, hosts.placement)
    check_sizes(config.placement, hosts)
    placement = checked_placement(config, hosts.size)
    check_pairs(placement, hosts)
    if not hosts.several:
        return hosts
    check_devices(facts, placement.learners)
    copies_of(config, placement, hosts)
    learners = sorted({hosts.of(rank) for rank in placement.learners})
    hosts = replace(hosts, learners=tuple(learners))
    others = {hosts.of(rank) for rank in placement.actors} - {0}
    if others and config.weights.between_hosts == "nccl":
        hosts = replace(hosts, broadcasts=(0, *sorted(others)))
        check_broadcasts(facts, hosts.broadcasts, config.weights.transport)
    reached = others or learners != [0]
    return endpoints.with_addresses(config, hosts) if reached else hosts


class _Prepared(NamedTuple):
    """What rank 0 has checked and loaded before anything is started."""

    config: TrainConfig
    """With the world's defaults put in."""
    said: WorldDefaults
    start: LearnerStart
    device: torch.device
    transport: str


def _prepare(config: TrainConfig, placement: Placement, hosts: Hosts) -> _Prepared:
    """Check everything, load the policy, and make or find the run's folder."""
    import torch

    from asyncrl.launch import learner_ranks, run_log
    from asyncrl.launch.environment import with_world_defaults
    from asyncrl.launch.learner_start import prepare
    from asyncrl.launch.own_device import use_compiler_cache

    endpoints.check(config, placement, several_hosts=bool(hosts.replay))
    if (again := rendezvous.run_of_earlier_attempt()) is None:
        run_folder.check_free(config)
    endpoints.check_free(config)
    run_log.check(config)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    device = take_device(config.device, rendezvous.local_rank())
    use_compiler_cache(config, device)
    learner_ranks.check(config, placement, hosts)
    transport = transport_of(config, placement, hosts.ranks(0))
    config, said = with_world_defaults(config)
    start = prepare(config, device, again)
    rendezvous.remember_run(start.run_dir)
    while rendezvous.take_failure(start.run_dir / HOSTS):
        pass  # Of an earlier start, whose rank 0 died before it read them.
    process_status.publish_as(start.run_dir, "learner-0")
    return _Prepared(config, said, start, device, transport)


def _learn(asked: TrainConfig, hosts: Hosts, stop: StopFlag) -> int:
    """Rank 0: check everything, start the children, learn, end them."""
    from asyncrl.launch import console, run_log
    from asyncrl.launch.evaluator import EvaluatorProcess

    placement = checked_placement(balance.with_placement(asked, hosts.placement), hosts.size)
    prepared = _prepare(asked, placement, hosts)
    config, start, run_dir = prepared.config, prepared.start, prepared.start.run_dir
    at = endpoints.addresses(asked, hosts)
    with (
        logged_to(run_dir / "logs" / "learner-0.log"),
        run_log.opened(config, start) as log,
        endpoints.opened(at, run_dir, start.identity) as (sockets, endpoint),
        ExitStack() as ending,
    ):
        ending.callback(start.lock.release)
        keys = endpoints.keys_of_run(config, run_dir, placement, at)
        settings = endpoints.weight_settings(config, at, keys, start.identity)
        publisher = _open_weights(prepared, hosts, sockets / "weights", settings)
        ending.callback(publisher.close)
        hint = console.join_hint(config, endpoint, keys, waits=not placement.actors)
        _introduce(asked, prepared, placement, hint, log)
        local = rendezvous.local_rank()
        evaluator = EvaluatorProcess(config, run_dir, start.version, log.write_evaluation, local)
        ending.callback(log_errors, evaluator.close, log.banner)
        between = transport_between(config, hosts, prepared.transport)
        info = _run_info(start, endpoint, sockets, keys, publisher, between, hosts.placement)
        news = partial(_news, config, placement, publisher, (sockets, run_dir / HOSTS), evaluator, stop)
        children = ChildProcesses(stop, log.banner, news)
        ending.callback(children.end, 0.0)
        ending.callback(Watchdog(run_dir, log.banner).close)
        ending.callback(StatusLine(run_dir).close)
        port = _start(config, placement, info, start, children)
        learner = _train(prepared, placement, hosts, port, publisher, children, log)
        if not stop.set and (why := evaluator.finish(learner.version, children.poll)):
            log.banner(why)
        ending.close()
        if said_of_both := balance.note_at_end(config, placement, run_dir, start.version):
            log.banner(said_of_both)
        log.banner(console.final_summary(config, run_dir, learner.end_reason, start.simulator))
    run_log.compact_at_end(config, run_dir, learner.version, stop_requested=lambda: stop.set)
    return 0


def _open_weights(
    prepared: _Prepared, hosts: Hosts, socket: Path, settings: ServerSettings
) -> BroadcastPublisher:
    """Open the channel of the weights."""
    from asyncrl.weights.publisher import build_publisher

    config, device = prepared.config, prepared.device
    if transport_between(config, hosts, prepared.transport):
        settings = replace(settings, store_address=hosts.addresses[0])
    return build_publisher(prepared.transport, socket, device, config.weights.timeout, settings)


def _introduce(
    asked: TrainConfig, prepared: _Prepared, placement: Placement, hint: str, log: MetricsLogger
) -> None:
    """Say on the console what begins."""
    from asyncrl.launch import console

    config, start = prepared.config, prepared.start
    world = console.world_line(asked, prepared.said)
    log.banner(console.banner(config, start.run_dir, placement.summary, str(prepared.device), world))
    begun = [*_again(start.version), *console.resumed(config, start.version)]
    log.banner("\n".join([*begun, hint, *console.notes(config), *start.notes]))


def _again(version: int) -> list[str]:
    """One line when torchrun started the ranks again."""
    count = rendezvous.restart_count()
    return [f"torchrun started the ranks again ({count}); on from version {version}"] if count else []


def _run_info(
    start: LearnerStart,
    replay_endpoint: str,
    sockets: Path,
    keys: str,
    publisher: BroadcastPublisher,
    hosts_transport: str,
    placement: str,
) -> RunInfo:
    """What the other processes have to know."""
    return RunInfo(
        run_dir=str(start.run_dir),
        replay_endpoint=replay_endpoint,
        weights_endpoint=publisher.endpoint,
        sockets=str(sockets),
        checkpoint=str(start.checkpoint or ""),
        pull_endpoint=publisher.pull_endpoint,
        hosts_transport=hosts_transport,
        keys=keys,
        placement=placement,
        attempt=start.identity.attempt,
        mark=start.identity.mark,
        shown=start.shown.to_json() if start.shown else "",
    )


def _news(
    config: TrainConfig,
    placement: Placement,
    publisher: BroadcastPublisher,
    notices: tuple[Path, ...],
    evaluator: EvaluatorProcess,
    stop: StopFlag,
) -> list[str]:
    """Lines about actors that joined or went, the wait when none is left, evaluations, and a stop."""
    if why := rendezvous.take_failure(*notices):
        raise RunError(why)
    lines = publisher.server.pop_events()
    if lines and not (placement.actors or publisher.joined):
        lines.append(
            f"no actor is left: waits up to {config.batch_timeout:g} s (--batch-timeout) for one to join"
        )
    return [*lines, *evaluator.poll(), *stop.pop_events()]


def _start(
    config: TrainConfig, placement: Placement, info: RunInfo, start: LearnerStart, children: ChildProcesses
) -> WatchedReplay:
    """Start this rank's children and tell the other ranks; returns the learner's port."""
    from asyncrl.replay.learner_client import ZmqLearnerPort

    children.spawn(partial(spawn_role, REPLAY, "replay_main", config, info, start.replay.to_json()))
    rank = rendezvous.rank()
    if placement.imagines(rank):
        children.spawn(partial(spawn_actor, config, info, rank))
    rendezvous.share(info, config.startup_timeout)
    port = ZmqLearnerPort(
        info.replay_endpoint,
        version=start.version,
        security=endpoints.client_keys(info.keys, "learner"),
        identity=start.identity,
    )
    return WatchedReplay(port, children)


def _train(
    prepared: _Prepared,
    placement: Placement,
    hosts: Hosts,
    port: WatchedReplay,
    publisher: BroadcastPublisher,
    children: ChildProcesses,
    log: MetricsLogger,
) -> Learner:
    """Meet the other learner ranks and learn; at the end, good or bad, everybody is told."""
    from asyncrl.launch import console, learner_ranks

    config, start = prepared.config, prepared.start
    with learner_ranks.learner_group(config, len(placement.learners), prepared.device) as group:
        learner = learner_ranks.build_joined_learner(
            config,
            start,
            port,
            WatchedPublisher(publisher, children),
            log,
            group,
            stop_requested=children.poll,
            tell=log.banner,
            copies=copies_of(config, placement, hosts),
        )
        with console.failure_noted(lambda: console.after_failure(config, start.run_dir, learner.version)):
            try:
                learner.run()
            finally:
                complain = partial(print, file=sys.stderr)
                log_errors(port.stop, complain)
                log_errors(publisher.close, complain)
                log_errors(partial(children.end, SHUTDOWN_TIMEOUT_CHILDREN), complain)
                log_errors(port.close, complain)
    return learner
