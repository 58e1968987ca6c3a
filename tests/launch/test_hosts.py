"""Hosts of one job: which ranks they have, what they must agree on, and how they meet."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import LearnerSettings, ReplaySettings
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import endpoints, hosts
from asyncrl.launch.hosts import HostFacts, check_agree, digests, meet
from asyncrl.launch.job import Hosts, Job, open_store
from asyncrl.launch.placement import (
    Placement,
    check_broadcasts,
    check_learner_devices,
    check_sizes,
    copies_of,
    parse_placement,
    ranks_named,
)
from asyncrl.storage import run_owner

pytestmark = pytest.mark.timeout(120)
TWO = Hosts(names=("a", "b"), first_ranks=(0, 2), size=5, addresses=("10.0.0.1", "10.0.0.2"))

# ---- who is where --------------------------------------------------------------------------------


def test_ranks_are_numbered_host_by_host() -> None:
    assert [TWO.of(rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    assert [list(TWO.ranks(number)) for number in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert (TWO.several, Hosts().several) == (True, False)


def test_a_placement_may_number_the_ranks_of_each_host() -> None:
    by_host = "learner=0-1@0,actor=0-2@1,learner=0@0"
    assert ranks_named(by_host) == 5
    with pytest.raises(ConfigError, match="names rank 0 twice as learner"):
        parse_placement(by_host, 5)
    assert parse_placement("learner=0-1@0,actor=0-2@1", 5) == parse_placement("learner=0-1,actor=2-4", 5)
    assert parse_placement("learner=0@0,actor=1@0,0-2@1", 5) == parse_placement("learner=0,actor=1-4", 5)


def test_a_placement_that_names_other_hosts_than_torchrun_started_is_refused() -> None:
    text = "learner=0-1@0,actor=0-2@1"
    check_sizes(text, TWO)
    check_sizes("auto", TWO)
    check_sizes("learner=0,actor=1-4", TWO)
    with pytest.raises(ConfigError, match=r"names 2 ranks on host 0 \(a\), but torchrun started 4 there"):
        check_sizes(text, replace(TWO, first_ranks=(0, 4)))
    with pytest.raises(ConfigError, match=r"names 3 ranks on host 1, but torchrun started 0 there"):
        check_sizes(text, Hosts(names=("a",), size=2))


def test_hosts_with_a_copy_each_need_as_many_learners() -> None:
    def copies(text: str, shard: Literal["all", "host"]) -> int:
        config = TrainConfig(learner=LearnerSettings(shard=shard))
        return copies_of(config, parse_placement(text, 5), TWO)

    assert copies("learner=0-3,actor=4", "host") == 2
    assert copies("learner=0-3,actor=4", "all") == 1
    assert copies("learner=0-1,actor=2-4", "host") == 1
    with pytest.raises(ConfigError, match=r"different numbers of learner ranks \(2 on a, 1 on b\)"):
        copies("learner=0-2,actor=3-4", "host")


# ---- what they agree on --------------------------------------------------------------------------


def facts(name: str, **changes: object) -> HostFacts:
    return HostFacts(**{"name": name, "code": "1 (c0de)", "torch": "2"} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "1 (beef)"}, r"^b has asyncrl 1 \(beef\), but a, the first host, has 1 \(c0de\)"),
        ({"torch": "3"}, "^b has torch 3, but a, the first host, has 2"),
        ({"settings": {"updates": "x"}}, "^b was started with another --updates than a.*same arguments"),
    ],
)
def test_hosts_that_disagree_are_refused_with_the_host_and_what_to_do(changes, message) -> None:
    same = facts("a", settings={"updates": "y"})
    check_agree([same, replace(same, name="b")])
    with pytest.raises(ConfigError, match=message):
        check_agree([same, facts("b", **({"settings": {"updates": "y"}} | changes))])


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (1, r"names 2 learner ranks on b, which has 1 GPU\(s\), and NCCL"),
        (0, "^--device: b has 0 GPUs and a 2"),
    ],
)
def test_learners_need_gpus(there: int, message: str) -> None:
    gpus = {0: 2, 1: there}
    check_learner_devices(Placement(learners=(0, 1), actors=(2,)), TWO, gpus)
    with pytest.raises(ConfigError, match=message):
        check_learner_devices(Placement(learners=(0, 1, 2, 3), actors=(4,)), TWO, gpus)


def test_settings_are_compared_by_flag_and_those_of_a_resumed_run_by_its_arguments() -> None:
    one = digests(TrainConfig(), [])
    other = digests(TrainConfig(replay=ReplaySettings(max_lag=3)), [])
    assert {name for name in one if one[name] != other[name]} == {"replay.max-lag"}
    assert "" not in one
    again = TrainConfig(resume=True)
    assert digests(again, ["--resume"]) == digests(replace(again, seed=1), ["--resume"])
    assert digests(again, ["--resume"]) != digests(again, ["--resume", "--seed", "1"])


def test_gloo_listens_at_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # So that it is put back afterwards.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for address in ("", "203.0.113.7"):
        hosts.bind_gloo(address)
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    hosts.bind_gloo("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


# ---- a folder that several hosts see -------------------------------------------------------------


def test_the_identity_of_a_run_is_known_on_another_host_which_numbers_its_devices_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_owner.next_attempt(tmp_path)
    path = tmp_path / run_owner.IDENTITY
    row = json.loads(path.read_text())
    device, number, host = row["folder"]

    def refused(folder: list[object]) -> bool:
        path.write_text(json.dumps(row | {"folder": folder}))
        try:
            return not run_owner.read_identity(tmp_path)
        except ConfigError as error:
            return "was made for another folder" in str(error)

    assert host == socket.gethostname()
    assert refused([device + 1, number, host])
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert run_owner.read_identity(tmp_path) == first
    second = run_owner.next_attempt(tmp_path)
    assert (second.secret, second.attempt, second.mark != first.mark) == (first.secret, 2, True)
    assert first.secret not in first.mark
    assert refused([device, number + 1, host])


# ---- addresses -----------------------------------------------------------------------------------


def test_without_addresses_the_first_host_chooses_free_ports() -> None:
    two = replace(TWO, addresses=("127.0.0.1", "127.0.0.1"))
    found = endpoints.with_addresses(TrainConfig(), two)
    assert found.replay.startswith("tcp://127.0.0.1:")
    assert found.replay != found.weights
    assert endpoints.with_addresses(TrainConfig(), Hosts()) == Hosts()


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("tcp://127.0.0.1:5555", "which only a itself can reach, but torchrun started ranks on b too"),
        ("tcp://203.0.113.7:5555", "--replay.listen is tcp://203.0.113.7:5555, but it cannot be opened"),
        ("ipc:///tmp/replay", "which only a itself can reach"),
        ("tcp://*:5555", "does not name one address"),
    ],
)
def test_addresses_that_other_hosts_cannot_reach_are_refused(listen: str, message: str) -> None:
    config = TrainConfig(replay=ReplaySettings(listen=listen))
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        endpoints.check(config, Placement(learners=(0,), actors=(1,)), TWO, Job())


# ---- the meeting ---------------------------------------------------------------------------------


class Meeting:
    """Ranks of two hosts, two on each, as threads, and a store like that of torchrun's agent."""

    def __init__(self, folder: Path) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        self.config = TrainConfig(device="cpu", run_dir=str(folder / "run"), startup_timeout=20.0)
        self.ranks = [self._rank(rank) for rank in range(4)]

    def _rank(self, rank: int) -> Job:
        at = ("127.0.0.1", self.store.port)
        return Job(rank=rank, size=4, local_rank=rank % 2, local_size=2, store=at, name="job")

    def checks(self, hosts: Hosts, said: list[HostFacts]) -> Hosts:
        return endpoints.with_addresses(self.config, hosts)

    def meet(self, **of_the_second_host: object) -> list[tuple[Job, Hosts] | Exception]:
        """What each rank gets; settings of the second host may differ."""

        def come(rank: int) -> tuple[Job, Hosts] | Exception:
            told = replace(self.config, **of_the_second_host) if rank > 1 else self.config  # type: ignore[arg-type]
            try:
                return meet(told, self.ranks[rank], self.checks)
            except (ConfigError, RunError) as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(come, range(4)))


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    del made.store


def test_all_ranks_come_to_the_same_hosts_and_leave_nothing_behind(meeting: Meeting, tmp_path: Path) -> None:
    met = meeting.meet()
    assert not any(isinstance(one, Exception) for one in met)
    jobs, all_hosts = zip(*met, strict=True)  # type: ignore[arg-type]
    first = all_hosts[0]
    assert list(all_hosts) == [first] * 4
    assert (first.first_ranks, first.size, first.names) == ((0, 2), 4, (socket.gethostname(),) * 2)
    assert first.addresses == ("127.0.0.1", "127.0.0.1")
    assert len({job.start for job in jobs}) == 1
    assert list(tmp_path.iterdir()) == []
    with socket.create_server(("127.0.0.1", int(first.replay.rpartition(":")[2]))):
        pass  # Free again, for the replay.


def test_ranks_that_are_started_again_do_not_believe_what_those_before_them_said(meeting: Meeting) -> None:
    starts = []
    for _ in range(2):
        met = meeting.meet()
        starts.append({one[0].start for one in met if isinstance(one, tuple)})
        meeting.ranks[2] = replace(meeting.ranks[2], restarts=1)  # Every host's torchrun counts for itself.
    assert [len(names) for names in starts] == [1, 1]
    assert starts[0].isdisjoint(starts[1])


def test_every_rank_gets_the_sentence_that_says_why_the_hosts_cannot_work_together(meeting: Meeting) -> None:
    found = meeting.meet(updates=99)
    assert all(isinstance(error, ConfigError) for error in found), found
    (said,) = {str(error) for error in found}
    assert "was started with another --updates than" in said


def test_a_port_that_another_host_cannot_reach_is_named_with_the_flag(meeting: Meeting, monkeypatch) -> None:
    connect = socket.create_connection

    def no_route(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] == meeting.store.port:
            return connect(address, timeout)
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("socket.create_connection", no_route)
    for error in meeting.meet():
        assert isinstance(error, ConfigError)
        assert "cannot reach 127.0.0.1:" in str(error)
        assert "where the replay of" in str(error)
        assert "(--replay.listen): No route to host. Set --replay.listen to an address" in str(error)


def test_hosts_that_broadcast_weights_need_what_the_backend_needs() -> None:
    both, one = replace(TWO, broadcasts=(0, 1)), {0: 1, 1: 0}
    check_broadcasts(both, {0: 1, 1: 1}, "auto")
    check_broadcasts(replace(TWO, broadcasts=(0,)), one, "auto")
    check_broadcasts(both, one, "own:Mine")
    with pytest.raises(ConfigError, match=r"--weights\.between-hosts is nccl, .* but b has none"):
        check_broadcasts(both, one, "auto")


def test_a_rank_that_does_not_come_is_named(meeting: Meeting) -> None:
    meeting.config = replace(meeting.config, startup_timeout=1.0)
    with pytest.raises(RunError, match=r"Rank 1 did not come to the meeting .* \(--startup-timeout\)"):
        meet(meeting.config, meeting.ranks[0], meeting.checks)


@pytest.mark.parametrize("plan", ["", '{"numbers": {"3": "another"}, "why": "stale"}'])
def test_a_rank_comes_to_the_next_meeting_if_rank_0_died_or_the_plan_is_an_earlier_start_s(
    meeting: Meeting, plan: str
) -> None:
    store = PrefixStore("meeting", open_store(meeting.ranks[0], every_start=True))
    with ThreadPoolExecutor(4) as pool:
        store.set("start", "lost")
        if plan:
            store.set("lost/plan", plan)
        come = partial(meet, meeting.config, checks=meeting.checks)
        waiting = pool.submit(come, job=meeting.ranks[3])
        store.wait(["lost/facts/3"], timedelta(seconds=20))
        others = list(pool.map(lambda rank: come(job=meeting.ranks[rank]), range(3)))
        assert waiting.result(20.0)[1] == others[0][1] == others[1][1] == others[2][1]


def test_one_host_meets_nobody() -> None:
    checked: list[Hosts] = []

    def checks(hosts: Hosts, said: list[HostFacts]) -> Hosts:
        checked.append(hosts)
        return hosts

    assert meet(TrainConfig(), Job(), checks) == (Job(), Hosts())
    assert checked == [Hosts()]
