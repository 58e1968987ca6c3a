"""The benchmark of publishing runs on a laptop, with sharded weights, and its figures add up."""

import json
import subprocess
import sys

import pytest

from support import ROOT

SCRIPT = ROOT / "benchmarks" / "weights_publish.py"
SMALL = "--gigabytes 0.002 --lora-gigabytes 0.002 --rounds 3 --seconds 0.5 --every 0.2 --json"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_two_learner_ranks_publish_to_an_actor_and_every_stage_is_timed() -> None:
    command = [sys.executable, str(SCRIPT), "--devices", "cpu", "cpu", "cpu", "--learner-ranks", "2"]
    done = subprocess.run([*command, *SMALL.split()], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    full, lora = json.loads(done.stdout.splitlines()[-1])
    assert (full["kind"], lora["kind"], full["transport"]) == ("full", "lora", "gloo")
    assert full["tensors"] > 1000  # As many as the published policy has.
    assert lora["tensors"] > 800
    for figures in (full, lora):
        assert figures["ratio"] == pytest.approx(figures["publish_median"] / figures["raw"])
        assert set(figures["stages"]) == {"packing", "summing", "announcing", "broadcasting", "receipts"}
        assert all(stage > 0 for stage in figures["stages"].values())
        assert max(figures["stages"].values()) < figures["publish_max"]
        assert figures["actor_swap_call"] > 0, "an actor swapped while it worked"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_worlds_are_published_to_actors_and_held_against_a_copy(tmp_path) -> None:
    small = ["--gigabytes", "0.02", "--rounds", "3", "--actors", "1", "2", "--json", str(tmp_path / "found")]
    command = [sys.executable, str(ROOT / "benchmarks" / "world_publish.py"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transport shared_memory, 3 rounds" in done.stdout
    found = json.loads((tmp_path / "found").read_text())
    assert [(one["world"], one["actors"]) for one in found] == [
        ("shipped", 1),
        ("shipped", 2),
        ("large", 1),
        ("large", 2),
    ]
    for figures in found:
        assert figures["publish_to_swap_longest"] >= figures["publish_to_swap"] > figures["stages"]["packing"]
        assert figures["ratio"] > 1, "it is copied more than once"
        assert figures["swap"] > 0
    assert found[0]["tensors"] > 100
    assert found[2]["megabytes"] == pytest.approx(16.8, rel=0.1)
