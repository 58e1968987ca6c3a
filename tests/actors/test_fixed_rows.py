"""--imagination.fixed-shape: an episode has the same bits whatever is beside it. The shipped models."""

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.backend import EpisodePlan, Slots, Stage
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ImaginationSettings
from asyncrl.launch.environment import Environment, build_imagination, build_world_model
from asyncrl.launch.named_models import build_policy
from asyncrl.policies.interface import SamplingParams
from asyncrl.replay.interface import GroupGrant
from support.tiny_actor import TASKS

CPU = torch.device("cpu")
SLOTS = 5
Episode = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def environment() -> Environment:
    return build_world_model(TrainConfig(), CPU)


def models(environment: Environment, *, fixed_shape: bool) -> WorldBackend[Any]:
    config = TrainConfig(
        actor=ActorSettings(slots=SLOTS), imagination=ImaginationSettings(fixed_shape=fixed_shape)
    )
    return build_imagination(config, build_policy(config, CPU), environment)


def imagine(models: WorldBackend[Any], environment: Environment, wanted: list[tuple[int, int]]) -> Episode:
    """Two decisions of the last of the given (group, member) pairs, the others in the slots before it."""
    stage, slots = Stage[Any](indices=range(SLOTS)), Slots(SLOTS, run_seed=0)
    for number, member in wanted:
        grant = GroupGrant(number=number, min_version=0, keep_video=True)
        slots.pending.append(EpisodePlan(grant=grant, member=member, start=environment.starts[number]))
    models.begin(slots, stage, slots.fill(0, range(SLOTS)))
    for _ in range(2):
        models.launch(slots, stage, slots.live, 0)
        assert models.collect(slots, stage, 60.0)[0] == []
    return slots.episode(len(wanted) - 1).decisions


def same(one: Episode, other: Episode) -> bool:
    return all(
        np.array_equal(array, theirs[name])
        for mine, theirs in zip(one, other, strict=True)
        for name, array in mine.items()
    )


def test_at_a_fixed_shape_no_bit_of_an_episode_depends_on_how_many_are_beside_it(environment) -> None:
    found = {}
    for fixed_shape in (False, True):
        imagination = models(environment, fixed_shape=fixed_shape)
        alone = imagine(imagination, environment, [(1, 1)])
        among = imagine(imagination, environment, [(0, 0), (2, 1), (1, 0), (1, 1)])
        found[fixed_shape] = same(alone, among)
    assert found == {False: False, True: True}, "else this test cannot tell that filling up is needed"


def test_at_a_fixed_shape_no_bit_of_a_decision_depends_on_the_length_of_its_neighbours_instructions(
    imagination: WorldBackend[Any],
) -> None:
    policy: Any = imagination.policy
    short, long = "lift it", TASKS[0]
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    sampling = SamplingParams(temperature=1.0)

    def decided(*tasks: str) -> list[torch.Tensor]:
        """Tokens and log-probs of the first row."""
        acted = policy.act(policy.preprocess(frames, tasks), sampling, [3, 4])
        return [acted.sample["tokens"][0], acted.logprob[0]]

    before = policy.tokenizer.shortest, policy.tokenizer.always_masked
    policy.fix_prompts([long, short])
    try:
        for task in (short, long):
            beside_short, beside_long = decided(task, short), decided(task, long)
            assert all(map(torch.equal, beside_short, beside_long)), task
    finally:
        policy.tokenizer.shortest, policy.tokenizer.always_masked = before
