"""`--placement`: text and number of ranks in, ranks per role out."""

from dataclasses import replace

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import (
    WORDS,
    Placement,
    checked_placement,
    only_learns,
    parse_placement,
    ranks_named,
    threads_of_actor,
)


@pytest.mark.parametrize(
    ("text", "ranks", "learners", "actors", "worlds"),
    [
        ("auto", 1, (0,), (0,), ()),
        ("auto", 2, (0,), (1,), ()),
        ("auto", 4, (0,), (1, 2, 3), ()),
        ("learner=0,actor=1-3", 4, (0,), (1, 2, 3), ()),
        ("actor=0,learner=0", 1, (0,), (0,), ()),
        ("learner=0,actor=0-2", 3, (0,), (0, 1, 2), ()),
        (" learner = 0, actor = 1, 3, 2 ", 4, (0,), (1, 2, 3), ()),
        ("learner=0-0,actor=1,2-3", 4, (0,), (1, 2, 3), ()),
        ("learner=0-1,actor=2-3", 4, (0, 1), (2, 3), ()),
        ("learner=0-1,actor=0-1", 2, (0, 1), (0, 1), ()),
        ("collocated", 3, (0, 1, 2), (0, 1, 2), ()),
        ("disaggregated", 1, (0,), (0,), ()),
        ("disaggregated", 3, (0,), (1, 2), ()),
        ("disaggregated", 8, (0, 1, 2, 3), (4, 5, 6, 7), ()),
        ("hybrid", 1, (0,), (0,), ()),
        ("learner=0,policy=1,world=2", 3, (0,), (1,), ((1, 2),)),
        ("learner=0-1,policy=2,4,world=3,5", 6, (0, 1), (2, 4), ((2, 3), (4, 5))),
        ("learner=0,policy=4,2,world=3,1", 5, (0,), (2, 4), ((2, 1), (4, 3))),
        ("learner=0,world=1,policy=2,actor=3", 4, (0,), (2, 3), ((2, 1),)),
        ("learner=0-1,policy=0,world=1", 2, (0, 1), (0,), ((0, 1),)),
        ("hybrid", 3, (0, 1, 2), (0, 2), ((0, 1),)),
        ("hybrid", 8, tuple(range(8)), (0, 1, 2, 3), ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_every_rank_gets_its_roles(text, ranks, learners, actors, worlds):
    placement = parse_placement(text, ranks)
    assert placement == Placement(learners=learners, actors=actors, worlds=worlds)
    for policy, world in worlds:
        assert (policy in placement.actors, placement.world_of(policy)) == (True, world)
        assert world not in placement.actors, "it only lends its device"
        assert {"policy", "world"} <= {*placement.roles(policy), *placement.roles(world)}
    assert placement.ranks == tuple(range(ranks))


def test_a_whole_actor_has_its_world_where_its_policy_is():
    placement = parse_placement("learner=0,world=1,policy=2,actor=3", 4)
    assert [placement.world_of(rank) for rank in placement.actors] == [1, 3]
    assert [placement.roles(rank) for rank in range(4)] == [("learner",), ("world",), ("policy",), ("actor",)]
    assert placement.summary == "1 learner + 1 actor + 1 actor on 2 devices"
    assert parse_placement("auto", 4).summary == "1 learner + 3 actors"
    assert parse_placement("hybrid", 8).summary == "8 learners + 4 actors on 2 devices each"


@pytest.mark.parametrize("word", WORDS)
def test_a_word_fits_any_number_of_ranks_and_needs_none_of_them(word):
    assert ranks_named(word) == 1
    assert not only_learns(word)
    for ranks in range(1, 10):
        placement = parse_placement(word, ranks)
        assert placement.ranks == tuple(range(ranks)), "nobody is idle"
        assert placement.actors
        assert placement.learners[0] == 0


def test_policies_of_actors_on_two_devices_are_actors():
    assert not only_learns("learner=0,policy=1,world=2")
    assert only_learns("learner=0-1")
    assert ranks_named("learner=0,policy=1,world=2") == 3


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("learner=0,critic=1", 2, "the role 'critic', but there are only learner, actor, policy, world"),
        ("learner=0,policy=1", 2, "names 1 policy and 0 world ranks"),
        ("learner=0,policy=1-2,world=3", 4, "names 2 policy and 1 world ranks"),
        ("learner=0,policy=1,world=1", 2, "on its one device write actor=1"),
        ("learner=0,actor=1,policy=1,world=2", 3, "gives rank 1 more than one of actor, policy and world"),
        ("learner=0,policy=1,world=3", 4, "gives rank 2 nothing to do"),
        ("learner=0@0,actor=1", 2, "names the host of some ranks (@) and not of rank 1. Name it for all"),
        ("learner=0@,actor=1", 2, "'learner=0@' is not role=rank"),
        ("learner=0@0,actor=1@99999", 2, "'actor=1@99999' is not role=rank"),
        ("colocated", 2, "nor is the text one of auto, collocated, disaggregated, hybrid"),
        ("learner=0", 1, "names no actor"),
        ("actor=0", 1, "names no learner"),
        ("", 1, "'' is not role=rank or role=first-last"),
        ("0,actor=1", 2, "'0' is not role=rank"),
        ("learner=0,actor=one", 2, "'actor=one' is not role=rank"),
        ("learner=0,actor=3-1", 4, "ends before it begins. Use 1-3"),
        ("learner=0,actor=1-2,2", 3, "names rank 2 twice as actor"),
        ("learner=0,actor=1", 3, "gives rank 2 nothing to do, but torchrun started 3 ranks (0-2)"),
        ("learner=0,2,actor=1-3", 4, "puts learners on rank 0, 2, but rank 0 leads them"),
        ("learner=1,actor=0", 2, "puts learners on rank 1, but rank 0 leads them"),
        ("learner=0,actor=1", 1, "torchrun started 1 rank (0). Start more with --nproc-per-node 2 or"),
        ("learner=0,actor=1-4", 3, "names rank 4, but torchrun started 3 ranks (0-2). Start more with --npr"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(text, ranks, message):
    with pytest.raises(ConfigError) as caught:
        parse_placement(text, ranks)
    assert message in str(caught.value)


def test_every_learner_rank_needs_a_group():
    config = TrainConfig(placement="learner=0-1,actor=2", algorithm=AlgorithmSettings(groups_per_update=2))
    assert checked_placement(config, 3).learners == (0, 1)
    with pytest.raises(ConfigError, match=r"groups-per-update is 1, but --placement names 2 learner ranks"):
        checked_placement(replace(config, algorithm=AlgorithmSettings(groups_per_update=1)), 3)


@pytest.mark.parametrize(("actors", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (1, 1, 1), (4, 8, 2)])
def test_actors_never_get_more_threads_than_there_are_cores(actors, cores, threads):
    assert threads_of_actor(actors, cores) == threads
