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
def test_two_learner_ranks_publish_to_an_actor_and_every_stage_is_timed() -> None:
    command = [sys.executable, str(SCRIPT), "--devices", "cpu", "cpu", "cpu", "--learner-ranks", "2"]
    done = subprocess.run([*command, *SMALL.split()], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    full, lora = json.loads(done.stdout.splitlines()[-1])
    assert (full["kind"], lora["kind"], full["transport"]) == ("full", "lora", "shared_memory")
    assert full["tensors"] > 1000  # As many as the published policy has.
    assert lora["tensors"] > 800
    for figures in (full, lora):
        assert figures["ratio"] == pytest.approx(figures["publish_median"] / figures["raw"])
        assert 0 < figures["broadcast"] < figures["publish_max"]
        assert figures["actor_swap_call"] > 0, "an actor swapped while it worked"
