"""Poison does not end a run: numbers that are not finite, and errors for one start state."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors import imagination
from asyncrl.actors.imagination import retry_slots_singly
from asyncrl.episode_layout import episode_arrays
from asyncrl.errors import ReplayError
from asyncrl.observability import metrics_system as m
from asyncrl.policies.action_tokens import action_distribution, logprob_of, take_tokens, uniforms_for
from asyncrl.policies.interface import SamplingParams
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.interface import GroupFailure
from asyncrl.replay.state import COUNTERS, Quarantine
from support.episodes import make_episode
from support.failing_models import GROUP, NAN, Poisoned, counts, episodes_of, inline_run, named
from support.replay import next_batch
from support.replay_server import ScriptedSocket, acquire, kill, start_server, until

CAUSE_OF = {
    "logprob": "policy",
    "actions": "policy",
    "value": "policy",
    "world": "world",
    "start": "world",
    "score": "reward",
    "start raises": "raised",
    "imagine raises": "raised",
    "act raises": "raised",
    "score raises": "raised",
}


def failure(number: int, name: str = "bad", cause: Any = "world", left: int = 3) -> GroupFailure:
    return GroupFailure(number=number, member=0, cause=cause, start_state=name, reason="broken", left=left)


# ---- rows ----------------------------------------------------------------------------------------


IN_FLIGHT = ("logprob", "world", "score", "start raises", "imagine raises")


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("part", "slots", "stages"), [*((part, 4, 1) for part in CAUSE_OF), *((part, 3, 2) for part in IN_FLIGHT)]
)
def test_a_poisoned_row_ends_its_group_and_no_bit_of_its_neighbours_changes(
    part: str, slots: int, stages: int, late: bool, tmp_path: Path
) -> None:
    """With two stages members are in both halves: what the other half made of them is thrown away."""
    plain = inline_run(tmp_path / "plain", Poisoned())
    expected = episodes_of(plain, 4)
    run = inline_run(tmp_path / "run", Poisoned({2: part}, late=late), slots=slots, stages=stages)
    found = episodes_of(run, 4)
    bad = next(n for n in range(4) if named(run, n) == "start-2")

    groups = {f"{n:08d}" for n in range(4)}
    assert {group for group, _ in expected} == groups
    assert {group for group, _ in found} == groups - {f"{bad:08d}"} | {"00000004"}, "its credit returned"
    for key in found.keys() & expected.keys():
        for name, array in episode_arrays(found[key]).items():
            np.testing.assert_array_equal(array, episode_arrays(expected[key])[name], name)
    assert counts(run) == {cause: float(cause == CAUSE_OF[part]) for cause in COUNTERS}
    assert (run.actor.slots.live, list(run.actor.slots.pending), run.replay.state.limiter.open) == (
        [],
        [],
        {},
    )
    assert run.replay.state.limiter.closed[bad].answer == "dropped_poisoned"
    plain.replay.close()
    run.replay.close()


def test_a_sibling_that_was_finished_is_dropped_counted_and_settled(tmp_path: Path) -> None:
    run = inline_run(tmp_path, Poisoned())
    granted = run.replay.grant("a")
    assert granted is not None
    sibling = make_episode(granted.number, 0, versions=(0,))
    assert run.replay.admit(sibling).status == "held"
    run.replay.fail(failure(granted.number))
    run.replay.fail(failure(granted.number))  # Said again: it counts once.
    status = run.replay.status()
    assert (status[m.DROPPED_POISONED], status[m.DROPPED_DECISIONS[m.DROPPED_POISONED]]) == (1, 1)
    assert (status[m.POISONED_WORLD], status[m.GROUPS_IN_FLIGHT]) == (1, 0)
    ((actor, receipt),) = run.replay.pop_receipts()
    assert (actor, receipt.episode_id, receipt.status) == ("a", sibling.episode_id, "dropped_poisoned")
    late = make_episode(granted.number, 1, versions=(0,))
    assert run.replay.admit(late).status == "dropped_poisoned"
    run.replay.close()


def test_tokens_are_chosen_of_logits_without_a_number_and_other_rows_do_not_notice() -> None:
    logits = torch.randn(3, 56, 256, generator=torch.Generator().manual_seed(0))
    for sampling in (SamplingParams(temperature=t, top_k=k) for t in (0.0, 1.0) for k in (0, 5)):
        sick = logits.clone()
        sick[1, 7, 100] = NAN
        distributions = [action_distribution(x, sampling) for x in (logits, sick)]
        plain, found = (
            take_tokens(x, uniforms_for(sampling, [1, 2, 3], x.shape[1], x.device)) for x in distributions
        )
        assert torch.equal(found[[0, 2]], plain[[0, 2]])
        assert 0 <= int(found.min()) <= int(found.max()) <= 255
        logprobs = logprob_of(distributions[1], found)
        assert logprobs.isfinite().all(dim=1).tolist() == [True, False, True]


# ---- errors --------------------------------------------------------------------------------------


def test_what_breaks_the_device_is_not_caught_and_too_little_memory_is() -> None:
    def broken(places: list[int]) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(torch.AcceleratorError):
        retry_slots_singly([1, 2], broken)

    def large(places: list[int]) -> int:
        if len(places) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return places[0]

    assert retry_slots_singly([1, 2], large) == ([([1], 1), ([2], 2)], [])


def test_a_device_that_is_broken_only_shows_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def attempt(places: list[int]) -> None:
        raise ValueError("what came after it")

    monkeypatch.setattr(imagination.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(imagination.torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError):
        retry_slots_singly([1, 2], attempt)


def test_an_error_is_in_the_log_once_per_start_state_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.replay.state.QUARANTINE_AFTER", 9)
    run = inline_run(tmp_path, Poisoned({1: "imagine raises"}), starts=2)
    with caplog.at_level(logging.WARNING, "asyncrl.actors"):
        episodes_of(run, 4)
    assert counts(run)["raised"] >= 3
    records = [record for record in caplog.records if "start-1" in record.getMessage()]
    first = next(n for n in range(2) if named(run, n) == "start-1")
    assert [record.getMessage() for record in records] == [
        f"group {first} is given up, start state 'start-1': RuntimeError: imagine raises for 1"
    ]
    assert records[0].exc_info is not None
    run.replay.close()


# ---- quarantine ----------------------------------------------------------------------------------


def test_after_two_groups_a_start_state_is_not_imagined_any_more(tmp_path: Path) -> None:
    poisoned = Poisoned({1: "world"})
    run = inline_run(tmp_path, poisoned, per_update=8, starts=2)
    found = episodes_of(run, 8)
    assert {e.start_state for e in found.values()} == {"start-0"}
    assert run.replay.state.quarantine.names == ["start-1"]
    assert poisoned.begun.count(1) == 2 * GROUP, "two groups of it began"
    assert counts(run)["world"] == 2
    assert counts(run)["quarantined"] >= 4
    assert run.replay.status()[m.QUARANTINED] == 1
    run.replay.close()


def test_without_a_start_state_left_the_run_ends_with_their_names_and_the_first_reason(tmp_path) -> None:
    poisoned = Poisoned(dict.fromkeys(range(3), "score"))
    run = inline_run(tmp_path, poisoned, starts=3)
    began = time.monotonic()
    with pytest.raises(ReplayError, match=r"left: all 3.*2 groups each") as caught:
        next_batch(run.learner, groups=4, version=0, timeout=600.0)
    assert time.monotonic() - began < 60
    text = str(caught.value)
    assert all(f"start-{n}" in text for n in range(3))
    assert "the reward model's scores are not finite" in text
    assert run.replay.state.limiter.next_number <= 2 * 3 + 2, "no more grants than it takes"
    run.replay.close()
    # Resumed with other start states it goes on; with the same ones it ends at once.
    run = inline_run(tmp_path, poisoned, starts=3)
    with pytest.raises(ReplayError, match="No start state is left"):
        next_batch(run.learner, groups=4, version=0, timeout=600.0)
    run.replay.close()
    run = inline_run(tmp_path, poisoned, starts=4)
    assert {e.start_state for e in episodes_of(run, 4).values()} == {"start-3"}
    run.replay.close()


def test_what_the_policy_does_wrong_is_no_start_states_fault_but_ends_the_run(tmp_path: Path) -> None:
    run = inline_run(tmp_path, Poisoned(dict.fromkeys(range(2), "logprob")), starts=2)
    with pytest.raises(ReplayError, match=r"policy failed for all 2 start states.*earlier checkpoint"):
        next_batch(run.learner, groups=4, version=0, timeout=600.0)
    assert run.replay.state.quarantine.names == []
    assert counts(run)["policy"] >= 4
    run.replay.close()
    # From a sound checkpoint it goes on.
    run = inline_run(tmp_path, Poisoned(), starts=2)
    assert {e.start_state for e in episodes_of(run, 4).values()} == {"start-0", "start-1"}
    run.replay.close()


def test_failures_of_a_policy_that_is_undone_are_forgotten_and_earlier_ones_are_not() -> None:
    quarantine = Quarantine()
    for number, name, version in ((0, "sound", 1), (1, "broken", 1), (2, "broken", 3), (3, "sound", 4)):
        quarantine.add(replace(failure(number), start_state=name), version)
    quarantine.add(replace(failure(4), start_state="sound"), 5)
    assert quarantine.names == ["broken", "sound"]
    quarantine.begin(3)
    assert quarantine.names == ["broken"]


def test_groups_that_are_ready_are_used_before_the_run_ends(tmp_path: Path) -> None:
    run = inline_run(tmp_path, Poisoned(), per_update=2)
    for _ in range(2):
        granted = run.replay.grant("a")
        assert granted is not None
        for member in range(GROUP):
            run.replay.admit(make_episode(granted.number, member, versions=(0,)))
    run.replay.state.quarantine.add(failure(9, left=0), 0)
    assert len(next_batch(run.learner, groups=2, version=0, timeout=5.0)) == 2
    with pytest.raises(ReplayError, match="No start state is left"):
        next_batch(run.learner, groups=2, version=1, timeout=5.0)
    run.replay.close()


# ---- over sockets --------------------------------------------------------------------------------


def test_a_report_outlives_the_replay_that_it_was_sent_to(tmp_path: Path, endpoint: str) -> None:
    server = start_server(tmp_path, endpoint)
    learner, actor = ZmqLearnerPort(endpoint), ZmqActorPort(endpoint, "actor-0")
    try:
        learner.status()
        first, second = acquire(actor), acquire(actor)
        actor.fail(failure(first.number))
        until(actor, 0)
        assert actor.quarantined == set()
        kill(server)
        actor.fail(failure(second.number))  # While nobody listens.
        server = start_server(tmp_path, endpoint)
        until(actor, 0)
        status = learner.status()
        assert (status[m.POISONED_WORLD], status[m.GROUPS_IN_FLIGHT], status[m.QUARANTINED]) == (2, 0, 1)
        assert acquire(actor).number == 2
        assert actor.quarantined == {"bad"}, "known with the grant"
        kill(server)
        server = start_server(tmp_path, endpoint)
        learner.status()
        other = ZmqActorPort(endpoint, "actor-1")
        assert acquire(other).number == 3
        assert other.quarantined == {"bad"}
        other.close(1.0)
    finally:
        learner.stop()
        learner.close()
        actor.close(1.0)
        server.wait(10)
        kill(server)


def test_a_grant_waits_until_the_actor_took_the_names(scripted: Any) -> None:
    service, socket, _ = scripted
    assert isinstance(socket, ScriptedSocket)
    service.replay.state.quarantine.add(failure(7), 0)
    service.replay.state.quarantine.add(failure(8), 0)
    socket.deaf.add(b"a")
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    socket.deaf.clear()
    service.serve_once(0)
    kinds = [message.kind for to, message in socket.sent if to == b"a"]
    assert kinds[-2:] == ["quarantined", "grant"]


def test_a_report_with_an_unknown_cause_is_refused(scripted: Any) -> None:
    service, socket, _ = scripted
    socket.say(b"a", "acquire", turn=0, groups=1)
    service.serve_once(0)
    about = {"report": "r", "member": 0, "start_state": "s", "reason": "", "left": 1}
    socket.say(b"a", "failed", number=0, cause="bad luck", **about)
    service.serve_once(0)
    assert socket.sent[-1][1].kind == "refused"
    assert service.replay.status()[m.GROUPS_IN_FLIGHT] == 1
