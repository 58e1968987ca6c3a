"""What rank 0 decided reaches the other ranks, or an error says who failed."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import rendezvous
from asyncrl.launch.rendezvous import RunInfo
from support import ROOT

FACTS = RunInfo(run_dir="/runs/ä", replay_endpoint="ipc:///tmp/r", weights_endpoint="tcp://127.0.0.1:5")


def environ_of(rank, ranks, port, *, torchrun_pid, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": str(torchrun_pid),
        **more,
    }


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def agent_port():
    """Port of a store like the one that torchrun's agent keeps."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield store.port
    del store


def test_a_process_alone_is_rank_0_of_1_and_needs_no_store():
    assert (rendezvous.rank({}), rendezvous.world_size({}), rendezvous.local_rank({})) == (0, 1, 0)
    rendezvous.share(FACTS, environ={})
    rendezvous.share(FACTS, environ={"RANK": "0", "WORLD_SIZE": "1"})


def test_torchruns_variables_are_read():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    read = rendezvous.rank(environ), rendezvous.world_size(environ), rendezvous.local_rank(environ)
    assert read == (5, 8, 1)
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two', expected a whole number"):
        rendezvous.world_size({"WORLD_SIZE": "two"})


def test_ranks_that_cannot_meet_are_told_what_is_missing():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, but MASTER_ADDR or MASTER_PORT is not set"):
        rendezvous.share(FACTS, environ={"RANK": "0", "WORLD_SIZE": "2"})


def test_facts_reach_every_rank_through_the_agents_store(agent_port):
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(rendezvous.receive, 20.0, environ_of(rank, 3, agent_port, torchrun_pid=True))
            for rank in (1, 2)
        ]
        rendezvous.share(FACTS, 20.0, environ_of(0, 3, agent_port, torchrun_pid=True))
        assert [future.result(20.0) for future in waiting] == [FACTS, FACTS]


def test_a_restarted_job_does_not_read_the_facts_of_its_first_attempt(agent_port):
    rendezvous.share(FACTS, 20.0, environ_of(0, 2, agent_port, torchrun_pid=True))
    again = environ_of(1, 2, agent_port, torchrun_pid=True, TORCHELASTIC_RESTART_COUNT="1")
    with pytest.raises(RunError) as caught:
        rendezvous.receive(0.2, again)
    message = str(caught.value)
    assert message.startswith(
        f"Rank 1 waited 0.2 s at 127.0.0.1:{agent_port} for rank 0 to say where the run is"
    )
    assert "Rank 0 has failed or cannot be reached" in message


def test_a_rank_that_is_told_to_stop_waits_for_rank_0_no_longer(agent_port):
    """torchrun sends SIGTERM when rank 0 has failed, and kills after 30 s what does not end."""
    asked: list[float] = []

    def stop_requested() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    environ = environ_of(1, 2, agent_port, torchrun_pid=True)
    assert rendezvous.receive(60.0, environ, stop_requested=stop_requested) is None
    assert asked[-1] - asked[0] < 5


def test_without_an_agent_rank_0_hosts_the_store_until_all_have_read():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(rendezvous.receive, 20.0, environ_of(rank, 3, port, torchrun_pid=False))
            for rank in (1, 2)
        ]
        rendezvous.share(FACTS, 20.0, environ_of(0, 3, port, torchrun_pid=False))
        assert [future.result(20.0) for future in waiting] == [FACTS, FACTS]


def test_rank_0_names_the_rank_that_did_not_come():
    with pytest.raises(RunError, match="rank 1 did not come to read"):
        rendezvous.share(FACTS, 0.2, environ_of(0, 2, free_port(), torchrun_pid=False))


def test_a_port_in_use_is_an_error_that_says_what_to_set():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use"):
            rendezvous.share(FACTS, 0.2, environ_of(0, 2, port, torchrun_pid=False))


PROBE = """
import json, sys
from asyncrl.launch import rendezvous
from asyncrl.launch.rendezvous import RunInfo
rank = rendezvous.rank()
if rank == 0:
    rendezvous.share(RunInfo(run_dir="/runs/a", replay_endpoint="r", weights_endpoint="w"), 30.0)
else:
    with open(f"{sys.argv[1]}/{rank}.json", "w") as out:
        json.dump([rendezvous.world_size(), rendezvous.local_rank(), rendezvous.receive(30.0).run_dir], out)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(90)
@pytest.mark.parametrize("own_store", ["0", "1"])
def test_under_torchrun_every_rank_learns_where_the_run_is(tmp_path, own_store):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(script),
            str(tmp_path),
        ],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store},
        check=True,
        timeout=60,
        capture_output=True,
    )
    assert json.loads((tmp_path / "1.json").read_text()) == [2, 1, "/runs/a"]
