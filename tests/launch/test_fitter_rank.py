"""--placement ...,fitter=K: the fitter on a rank of its own, which works over the run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import fitter as fitter_module
from asyncrl.launch.fitter import LOST, NICENESS, FitterProcess, RoundReports
from asyncrl.launch.inline import run_inline
from asyncrl.launch.placement import checked_placement, fitter_device, parse_placement
from asyncrl.observability import process_status
from asyncrl.observability.signals import StopFlag
from asyncrl.pace import rounds
from asyncrl.simulators.tabletop.scene import TASKS
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import write_models
from support.two_hosts import NEAR_ADDRESS, TwoHosts, no_namespaces
from support.whole_runs import TRAIN, Program, environment, left_over, reach, rows

APART = "learner=0,actor=0,fitter=1"
SENTENCE = "the world is not refitted any more, the training goes on"
PACE = {
    "pace.every": 2,
    "pace.episodes": 8,
    "pace.held-out": 0.5,
    "pace.fresh": 0.5,
    "pace.world-steps": 1,
    "pace.reward-steps": 1,
    "pace.batch": 8,
    "pace.workers": 0,
    "actor.max-decisions": 2,
}


def refitting(**changes: Any) -> TrainConfig:
    return TrainConfig(**({"device": "cpu", "pace": PaceSettings(every=2), "placement": APART} | changes))


# ---- which rank has it ---------------------------------------------------------------------------


def test_the_fitter_is_a_role_of_one_rank() -> None:
    placement = checked_placement(refitting(), 2)
    assert [placement.roles(rank) for rank in placement.ranks] == [("learner", "actor"), ("fitter",)]
    assert [placement.refits(rank) for rank in (0, 1)] == [False, True]
    assert [placement.only_refits(rank) for rank in (0, 1)] == [False, True]
    assert placement.summary == "1 learner + 1 actor + 1 fitter"
    shared = parse_placement("learner=0,actor=1,fitter=1", 2, 0)
    assert shared.roles(1) == ("actor", "fitter")
    assert not shared.only_refits(1)


def test_without_the_role_the_fitter_is_rank_0s() -> None:
    placement = checked_placement(refitting(placement="auto"), 2)
    assert [placement.refits(rank) for rank in (0, 1)] == [True, False]
    assert placement.summary == "1 learner + 1 actor"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner=0,actor=0,fitter=1-2", "names 2 fitter ranks, but the rounds of a run are made one after"),
        ("learner=0,fitter=1", "names no actor"),
        ("learner=0,actor=0,fitter=2", "gives rank 1 nothing to do"),
        ("learner=0,actor=0,fitter=1,1", "names rank 1 twice as fitter"),
    ],
)
def test_fitters_that_cannot_work_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_placement(refitting(placement=text), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pace": PaceSettings()}, "--pace.every is 0, so that no world is refitted"),
        ({"inline": True}, "--inline is one process, in which the fitter takes its turn"),
        ({"pace": PaceSettings(), "placement": "learner=0, fitter = 0"}, "--pace.every is 0"),
    ],
)
def test_a_fitter_that_has_nothing_to_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refitting(**changes)


def test_a_run_of_one_process_without_the_role_is_not_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--inline is one process, but torchrun started 2"):
        run_inline(refitting(placement="auto", inline=True), StopFlag())


def test_the_fitters_device_is_that_of_its_rank_unless_it_is_named(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config = refitting(device="auto")
    assert str(fitter_device(config, 3)) == "cuda:3"
    assert str(fitter_device(replace(config, pace=PaceSettings(every=2, device="cpu")), 3)) == "cpu"


# ---- a fitter that does not come back ------------------------------------------------------------


class Children:
    """Stands in for `Supervisor`: takes note of what is started, and the child dies when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, ...]] = []
        self.stopped = self.dead = 0
        monkeypatch.setattr(fitter_module, "Supervisor", self.start)
        monkeypatch.setattr(fitter_module, "LOOK_EVERY", 0.0)

    def start(self, name: str, target: str, args: tuple[str, ...], log: Path, respawns: int) -> Children:
        self.started.append(args)
        return self

    def poll(self) -> None:
        if self.dead:
            raise RunError("fitter died 3 times in a row.")

    def stop(self, deadline: float) -> None:
        self.stopped += 1


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Children:
    (tmp_path / "logs").mkdir()
    return Children(monkeypatch)


def process(tmp_path: Path, config: TrainConfig, rank: int, ranks: int = 2) -> FitterProcess:
    return FitterProcess(config, checked_placement(config, ranks), tmp_path, rank, rank)


def test_the_named_rank_alone_starts_it_and_steps_back_only_beside_another_role(
    children: Children, tmp_path: Path
) -> None:
    process(tmp_path, refitting(), 0)
    assert children.started == []
    process(tmp_path, refitting(), 1)
    process(tmp_path, refitting(placement="learner=0,actor=1,fitter=1"), 1)
    process(tmp_path, refitting(placement="auto"), 0)
    assert [args[2:] for args in children.started] == [
        ("1", "0"),
        ("1", str(NICENESS)),
        ("0", str(NICENESS)),
    ]
    process(tmp_path, refitting(placement="auto", pace=PaceSettings()), 0)
    assert len(children.started) == 3


def test_rank_0_tells_once_that_another_ranks_fitter_is_lost(children: Children, tmp_path: Path) -> None:
    told = RoundReports(refitting(), tmp_path, print, version=0)
    fitter = process(tmp_path, refitting(), 1)
    assert (fitter.poll_for_rank_0(), told.poll()) == ([], [])
    children.dead = 1
    assert fitter.poll_for_rank_0() == [], "it says nothing itself"
    assert told.poll() == [f"{SENTENCE}: fitter died 3 times in a row."]
    assert (fitter.poll_for_rank_0(), told.poll(), told.close()) == ([], [], [])
    assert RoundReports(refitting(), tmp_path, print, version=0).poll() == [], "the next start is another one"


def test_what_cannot_be_left_for_rank_0_is_said_where_it_is(children: Children, tmp_path: Path) -> None:
    (tmp_path / LOST).mkdir()
    fitter = process(tmp_path, refitting(), 1)
    children.dead = 1
    lines = fitter.poll_for_rank_0()
    assert lines[0].startswith(SENTENCE)
    assert "rank 0 could not be told" in lines[1]


def test_rank_0_says_itself_that_its_own_fitter_is_lost(children: Children, tmp_path: Path) -> None:
    config = refitting(placement="auto")
    fitter, told = process(tmp_path, config, 0), RoundReports(config, tmp_path, print, version=0)
    children.dead = 1
    assert fitter.poll() == [f"{SENTENCE}: fitter died 3 times in a row."]
    assert (fitter.poll(), told.poll()) == ([], [])


def test_the_rank_that_has_the_fitter_puts_away_what_it_left(children: Children, tmp_path: Path) -> None:
    unfinished = rounds.round_folder(tmp_path, 2)
    unfinished.mkdir(parents=True)
    process(tmp_path, refitting(), 0).close()
    assert unfinished.exists()
    fitter = process(tmp_path, refitting(), 1)
    fitter.close()
    fitter.close()
    assert (children.stopped, unfinished.exists()) == (1, False)


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    old = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0)
    write_recorded(folder / "base", old, (17,) * 8)
    said = [text for name, value in PACE.items() for text in (f"--{name}", str(value))]
    return [*write_models(folder), "--pace.base", str(folder / "base"), *said, "--placement", APART]


class Running:
    """A run of two ranks, in a process group of its own."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.folder, self.tmp_path = tmp_path / "run", tmp_path
        self.process = subprocess.Popen(
            [*TRAIN, *arguments, "--run-dir", str(self.folder)],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def pid(self, role: str) -> int:
        """Of the living process of a role; 0: none lives."""
        found = [one.pid for one in process_status.read(self.folder) if one.role == role and one.alive]
        return found[0] if found else 0

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def killed(self, role: str) -> int:
        pid = self.pid(role)
        assert pid, f"no {role} lives"
        os.kill(pid, signal.SIGKILL)
        return pid

    def ends(self, code: int = 0) -> str:
        said, errors = self.process.communicate(timeout=90)
        assert self.process.returncode == code, errors
        assert left_over(self.tmp_path) == []
        made = {row.version for row in rounds.read(self.folder)}
        played = {int(path.name.removeprefix("round_")) for path in self.folder.glob("true/*")}
        assert played <= made, "a round that was not finished is put away"
        assert not (self.folder / "checkpoints" / "refitting").exists()
        return said


def children_of(pid: int) -> list[int]:
    """A process and all that it started, which of a torchrun is all of its host."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    parents = {one: parent_of(one) for one in found}
    family = [pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family


def parent_of(pid: int) -> int:
    """Of a process; 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.render
@pytest.mark.timeout(300)
def test_a_rank_of_its_own_makes_rounds_until_the_run_ends(flags: list[str], tmp_path: Path) -> None:
    with Running(tmp_path, *flags, "--updates", "100000") as run:
        reach(run.folder, 1, run.process, 90)
        run.until(lambda: rounds.read(run.folder), "a round")
        first = run.pid("fitter")
        assert parent_of(first) == run.pid("rank-1")
        assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, run.pid("rank-1"))
        made = len(rounds.read(run.folder))
        run.killed("fitter")
        run.until(lambda: run.pid("fitter") not in (0, first), "the fitter came back")
        run.until(lambda: len(rounds.read(run.folder)) > made, "a round of the new one")
        second = run.killed("fitter")
        run.until(lambda: run.pid("fitter") not in (0, second), "the fitter came back again")
        run.killed("fitter")
        console = run.folder / "logs" / "learner-0.log"
        run.until(lambda: SENTENCE in console.read_text(), "rank 0 says that it is lost")
        reach(run.folder, len(rows(run.folder)) + 4, run.process, 60)
        os.killpg(run.process.pid, signal.SIGINT)
        said = run.ends(128 + signal.SIGINT)  # As torchrun ends when it is interrupted.
    assert "1 learner + 1 actor + 1 fitter" in said
    assert "refit: true success" in said
    assert said.count(SENTENCE) == 1
    last = len(rows(run.folder))
    again = ["--resume", "--updates", str(last + 4)]
    with Running(tmp_path, *flags, *again) as run:
        said = run.ends()
    assert len(rows(run.folder)) == last + 4
    assert SENTENCE not in said


class Nodes:
    """A run of torchrun on two hosts that have the run's folder in common: the fitter is on the second."""

    def __init__(self, tmp_path: Path, hosts: TwoHosts, flags: list[str]) -> None:
        where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", NEAR_ADDRESS]
        start = [sys.executable, "-m", "torch.distributed.run", *where, "--master-port", "29511"]
        train = ["-m", "asyncrl", "train", *flags, "--run-dir", str(tmp_path / "run")]
        self.near, self.far = (
            Program(
                tmp_path,
                name,
                [*host, *start, "--node-rank", str(number), *train],
                more={"GLOO_SOCKET_IFNAME": name},
            )
            for number, (name, host) in enumerate((("near", hosts.near), ("far", hosts.far)))
        )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.render
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
def test_a_fitter_of_another_host_ends_with_the_run_and_with_torchrun(
    flags: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with TwoHosts() as hosts:
        nodes = Nodes(tmp_path, hosts, [*flags, "--updates", "30"])
        assert "1 learner + 1 actor + 1 fitter" in nodes.near.ends()
        nodes.far.ends()
        made = rounds.read(run)
        assert made
        assert left_over(tmp_path) == []
        nodes = Nodes(tmp_path, hosts, [*flags, "--updates", "100000", "--resume"])
        nodes.near.until("goes on from version 30")
        reach(run, 32, nodes.near.process, 90)
        for pid in children_of(nodes.near.process.pid):
            os.kill(pid, signal.SIGKILL)
        nodes.near.process.wait(30)
        nodes.far.process.wait(60)
        assert left_over(tmp_path) == []
