"""What all tests share: those that need a GPU are left out where there is none."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # Workers would take each other's cores; before torch reads it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch

from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.sections import ActorSettings
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.observability import process_status
from asyncrl.policies.interface import SamplingParams
from asyncrl.replay.server import ReplayServer
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork
from support.replay import Clock, make_limiter, make_replay
from support.replay_server import NOBODY, ScriptedSocket
from support.tiny_actor import TASKS
from support.tiny_models import nano_wan, small_policy


class NamesOfFailures:
    """Prints a failing test's name when it fails, between the dots."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nfailed: {report.nodeid} ({report.when})")


@pytest.hookimpl(trylast=True)  # after the terminal's
def pytest_configure(config: pytest.Config) -> None:
    """Name failures at once; take Ctrl-C as in a terminal, even in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(NamesOfFailures(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a host without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def imagination() -> WorldBackend:
    policy, world = small_policy(), nano_wan(2, version=5)
    config = RewardConfig.tiny(TASKS)
    sampling = SamplingParams(temperature=1.3, top_k=20)
    reward = ResNetReward(RewardNetwork(config), config)
    return WorldBackend(policy, world, reward, sampling, rule=ActorSettings(max_decisions=6))


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has counts, which begin at 0."""
    monkeypatch.setattr(process_status, "_own_file", None)
    monkeypatch.setattr(process_status, "_early", {})
    process_status.publish_as(tmp_path, "counting")


@pytest.fixture
def endpoint() -> Iterator[str]:
    folder = private_folder()
    yield ipc_endpoint(folder)
    (folder / "replay").unlink(missing_ok=True)
    folder.rmdir()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[ReplayServer, ScriptedSocket, Clock]]:
    """A service with credit for one group, a learner and the actors a and b, on a clock of its own."""
    clock, socket = Clock(), ScriptedSocket()
    replay = make_replay(tmp_path, make_limiter(per_update=1, max_lag=0, clock=clock))
    service = ReplayServer(replay, socket)  # type: ignore[arg-type]
    socket.say(b"L", "hello", role="learner", name="learner", session="s", version=0, **NOBODY)
    for name in ("a", "b"):
        socket.say(name.encode(), "hello", role="actor", name=name, session=f"s{name}", version=0, **NOBODY)
    service.serve_once(0)
    yield service, socket, clock
    replay.close()
