"""Imagine a stored group again with its actions and noise.

Letters: N decisions of an episode, C steps per decision, A numbers per step, H W image size in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import Episode, StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.worlds.interface import World


@dataclass(frozen=True, kw_only=True)
class ImaginedAgain:
    """Frames and scores of stored actions and noise, by decision."""

    frames: list[NDArray[np.uint8]] = field(default_factory=list)  # N times [C, H, W, 3].
    scores: list[NDArray[np.float32]] = field(default_factory=list)  # N times [C] probability of success.


@torch.inference_mode()
def imagine_again(
    world: World[Any], reward: RewardModel, start: StartState, episodes: Sequence[Episode], *, rows: int = 0
) -> list[ImaginedAgain]:
    """Imagine the frames of a group's stored actions, with the stored noise.

    Args:
        rows: Of every pass; fewer are filled up with copies of the first. 0: all members that go on.

    Returns:
        One per episode, of as many decisions.
    """
    size = rows or len(episodes)
    found = []
    for first in range(0, len(episodes), size):
        found += _imagine_together(world, reward, start, episodes[first : first + size], rows)
    return found


def _imagine_together(
    world: World[Any], reward: RewardModel, start: StartState, episodes: Sequence[Episode], rows: int
) -> list[ImaginedAgain]:
    found = [ImaginedAgain() for _ in episodes]
    in_state = _filled(list(range(len(episodes))), rows)
    decisions = max(len(episode.actions) for episode in episodes)
    state = world.start([start] * len(in_state), decisions=decisions)
    for n in range(decisions):
        going_on = [member for member, episode in enumerate(episodes) if n < len(episode.actions)]
        members = _filled(going_on, rows)
        if members != in_state:
            state = state.select([in_state.index(member) for member in members])
        actions_BCA = torch.from_numpy(np.stack([episodes[member].actions[n] for member in members]))
        seeds = [int(episodes[member].noise_seeds[n]) for member in members]
        frames, state = world.imagine(state, actions_BCA.to(world.device), seeds)
        scores_BC = reward.score(frames, [start.task] * len(members)).cpu().numpy()
        frames_BCHW3 = frames.cpu().numpy()
        for row, member in enumerate(going_on):
            found[member].frames.append(frames_BCHW3[row])
            found[member].scores.append(scores_BC[row])
        in_state = members
    return found


def _filled(members: list[int], rows: int) -> list[int]:
    return [*members, *members[:1] * (rows - len(members))]


@torch.no_grad()
def logprobs_again(policy: Policy, episode: Episode, decisions: Sequence[int]) -> NDArray[np.float32]:
    """Compute a policy's log-probs ``[len(decisions), C, A]`` in nats of stored samples of some decisions."""
    chosen = list(decisions)
    inputs = policy.preprocess(episode.frames[chosen], [episode.task] * len(chosen))
    sample = {
        name: torch.from_numpy(array[chosen]).to(policy.device) for name, array in episode.sample.items()
    }
    sampling = SamplingParams(temperature=episode.temperature, top_k=episode.top_k)
    return policy.evaluate(inputs, sample, sampling).logprob.float().cpu().numpy()
