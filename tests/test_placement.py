"""`--placement`: text and number of ranks in, ranks per role out."""

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Placement, check_groups, parse_placement, threads_of_actor


@pytest.mark.parametrize(
    ("text", "ranks", "learners", "actors"),
    [
        ("auto", 1, (0,), (0,)),
        ("auto", 2, (0,), (1,)),
        ("auto", 4, (0,), (1, 2, 3)),
        ("learner=0,actor=1-3", 4, (0,), (1, 2, 3)),
        ("actor=1-3,learner=0", 4, (0,), (1, 2, 3)),
        ("actor=0,learner=0", 1, (0,), (0,)),
        ("learner=0,actor=0-2", 3, (0,), (0, 1, 2)),
        (" learner = 0, actor = 1, 3, 2 ", 4, (0,), (1, 2, 3)),
        ("learner=0-0,actor=1,2-3", 4, (0,), (1, 2, 3)),
        ("learner=0-1,actor=2-3", 4, (0, 1), (2, 3)),
        ("learner=0-1,actor=0-1", 2, (0, 1), (0, 1)),
    ],
)
def test_every_rank_gets_its_roles(text, ranks, learners, actors):
    assert parse_placement(text, ranks, 0) == Placement(learners=learners, actors=actors)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("learner=0,critic=1", 2, "names the role 'critic', but there are only learner and actor"),
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
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(text, ranks, message):
    with pytest.raises(ConfigError) as caught:
        parse_placement(text, ranks, 0)
    assert message in str(caught.value)


def test_a_rank_that_was_not_started_is_named_with_the_ranks_that_were():
    with pytest.raises(ConfigError) as caught:
        parse_placement("learner=0,actor=1-4", 3, 8)
    assert str(caught.value) == (
        "--placement names rank 4, but torchrun started 3 ranks (0-2). Start more with --nproc-per-node 5 "
        "(this host has 8 GPUs) or name only ranks that exist."
    )


def test_every_learner_rank_needs_a_group():
    both = parse_placement("learner=0-1,actor=2", 3, 0)
    check_groups(both, 2)
    with pytest.raises(ConfigError, match=r"groups-per-update is 1, but --placement names 2 learner ranks"):
        check_groups(both, 1)


def test_one_started_rank_is_not_called_ranks():
    with pytest.raises(
        ConfigError, match=r"torchrun started 1 rank \(0\)\. Start more with --nproc-per-node 2 or"
    ):
        parse_placement("learner=0,actor=1", 1, 0)


def test_a_placement_answers_what_a_rank_does_and_sums_itself_up():
    both = parse_placement("auto", 1, 0)
    assert (both.learns(0), both.imagines(0), both.summary) == (True, True, "1 learner + 1 actor")
    split = parse_placement("auto", 4, 4)
    assert [(split.learns(rank), split.imagines(rank)) for rank in range(4)] == [(True, False)] + [
        (False, True)
    ] * 3
    assert split.summary == "1 learner + 3 actors"


@pytest.mark.parametrize(("actors", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (1, 1, 1), (4, 8, 2)])
def test_actors_never_get_more_threads_than_there_are_cores(actors, cores, threads):
    assert threads_of_actor(actors, cores) == threads
