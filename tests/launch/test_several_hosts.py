"""Whole runs over several hosts, started by torchrun: what works, what is lost, what goes on."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from asyncrl.errors import ReplayError
from asyncrl.observability import process_status
from asyncrl.replay.group_file import GroupFile, read_group, read_group_file
from asyncrl.replay.store import PATTERN
from support import ROOT, TESTS
from support.chaos_run import Report
from support.gloo_transport import GLOO
from support.several_hosts import SeveralHosts, address, no_namespaces
from support.whole_runs import ACTOR, PATIENCE, Program, left_over, reach, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]
T = TypeVar("T")
CUT = 20.0
"""Seconds that a host is cut off."""
TWO_LEARNERS = ("--placement", "collocated", "--algorithm.groups-per-update", "2")


@pytest.fixture
def two() -> Iterator[SeveralHosts]:
    with SeveralHosts(2) as hosts:
        yield hosts


class Job:
    """A run over some hosts, or its next start."""

    def __init__(
        self,
        tmp_path: Path,
        hosts: SeveralHosts,
        arguments: list[str],
        *,
        count: int = 2,
        ranks: tuple[int, ...] = (),
        **more: str,
    ) -> None:
        self.tmp_path, self.run, self.hosts = tmp_path, tmp_path / "run", hosts
        (tmp_path / "said").mkdir(exist_ok=True)
        start = len(list((tmp_path / "said").iterdir()))
        self.arguments = [*arguments, "--run-dir", str(self.run)]
        self.more, self.ranks = {"nnodes": str(count)} | more, ranks or (1,) * count
        self.programs = [self.start(number, f"said/{start}-{number}") for number in range(1, count + 1)]

    def start(self, number: int, name: str) -> Program:
        ranks = self.ranks[number - 1]
        return self.hosts.torchrun(self.tmp_path, number, self.arguments, ranks=ranks, name=name, **self.more)

    def ends(self) -> str:
        """Wait for all hosts; returns what the first one said."""
        said = [program.ends() for program in self.programs]
        assert left_over(self.tmp_path) == []
        assert not list(self.run.parent.glob(".asyncrl-*"))
        return said[0]

    def reach(self, updates: int) -> None:
        reach(self.run, updates, self.programs[0].process, PATIENCE)

    def until(self, true: Callable[[], T], what: str) -> T:
        """Wait until something is true, and return it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := true()):
            assert time.monotonic() < deadline, f"{what}: {self.programs[0].said()}"
            time.sleep(0.1)
        return found

    def pid(self, role: str, host: str) -> int:
        """Of a living process of a host's folder of the run; 0: none lives."""
        found = process_status.read(self.run / host)
        return next((one.pid for one in found if one.role == role and one.alive), 0)

    def signal(self, role: str, host: str, number: int) -> int:
        """Signal such a process, once it lives; returns its id."""
        os.kill(pid := self.until(lambda: self.pid(role, host), f"{role} lives"), number)
        return pid

    def counts(self) -> Report:
        """Episodes that were lost, learned from twice or too old: there are none."""
        report = Report()
        report.look_at(self.tmp_path)
        assert (report.lost, report.doubled, report.too_old) == ([], [], [])
        assert report.acknowledged > 0
        return report


@pytest.mark.timeout(500)
def test_actors_of_another_host_train_and_one_that_dies_while_its_host_is_cut_off_comes_back(
    flags: list[str], tmp_path: Path, two: SeveralHosts
) -> None:
    placement = ["--placement", "learner=0@0,actor=0-1@1"]
    job = Job(tmp_path, two, [*flags, *placement, "--updates", "100000"], ranks=(1, 2))
    job.reach(1)
    joined = join(job, "far")
    job.until(partial(groups_of, job.run, "actor-1"), "actor-1 imagines")
    begun = len(rows(job.run))
    two.connect(2, up=False)
    first = job.signal("actor-1", "hosts/1", signal.SIGKILL)
    time.sleep(CUT)  # The time that it lasts is what is tried here.
    two.connect(2, up=True)
    job.until(lambda: job.pid("actor-1", "hosts/1") not in (0, first), "the actor came back")
    for actor in ("actor-1", "actor-2", "far"):
        job.until(partial(has_groups_since, job.run, actor, begun), f"newer weights reach {actor}")
    assert not any("secret" in path.name for path in (job.run / "logs").iterdir())
    job.signal("learner-0", "", signal.SIGTERM)  # As ask_ranks of the Slurm scripts does.
    assert "far joined" in job.ends()
    assert "the run is over" in joined.ends()
    job.counts()


@pytest.mark.timeout(500)
def test_weights_are_broadcast_between_hosts_of_which_one_is_cut_off_for_a_while_and_one_is_lost(
    flags: list[str], tmp_path: Path
) -> None:
    placement = ["--placement", "learner=0@0,actor=0@0,0-1@1,0@2", "--weights.between-hosts", "nccl"]
    placement += ["--weights.transport", GLOO]  # In place of NCCL, which needs GPUs.
    placement += ["--algorithm.groups-per-update", "3", "--replay.max-gigabytes", "8"]
    with SeveralHosts(3) as three:
        arguments = [*flags, *placement, "--updates", "100000"]
        path = f"{ROOT}{os.pathsep}{TESTS}"
        job = Job(tmp_path, three, arguments, count=3, ranks=(1, 2, 1), PYTHONPATH=path)

        def newer(*actors: str) -> None:
            """Wait until these actors imagine with weights of an update that is yet to come."""
            begun = len(rows(job.run))
            for actor in actors:
                job.until(partial(has_groups_since, job.run, actor, begun), f"newer weights reach {actor}")

        job.reach(1)
        newer("actor-0", "actor-1", "actor-2", "actor-3")
        said = job.programs[0].said()
        assert sorted(re.findall(r"node-[0-9] joined", said)) == ["node-2 joined", "node-3 joined"]
        three.connect(2, up=False)
        cut_at = time.monotonic()
        job.until(lambda: "node-2 was left behind" in job.programs[0].said(), "the cut host is left behind")
        newer("actor-0", "actor-3")
        passed = time.monotonic() - cut_at
        assert passed < CUT, "a host that is cut off holds the others up for its silence"
        time.sleep(CUT - passed)  # The time that it lasts is what is tried here.
        three.connect(2, up=True)
        newer("actor-1", "actor-2")
        three.kill(3)
        job.programs[2].process.wait(PATIENCE)
        job.until(lambda: "node-3 was left behind" in job.programs[0].said(), "the lost host is left behind")
        newer("actor-0", "actor-1")
        job.until(lambda: rows(job.run)[-1]["weights/hosts"] == 1, "a row says that one host is left")
        assert rows(job.run)[-1].get("weights/pulled_bytes", 0) == 0, "nobody fetches"
        ends_without_lost_host(job)
    job.counts()


@pytest.mark.timeout(500)
def test_learners_of_two_hosts_start_again_when_one_dies_go_on_without_a_lost_host_and_then_as_three(
    flags: list[str], tmp_path: Path
) -> None:
    arguments = [*flags, *TWO_LEARNERS, "--updates", "100000", "--checkpoint-every", "2"]
    again = "torchrun started the ranks again"
    with SeveralHosts(3) as three:
        first = [*arguments, "--learner.shard", "host"]
        job = Job(tmp_path, three, first, max_restarts="3", nnodes="1:2", rdzv_conf="last_call_timeout=10")
        job.reach(3)
        job.signal("learner-1", "hosts/1", signal.SIGKILL)
        job.until(lambda: job.programs[0].said().count("2 learners + 2 actors") == 2, "both start again")
        job.reach(len(rows(job.run)) + 2)
        three.kill(2)
        job.programs[1].process.wait(PATIENCE)
        job.until(lambda: "1 learner + 1 actor" in job.programs[0].said(), "the first host starts alone")
        assert again in job.programs[0].said()
        job.reach(len(rows(job.run)) + 2)
        job.signal("learner-0", "", signal.SIGTERM)
        del job.programs[1]
        job.ends()
        reached = len(rows(job.run))
        more = ["--resume", *flags, *TWO_LEARNERS, "--updates", str(reached + 2), "--learner.shard", "all"]
        more += ["--algorithm.groups-per-update", "3"]
        said = Job(tmp_path, three, more, count=3).ends()
        assert "3 learners + 3 actors" in said
        assert f"goes on from version {reached}" in said
    assert [row["step"] for row in rows(job.run)] == list(range(1, reached + 3))
    job.counts()


def test_hosts_that_cannot_work_together_say_why_in_one_sentence_before_anything_is_loaded(
    flags: list[str], tmp_path: Path, two: SeveralHosts
) -> None:
    two.command(1, ["ip", "addr", "add", "10.99.0.1/32", "dev", "lo"])
    began = time.monotonic()
    told = [*flags, "--replay.listen", "tcp://10.99.0.1:5555", "--run-dir", str(tmp_path / "run")]
    for program in [two.torchrun(tmp_path, number, told) for number in (1, 2)]:
        program.process.wait(PATIENCE)
        sentences = [line for line in program.said().splitlines() if line.startswith("asyncrl train: ")]
        assert len(sentences) == 1, program.said()
        why = "node-2 cannot reach 10.99.0.1:5555, where the replay of node-1 listens (--replay.listen)"
        assert why in sentences[0]
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - began < 120
    assert left_over(tmp_path) == []


def join(job: Job, name: str) -> Program:
    """Start an actor on the second host as the first one's console says."""
    hint = next(line for line in job.programs[0].said().splitlines() if "asyncrl actor --join" in line)
    endpoint = hint.partition("--join ")[2].split()[0]
    assert endpoint.startswith(f"tcp://{address(1)}:")
    options = {"join": endpoint, "keys": job.run / "keys", "key": "joined", "name": name, "device": "cpu"}
    command = [text for flag, value in options.items() for text in (f"--{flag}", str(value))]
    joined = Program(job.tmp_path, "joined", [*job.hosts.on(2), *ACTOR, *command])
    joined.until(f"{name}: joined")
    return joined


def ends_without_lost_host(job: Job) -> None:
    """Stop the run: it ends in order, but torchrun waits for the lost host and hears no SIGTERM."""
    job.signal("learner-0", "", signal.SIGTERM)
    job.until(lambda: "newest checkpoint" in job.programs[0].said(), "the run ends in order")
    job.until(lambda: not job.pid("learner-0", ""), "rank 0 ends")
    for program in job.programs:
        program.process.kill()
        program.process.wait(PATIENCE)
    assert left_over(job.tmp_path) == []


def groups_of(run: Path, actor: str) -> list[GroupFile]:
    """Those of an actor in the replay."""
    found = []
    for path in sorted((run / "replay").glob(PATTERN)):
        with contextlib.suppress(ReplayError, OSError):  # The run has deleted it meanwhile.
            found.append(read_group_file(path))
    return [group for group in found if read_group(group.path, ("rewards",))[0].actor == actor]


def has_groups_since(run: Path, actor: str, version: int) -> bool:
    """Whether an actor began a group with a version newer than `version`."""
    return any(group.oldest_version > version for group in groups_of(run, actor))
