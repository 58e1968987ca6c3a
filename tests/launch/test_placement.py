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
    ("text", "ranks", "learners", "actors"),
    [
        ("auto", 1, (0,), (0,)),
        ("auto", 2, (0,), (1,)),
        ("auto", 4, (0,), (1, 2, 3)),
        ("learner=0,actor=1-3", 4, (0,), (1, 2, 3)),
        ("actor=0,learner=0", 1, (0,), (0,)),
        ("learner=0,actor=0-2", 3, (0,), (0, 1, 2)),
        (" learner = 0, actor = 1, 3, 2 ", 4, (0,), (1, 2, 3)),
        ("learner=0-0,actor=1,2-3", 4, (0,), (1, 2, 3)),
        ("learner=0-1,actor=2-3", 4, (0, 1), (2, 3)),
        ("learner=0-1,actor=0-1", 2, (0, 1), (0, 1)),
        ("collocated", 3, (0, 1, 2), (0, 1, 2)),
        ("disaggregated", 1, (0,), (0,)),
        ("disaggregated", 3, (0,), (1, 2)),
        ("disaggregated", 8, (0, 1, 2, 3), (4, 5, 6, 7)),
    ],
)
def test_every_rank_gets_its_roles(text, ranks, learners, actors):
    placement = parse_placement(text, ranks)
    assert placement == Placement(learners=learners, actors=actors)
    assert placement.ranks == list(range(ranks))


def test_roles_and_ranks_have_words():
    placement = parse_placement("learner=0-1,actor=1-2", 3)
    assert [placement.roles(rank) for rank in range(3)] == [["learner"], ["learner", "actor"], ["actor"]]
    assert placement.summary == "2 learners + 2 actors"
    assert parse_placement("learner=0", 1, joined=True).summary == "1 learner"


@pytest.mark.parametrize("word", WORDS)
def test_a_word_fits_any_number_of_ranks_and_needs_none_of_them(word):
    assert ranks_named(word) == 1
    assert not only_learns(word)
    for ranks in range(1, 10):
        placement = parse_placement(word, ranks)
        assert placement.ranks == list(range(ranks)), "nobody is idle"
        assert placement.actors
        assert placement.learners[0] == 0


def test_a_text_says_how_many_ranks_it_needs_and_whether_any_acts():
    assert not only_learns("learner=0,actor=1-2")
    assert only_learns("learner=0-1")
    assert ranks_named("learner=0,actor=1-2") == 3


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("learner=0,critic=1", 2, "the role 'critic', but there are only learner, actor. Write"),
        ("learner=0,policy=1,world=2", 3, "the role 'policy', but there are only learner, actor"),
        ("learner=0@0,actor=1", 2, "names the host of some ranks (@) and not of rank 1. Name it for all"),
        ("learner=0@,actor=1", 2, "'learner=0@' is not role=rank"),
        ("learner=0@0,actor=1@99999", 2, "'actor=1@99999' is not role=rank"),
        ("colocated", 2, "nor is the text one of auto, collocated, disaggregated. Write"),
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
