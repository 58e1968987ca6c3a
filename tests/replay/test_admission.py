"""What no actor of the run can have imagined is refused with a reason, counted by cause, and harms nobody."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ReplayError
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.records import ActionSpec, EndReason, Episode, SamplingParams
from asyncrl.replay.admission import Expected, refusal
from asyncrl.replay.buffer import Replay
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.groups import REFUSED
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.replay.interface import EpisodeFormat, GroupFailure, GroupGrant, SimulatorFormat
from support.episodes import make_episode, simulated, with_chain
from support.replay import next_batch, read_batch
from support.replay_server import Served, acquire, push_group, until

TASK, START = "put the red cube into the bowl", "tabletop-7"
FORMAT = EpisodeFormat(
    image_size=4,
    action_spec=ActionSpec(),
    sample={"tokens": ("int32", (8, 7))},
    max_decisions=3,
    tasks={START: [TASK], "tabletop-8": ["lift the lid"]},
    world_version=3,
)
CONFIG = TrainConfig(
    algorithm=AlgorithmSettings(group_size=2, groups_per_update=1),
    replay=ReplaySettings(max_lag=1, group_timeout=60.0),
)


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    replay = open_run_replay(tmp_path, CONFIG, episodes=FORMAT)
    replay.begin("learner", 0)
    replay.hello("actor-0", "first life")
    yield replay
    replay.close()


def poisoned(name: str, value: float) -> dict[str, Any]:
    """An array of a sound episode with one other number in it."""
    array = getattr(sound(), name).copy()
    array.reshape(-1)[3 % array.size] = value
    return {name: array}


def sound(**changes: Any) -> Episode:
    return dataclasses.replace(make_episode(0, 0, versions=(0, 0)), **changes)


def other_size(size: int) -> dict[str, Any]:
    return {
        "frames": np.zeros((2, size, size, 3), np.uint8),
        "final_frame": np.zeros((size, size, 3), np.uint8),
        "video": np.zeros((0, size, size, 3), np.uint8),
    }


def other_chunk(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {n: getattr(sound(), n)[:, :steps] for n in ("logprobs", "actions")}
    found |= {n: getattr(sound(), n)[:, :steps] for n in ("rewards", "success_scores")}
    return found | {"sample": {"tokens": sound().sample["tokens"][:, :steps]}}


TOKENS = sound().sample["tokens"]
WON = np.zeros((2, 8), np.float32)
WON[-1, 3] = 1
POISON = [  # More that is refused as content is in tests/test_records.py.
    ("content", poisoned("actions", -1e30)),
    ("content", poisoned("logprobs", -1e9)),
    ("content", poisoned("success_scores", 7.0)),
    ("content", poisoned("values", np.inf)),
    ("content", poisoned("values", 0.5)),  # The other one is nan.
    ("content", {"values": np.array([0.5, 1e9], np.float32)}),
    ("content", poisoned("rewards", -np.inf)),
    ("content", {"end_reason": "success"}),
    ("content", {"rewards": WON}),
    ("content", {"rewards": 1e9 * WON, "end_reason": "success"}),
    ("settings", other_size(8)),
    ("settings", {"group_size": 3}),
    ("settings", {"temperature": 1.5}),
    ("settings", {"top_k": 5}),
    ("settings", {"task": "lift the lid"}),
    ("settings", {"start_state": "elsewhere"}),
    ("settings", other_chunk(4)),
    ("settings", {"sample": {"tokens": TOKENS, "more": np.zeros((2, 1), np.float32)}}),
    ("version", {"policy_versions": np.array([0, 2])}),
    ("version", {"world_version": 4}),
    ("version", {"world_version": -2}),
]


def described(case: object) -> str:
    """A short name of a case."""
    if not isinstance(case, dict):
        return str(case)
    shown = {k: v.tolist() if isinstance(v, np.ndarray) and v.size < 9 else "..." for k, v in case.items()}
    return ",".join(f"{k}={v}"[:30] for k, v in shown.items())


def refused(replay: Replay) -> dict[str, float]:
    status = replay.status()
    return {cause: status[metric] for cause, metric in REFUSED.items() if status[metric]}


@pytest.mark.parametrize(("cause", "changes"), POISON, ids=described)
def test_poison_is_refused_counted_by_cause_and_its_group_is_imagined_again(replay, cause, changes) -> None:
    grant = replay.grant("actor-0")
    assert grant is not None
    receipt = replay.admit(sound(**changes))
    assert (receipt.status, receipt.cause) == ("dropped_invalid", cause), receipt
    assert receipt.reason
    assert refused(replay) == {cause: 1.0}
    assert replay.status()[m.DROPPED_INVALID] == 1
    assert not replay.state.limiter.open, "the actor is not waited for until the deadline"
    assert replay.grant("actor-0") == grant
    assert [replay.admit(make_episode(0, k, versions=(0, 1))).status for k in (0, 1)] == ["held", "held"]
    batch = read_batch(replay, 1, 1)
    assert batch is not None
    assert [episode.member for episode in batch[0]] == [0, 1]


def test_a_sample_of_floats_must_be_finite(tmp_path: Path) -> None:
    replay = open_run_replay(tmp_path, CONFIG)
    replay.grant("actor-0")
    episode = with_chain(sound())
    chain = episode.sample["denoising_chain"].copy()
    chain[0, 0, 0, 0] = np.nan
    bad = dataclasses.replace(episode, sample=dict(episode.sample) | {"denoising_chain": chain})
    assert "denoising_chain" in replay.admit(bad).reason


def test_an_actor_may_be_one_version_ahead_of_what_the_replay_heard(replay: Replay) -> None:
    """The learner publishes and tells the replay after that: an episode may be faster."""
    replay.set_version(4)
    for newest, status in ((5, "held"), (6, "dropped_invalid")):
        grant = replay.grant("actor-0")
        assert grant is not None
        assert replay.admit(make_episode(grant.number, 0, versions=(4, newest))).status == status


def test_what_refused_episodes_were_is_known_after_a_restart(tmp_path: Path) -> None:
    replay = open_run_replay(tmp_path, CONFIG)
    replay.grant("actor-0")
    replay.admit(sound(temperature=0.0))
    replay.close()
    replay = open_run_replay(tmp_path, CONFIG)
    assert refused(replay) == {"content": 1.0}


# ---- an actor that is wrong about everything ----


def test_a_run_whose_actors_are_always_refused_ends_with_the_reason(replay: Replay) -> None:
    def imagine() -> bool:
        for grant in actor.acquire_groups(2, 0.0):
            actor.push(make_episode(grant.number, 0, versions=(0,), image=8, actor="inline"))
        return True

    del replay.state.limiter.actors["actor-0"]  # It never came.
    learner = InProcessLearnerPort(replay, imagine=lambda: imagine() and False)
    actor = learner.actor_port(warn=lambda line: None)
    with pytest.raises(ReplayError, match=r"Nothing that the actors imagine is admitted.*pictures of 8 x 8"):
        next_batch(learner, groups=1, version=0, timeout=20.0)


def test_an_honest_actor_is_hope_enough(replay: Replay) -> None:
    def refuse(actor: str, times: int) -> None:
        for _ in range(times):
            grant = replay.grant(actor)
            assert grant is not None
            bad = make_episode(grant.number, 0, versions=(0,), image=8, actor=actor)
            assert replay.admit(bad).status == "dropped_invalid"

    refuse("actor-0", 9)
    assert "pictures of 8 x 8" in replay.exhausted_reason
    replay.hello("honest", "life")
    assert not replay.exhausted_reason
    refuse("honest", 7)
    grant = replay.grant("honest")
    assert grant is not None
    for member in (0, 1):
        made = make_episode(grant.number, member, versions=(0,), actor="honest")
        assert replay.admit(made).status == "held"
    refuse("honest", 1)
    assert not replay.exhausted_reason, "it completed a group"


def test_over_sockets_a_refused_actor_goes_on_and_the_learner_ends_when_all_are_refused(
    tmp_path: Path, endpoint: str
) -> None:
    with Served(tmp_path, endpoint, CONFIG):
        learner = ZmqLearnerPort(endpoint)
        learner.status()
        said: list[str] = []
        actor = ZmqActorPort(endpoint, "actor-0", warn=said.append)
        grant = acquire(actor)
        actor.push(dataclasses.replace(make_episode(grant.number, 0, versions=(0,)), temperature=2.0))
        until(actor, 0)
        assert "temperature 2.0" in said[0]
        assert actor.pop_dropped() == {grant.number}
        again = acquire(actor)
        push_group(actor, again, "actor-0", 0)
        until(actor, 0)
        assert [e.group_id for e in next_batch(learner, groups=1, version=0, timeout=10.0)[0]] == 2 * [
            again.group_id
        ]
        for _ in range(8):
            number = acquire(actor).number
            actor.push(dataclasses.replace(make_episode(number, 0, versions=(0,)), temperature=2.0))
            until(actor, 0)
        with pytest.raises(ReplayError, match=r"Nothing that the actors imagine.*temperature 2\.0"):
            next_batch(learner, groups=1, version=1, timeout=10.0)
        actor.close(1.0)
        learner.close()


# ---- whose group it is ----


def test_a_peer_cannot_fill_or_give_up_what_was_granted_to_another(tmp_path: Path, endpoint: str) -> None:
    with Served(tmp_path, endpoint, CONFIG):
        learner = ZmqLearnerPort(endpoint)
        learner.status()
        said: list[str] = []
        honest, thief = ZmqActorPort(endpoint, "honest"), ZmqActorPort(endpoint, "thief", warn=said.append)
        grant = acquire(honest)
        for member in range(2):  # Under its own name and under the other's.
            name = ("thief", "honest")[member]
            stolen = make_episode(
                grant.number, member, versions=(0,), actor=name, episode_id=f"{member:032x}"
            )
            thief.push(stolen)
        far = GroupGrant(number=77, min_version=0, keep_video=False)
        thief.push(make_episode(far.number, 0, versions=(0,), actor="thief"))
        thief.fail(failure(grant.number))
        until(thief, 0)
        assert len([line for line in said if "granted to another actor" in line]) == 2, said
        assert len([line for line in said if "never granted" in line]) == 1, said
        status = learner.status()
        assert status[m.REFUSED_GRANT] == status[m.DROPPED_INVALID] == 4
        assert status[m.GROUPS_IN_FLIGHT] == 1, "the group is still the honest one's"
        assert status[m.POISONED_WORLD] == 0
        push_group(honest, grant, "honest", 0)
        until(honest, 0)
        (group,) = next_batch(learner, groups=1, version=0, timeout=10.0)
        assert {episode.actor for episode in group} == {"honest"}
        honest.close(1.0)
        thief.close(1.0)
        learner.close()


def failure(number: int, name: str = START, left: int = 3) -> GroupFailure:
    return GroupFailure(number=number, member=0, cause="world", start_state=name, reason="x", left=left)


def test_a_respawned_actor_and_one_that_is_granted_a_group_anew_fill_it(replay: Replay) -> None:
    grant = replay.grant("actor-0")
    assert grant is not None
    assert replay.admit(make_episode(0, 0, versions=(0,)), "actor-0").status == "held"
    replay.hello("actor-0", "second life")
    assert replay.grant("actor-0") == grant
    for member in (0, 1):
        made = make_episode(0, member, versions=(0,), episode_id=f"{member:032x}")
        assert replay.admit(made, "actor-0").status == "held"
    assert 0 in replay.state.limiter.ready
    first = replay.grant("actor-0")
    assert first is not None
    replay.leave("actor-0")
    assert replay.grant("actor-1") == first
    late = make_episode(first.number, 0, versions=(0,))
    assert replay.admit(late, "actor-0").status == "dropped_outdated", "it had the group once"
    for member in (0, 1):
        made = make_episode(
            first.number, member, versions=(0,), actor="actor-1", episode_id=f"{8 + member:032x}"
        )
        assert replay.admit(made, "actor-1").status == "held"
    assert first.number in replay.state.limiter.ready


def test_nobody_is_believed_which_start_states_are_left(replay: Replay) -> None:
    for name in (START, "tabletop-8"):
        grant = replay.grant("actor-0")
        assert grant is not None
        replay.fail(failure(grant.number, name, left=0), "actor-0")
        assert not replay.exhausted_reason
    grant = replay.grant("actor-0")
    assert grant is not None
    replay.fail(failure(grant.number, "made up", left=0), "actor-0")
    assert not replay.exhausted_reason
    assert replay.status()[m.POISONED_WORLD] == 2, "of a start state that there is not, nothing is noted"
    assert not replay.state.limiter.open


# ---- episodes of a simulator ---------------------------------------------------------------------

PLAYED = EpisodeFormat(
    image_size=4,
    action_spec=ActionSpec(),
    sample={"tokens": ("int32", (8, 7))},
    max_decisions=3,
    world_version=-1,
    simulator=SimulatorFormat(name="table", tasks=(TASK,), more_cameras=1, state_dim=3, reward="dense"),
)


def played(**changes: Any) -> Episode:
    return dataclasses.replace(simulated(make_episode(0, 0, versions=(0, 0))), **changes)


def why(episode: Episode, format: EpisodeFormat = PLAYED) -> str:
    found = refusal(
        episode,
        Expected(format=format, group_size=2, sampling=SamplingParams(temperature=1.0), newest_version=0),
    )
    return "" if found is None else f"{found.cause}: {found.reason}"


def test_dense_rewards_of_a_simulator_are_admitted_however_the_episode_ended() -> None:
    ends: tuple[EndReason, ...] = ("success", "terminated", "truncated")
    for end in ends:
        assert why(simulated(make_episode(0, 0, versions=(0, 0)), end=end)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"end_reason": "success"}, "content: end_reason is 'success'"),
        ({"success_scores": WON}, "content: end_reason is 'truncated', but the task was fulfilled"),
        ({"rewards": 1e9 * WON}, "content: rewards holds a number"),
        ({"states": np.full((2, 3), 1e9, np.float32)}, "content: states holds a number"),
        ({"world_version": 0}, "version: world version 0"),
        ({"task": "lift the lid"}, "settings: task 'lift the lid' is none"),
        ({"start_state": "table/../x"}, "settings: start_state"),
        ({"start_state": "other/seed-3"}, "settings: start_state"),
        ({"start_state": "table/seed-3/"}, "settings: start_state"),
        ({"states": None, "final_state": None}, "settings: 1 further cameras and 0 numbers"),
        ({"more_frames": None, "final_more_frames": None}, "settings: 0 further cameras and 3"),
    ],
    ids=described,
)
def test_what_this_simulator_cannot_have_given_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert why(played(**changes)).startswith(reason)


def test_a_simulator_that_rewards_success_gives_nothing_else() -> None:
    assert PLAYED.simulator is not None
    sparse = dataclasses.replace(PLAYED, simulator=dataclasses.replace(PLAYED.simulator, reward="success"))
    won = simulated(make_episode(0, 0, versions=(0, 0)), end="success")
    assert "rewards other than 1" in why(won, sparse)
    assert why(dataclasses.replace(won, rewards=won.success_scores), sparse) == ""


def test_world_models_and_simulators_are_not_taken_for_each_other() -> None:
    assert "this run has a world model" in why(played(world_version=0, start_state=START), FORMAT)
    assert "does not say how many steps" in why(
        sound(world_version=-1, start_state="table/seed-1", task=TASK), PLAYED
    )
