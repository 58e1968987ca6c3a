"""Imagine a stored group again: the actions and the noise that it was made of, once more through the models.

Dimension letters:
    N  decisions of an episode    C  steps per decision    A  numbers per step    H, W  image size in pixels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import Episode, StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.seeds import noise_seed, repetition_seed
from asyncrl.worlds.interface import World

Worlds = Callable[[int], tuple[World[Any], RewardModel]]
"""Version of a world -> the world, and the reward model that judges it."""


@dataclass(frozen=True, kw_only=True)
class ImaginedAgain:
    """What stored actions and noise led to, decision by decision."""

    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    """N times ``[C, H, W, 3]``."""
    scores: list[NDArray[np.float32]] = field(default_factory=list)
    """N times ``[C]`` probability of success per step."""


@torch.inference_mode()
def imagine_again(
    worlds: Worlds, start: StartState, episodes: Sequence[Episode], *, rows: int = 0
) -> list[ImaginedAgain]:
    """Imagine what the stored actions of a group lead to, with the stored noise.

    Args:
        worlds: Gives the world that drew a decision, and the reward model that judged it.
        start: Of the group.
        episodes: Its members, of any lengths.
        rows: Rows of every pass: members in excess of it go through the models afterwards, and where fewer
            are left, copies of the first fill it up. 0: all members whose episodes go on.

    Returns:
        As many as `episodes`, in their order, each of as many decisions as its own.
    """
    size = rows or len(episodes)
    found = []
    for first in range(0, len(episodes), size):
        found += _imagine_together(worlds, start, episodes[first : first + size], rows)
    return found


def repetition_of(episode: Episode) -> Episode:
    """Return what an actor imagined to weigh an episode, as one that `imagine_again` takes.

    It has the episode's start and actions, and the noise of the seed that follows from its own. Which version
    of the world drew it is not stored: it is taken for the one of the episode's last decision, the earliest
    that can have been.
    """
    seed, decisions = repetition_seed(episode.seed), len(episode.actions)
    noise_seeds = np.array([noise_seed(seed, n) for n in range(decisions)], episode.noise_seeds.dtype)
    version = _drawn_by(episode, decisions - 1)
    return replace(
        episode,
        noise_seeds=noise_seeds,
        world_version=version,
        world_versions=np.full(decisions, version, np.int64),
    )


def _imagine_together(
    worlds: Worlds, start: StartState, episodes: Sequence[Episode], rows: int
) -> list[ImaginedAgain]:
    found = [ImaginedAgain() for _ in episodes]
    in_state = _filled(list(range(len(episodes))), rows)
    decisions = max(len(episode.actions) for episode in episodes)
    world, _ = worlds(_drawn_by(episodes[0], 0))
    state = world.start([start] * len(in_state), decisions=decisions)
    for n in range(decisions):
        going_on = [member for member, episode in enumerate(episodes) if n < len(episode.actions)]
        versions = sorted({_drawn_by(episodes[member], n) for member in going_on})
        before, state_before = in_state, state
        for version in versions:
            alike = [member for member in going_on if _drawn_by(episodes[member], n) == version]
            taking_part = _filled(alike, rows)
            part = state_before
            if taking_part != before:
                part = state_before.select([before.index(member) for member in taking_part])
            world, reward = worlds(version)
            actions_BCA = torch.from_numpy(np.stack([episodes[member].actions[n] for member in taking_part]))
            seeds = [int(episodes[member].noise_seeds[n]) for member in taking_part]
            frames, after = world.imagine(part, actions_BCA.to(world.device), seeds)
            scores_BC = reward.score(frames, [start.task] * len(taking_part)).cpu().numpy()
            frames_BCHW3 = frames.cpu().numpy()
            for row, member in enumerate(alike):
                found[member].frames.append(frames_BCHW3[row])
                found[member].scores.append(scores_BC[row])
            if len(versions) == 1:
                state, in_state = after, taking_part
            else:
                if version == versions[0]:
                    state, in_state = state_before.select([before.index(one) for one in going_on]), going_on
                state = state.write_rows(
                    [going_on.index(one) for one in alike], after.select(range(len(alike)))
                )
    return found


def _drawn_by(episode: Episode, decision: int) -> int:
    """Return the version of the world that drew a decision."""
    found = episode.world_versions
    return episode.world_version if found is None else int(found[decision])


def _filled(members: list[int], rows: int) -> list[int]:
    return [*members, *members[:1] * (rows - len(members))]


@torch.no_grad()
def logprobs_again(policy: Policy, episode: Episode, decisions: Sequence[int]) -> NDArray[np.float32]:
    """Compute the log-probs that a policy gives the stored samples of some decisions.

    Args:
        policy: Of the version that sampled them.
        episode: Stored.
        decisions: Which of its decisions, at least one.

    Returns:
        ``[len(decisions), C, A]`` in nats.
    """
    chosen = list(decisions)
    inputs = policy.preprocess(episode.frames[chosen], [episode.task] * len(chosen))
    sample = {
        name: torch.from_numpy(array[chosen]).to(policy.device) for name, array in episode.sample.items()
    }
    sampling = SamplingParams(temperature=episode.temperature, top_k=episode.top_k)
    return policy.evaluate(inputs, sample, sampling).logprob.float().cpu().numpy()
