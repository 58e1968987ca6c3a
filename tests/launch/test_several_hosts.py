"""Whole runs over several hosts, started by torchrun: what works, what is lost, what goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncrl.errors import ReplayError
from asyncrl.observability import process_status
from asyncrl.replay.files.format import GroupFile, read_group_file
from asyncrl.replay.store import PATTERN
from support.chaos_run import Report
from support.several_hosts import SeveralHosts, address, no_namespaces
from support.tiny_models import write_models
from support.whole_runs import ACTOR, PATIENCE, Program, left_over, reach, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]
CUT = 20.0
"""Seconds that a host is cut off."""
TWO_LEARNERS = ("--placement", "collocated", "--algorithm.groups-per-update", "2")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_models(tmp_path_factory.mktemp("models"))


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
        self.arguments = [*arguments, "--run-dir", str(self.run), "--replay.heartbeat-timeout", "5"]
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

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what}: {self.programs[0].said()}"
            time.sleep(0.1)

    def pid(self, role: str, host: str) -> int:
        """Of a living process of a host's folder of the run; 0: none lives."""
        found = process_status.read(self.run / host)
        return next((one.pid for one in found if one.role == role and one.alive), 0)

    def counts(self) -> Report:
        """Episodes that were lost, learned from twice or too old: there are none."""
        report = Report()
        report.look_at(self.tmp_path)
        assert (report.lost, report.doubled, report.too_old) == ([], [], [])
        assert report.acknowledged > 0
        return report


@pytest.mark.timeout(500)
def test_actors_of_another_host_train_die_come_back_and_the_run_goes_on_with_other_hosts(
    flags: list[str], tmp_path: Path, two: SeveralHosts
) -> None:
    job = Job(tmp_path, two, [*flags, "--updates", "100000", "--checkpoint-every", "4"])
    job.reach(2)
    keys = job.run / "keys"
    hint = next(line for line in job.programs[0].said().splitlines() if "asyncrl actor --join" in line)
    endpoint = hint.partition("--join ")[2].split()[0]
    assert endpoint.startswith(f"tcp://{address(1)}:")
    command = [
        *two.on(2),
        *ACTOR,
        "--join",
        endpoint,
        "--keys",
        str(keys),
        "--key",
        "joined",
        "--name",
        "far",
    ]
    joined = Program(tmp_path, "joined", [*command, "--device", "cpu"])
    joined.until("far: joined")
    first = job.pid("actor-1", "hosts/1")
    os.kill(first, signal.SIGKILL)
    job.until(lambda: job.pid("actor-1", "hosts/1") not in (0, first), "the actor came back")
    job.reach(len(rows(job.run)) + 12)
    assert groups_of(job.run, "actor-1")
    assert groups_of(job.run, "far")
    assert not any("secret" in path.name for path in (job.run / "logs").iterdir())
    os.kill(job.pid("learner-0", ""), signal.SIGTERM)  # As stop_ranks of the Slurm scripts does.
    said = job.ends()
    assert "far joined" in said
    assert "the run is over" in joined.ends()
    reached = len(rows(job.run))
    alone = Job(tmp_path, two, ["--resume", *flags, "--updates", str(reached + 3)], count=1)
    assert f"goes on from version {reached}" in alone.ends()
    again = Job(tmp_path, two, ["--resume", *flags, "--updates", str(reached + 6)])
    assert f"goes on from version {reached + 3}" in again.ends()
    assert [row["step"] for row in rows(job.run)] == list(range(1, reached + 7))
    job.counts()


@pytest.mark.timeout(500)
def test_a_host_that_is_cut_off_for_a_while_goes_on_and_one_that_is_lost_is_missed(
    flags: list[str], tmp_path: Path, two: SeveralHosts
) -> None:
    placement = ["--placement", "learner=0@0,actor=0@0,0-1@1", "--updates", "100000"]
    placement += ["--algorithm.groups-per-update", "3", "--replay.max-gigabytes", "8"]
    job = Job(tmp_path, two, [*flags, *placement], ranks=(1, 2))
    for actor in ("actor-0", "actor-1", "actor-2"):
        job.until(partial(groups_of, job.run, actor), f"{actor} imagines")
    assert "node-2 joined (1 joined actor now)" in job.programs[0].said(), "one of two fetches the weights"
    job.reach(1)
    begun = len(rows(job.run))
    for actor in ("actor-1", "actor-2"):
        newer = partial(has_groups_since, job.run, actor, begun)
        job.until(newer, f"newer weights reach {actor}")
    two.connect(2, up=False)
    time.sleep(CUT)  # The time that it lasts is what is tried here.
    two.connect(2, up=True)
    newer = partial(has_groups_since, job.run, "actor-1", len(rows(job.run)))
    job.until(newer, "the host that was cut off goes on")
    two.kill(2)
    job.programs[1].process.wait(PATIENCE)
    missed = "node-2 was not heard of for 5 s"
    job.until(lambda: job.programs[0].said().count(missed) == 2, "it is missed, as while it was cut off")
    job.reach(len(rows(job.run)) + 6)
    os.kill(job.pid("learner-0", ""), signal.SIGTERM)
    job.until(lambda: "newest checkpoint" in job.programs[0].said(), "the run ends in order")
    job.until(lambda: not job.pid("learner-0", ""), "rank 0 ends")
    # torchrun itself waits for the lost host for another 300 s, and hears no SIGTERM meanwhile.
    job.programs[0].process.kill()
    job.programs[0].process.wait(PATIENCE)
    assert left_over(tmp_path) == []
    job.counts()


@pytest.mark.timeout(500)
def test_learners_of_two_hosts_learn_together_and_go_on_as_one_and_as_three(
    flags: list[str], tmp_path: Path
) -> None:
    arguments = [*flags, *TWO_LEARNERS]
    with SeveralHosts(3) as three:
        job = Job(tmp_path, three, [*arguments, "--updates", "3", "--learner.shard", "host"])
        assert "2 learners + 2 actors" in job.ends()
        alone = Job(tmp_path, three, ["--resume", *arguments, "--updates", "4"], count=1)
        assert "goes on from version 3" in alone.ends()
        more = ["--resume", *arguments, "--updates", "7", "--algorithm.groups-per-update", "3"]
        more += ["--learner.shard", "all"]
        assert "3 learners + 3 actors" in Job(tmp_path, three, more, count=3).ends()
    assert [row["step"] for row in rows(job.run)] == list(range(1, 8))
    job.counts()


@pytest.mark.timeout(500)
def test_a_learner_that_dies_starts_all_hosts_again_and_one_whose_host_is_lost_is_gone_on_without(
    flags: list[str], tmp_path: Path, two: SeveralHosts
) -> None:
    arguments = [*flags, *TWO_LEARNERS, "--updates", "100000", "--checkpoint-every", "2"]
    job = Job(tmp_path, two, arguments, max_restarts="3", nnodes="1:2", rdzv_conf="last_call_timeout=10")
    again = "torchrun started the ranks again"
    job.reach(4)
    os.kill(job.pid("learner-1", "hosts/1"), signal.SIGKILL)
    job.until(lambda: job.programs[0].said().count("2 learners + 2 actors") == 2, "both hosts start again")
    job.reach(len(rows(job.run)) + 3)
    two.kill(2)
    job.programs[1].process.wait(PATIENCE)
    job.until(lambda: "1 learner + 1 actor" in job.programs[0].said(), "the first host starts again, alone")
    assert again in job.programs[0].said()
    job.reach(len(rows(job.run)) + 3)
    os.kill(job.pid("learner-0", ""), signal.SIGTERM)
    del job.programs[1]
    job.ends()
    steps = [row["step"] for row in rows(job.run)]
    assert steps == list(range(1, len(steps) + 1))
    job.counts()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (["--updates", "3"], ["--updates", "4"], "node-2 was started with another --updates than node-1"),
        (
            ["--replay.listen", "tcp://10.99.0.1:5555"],
            ["--replay.listen", "tcp://10.99.0.1:5555"],
            "node-2 cannot reach 10.99.0.1:5555, where the replay of node-1 listens (--replay.listen)",
        ),
        (
            ["--placement", "learner=0@0,actor=0-1@1"],
            ["--placement", "learner=0@0,actor=0-1@1"],
            "--placement names 2 ranks on host 1 (node-2), but torchrun started 1 there",
        ),
    ],
)
def test_hosts_that_cannot_work_together_say_why_in_one_sentence_before_anything_is_loaded(
    flags: list[str], tmp_path: Path, two: SeveralHosts, first: list[str], second: list[str], why: str
) -> None:
    two.command(1, ["ip", "addr", "add", "10.99.0.1/32", "dev", "lo"])
    began = time.monotonic()
    programs = [
        two.torchrun(tmp_path, number, [*flags, *told, "--run-dir", str(tmp_path / "run")])
        for number, told in ((1, first), (2, second))
    ]
    for program in programs:
        program.process.wait(PATIENCE)
        sentences = [line for line in program.said().splitlines() if line.startswith("asyncrl train: ")]
        assert len(sentences) == 1, program.said()
        assert why in sentences[0]
        assert "exitcode  : 2" in program.said()
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - began < 120
    assert left_over(tmp_path) == []


def groups_of(run: Path, actor: str) -> list[GroupFile]:
    """Those of an actor in the replay."""
    found = []
    for path in sorted((run / "replay").glob(PATTERN)):
        with contextlib.suppress(ReplayError, OSError):  # The run has deleted it meanwhile.
            found.append(read_group_file(path))
    return [group for group in found if group.attributes["actor"] == actor]


def has_groups_since(run: Path, actor: str, version: int) -> bool:
    """Whether an actor began a group with a version newer than `version`."""
    return any(group.oldest_version > version for group in groups_of(run, actor))
