"""Estimate what the fitter of --pace.every takes on its device, phase by phase of a round. Loads no weights.

    playing              a pass of a few decisions
    judging              a world and its reward model as actors have them, some slots
    choosing key frames  the same, and the policy decides in all of them
    refitting world      the world in float32, gradient, moments, average of what is trained, activations
    refitting reward     the reward model likewise; before, the world that redraws its frames

The policy is there all the time. Else a phase leaves nothing behind, so the largest one is what must fit. On
a CPU two worlds are judged at once, and both models refitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.findings import Sizes
from asyncrl.evaluation.contact_sheet import BATCH
from asyncrl.fitting.kept_bytes import FLOAT32, kept_bytes
from asyncrl.fitting.worlds.interface import CountsFit, load_fitted
from asyncrl.launch import refits
from asyncrl.launch.environment import check_world_model
from asyncrl.pace import new_keyframes
from asyncrl.pace.fitter import WorldAt
from asyncrl.pace.true_episodes import ROWS
from asyncrl.records import CHUNK
from asyncrl.rewards.model import load_reward

OPTIMIZER: Final = 3 * FLOAT32
"""Bytes per number that is trained: its gradient and AdamW's two moments."""
AVERAGE: Final = FLOAT32
"""And its moving average, which fits of worlds keep."""
PLAYING, JUDGING, CHOOSING = "playing", "judging", "choosing key frames"
OF_WORLD, OF_REWARD = "refitting the world", "refitting the reward model"


def round_phases(config: TrainConfig, sizes: Sizes) -> dict[str, int]:
    """Estimate the phases of the run's last round, which fits the most episodes.

    What adapts to the memory that is free (pictures on a GPU, pictures that are encoded side by side) is not
    in it. A GPU keeps activations in bfloat16, for which this is an upper bound.

    Args:
        config: Of a run with --pace.every, with what its world says.
        sizes: Of its models.

    Returns:
        Phase -> bytes.
    """
    first, slot = refits.first_world(config), sizes.slot
    judging = sizes.environment + BATCH * slot.kept + slot.drawing(BATCH, graphs=False)
    found = {PLAYING: ROWS * sizes.acting, JUDGING: judging}
    if config.keyframe_share > 0 and config.pace.keyframes and config.pace.siblings:
        found[CHOOSING] = judging + new_keyframes.ROWS * sizes.acting
    if config.pace.world_steps:
        found[OF_WORLD] = world_refit(config, first)
    if config.pace.reward_steps:
        found[OF_REWARD] = reward_refit(config, first)
    return {phase: sizes.policy + nbytes for phase, nbytes in found.items()}


def made_at_once(phases: Mapping[str, int], policy: int) -> dict[str, int]:
    """Return the phases of a round whose parts are made at once; see `pace.side_by_side.parts_at_once`.

    Args:
        phases: See `round_phases`.
        policy: Its bytes, which every phase counts.

    >>> made_at_once({JUDGING: 5, OF_WORLD: 9, OF_REWARD: 4}, policy=3)
    {'judging': 7, 'refitting world and reward model': 10}
    """
    pair = [phases[name] for name in (OF_WORLD, OF_REWARD) if name in phases]
    found = dict(phases)
    if JUDGING in found:
        found[JUDGING] += found[JUDGING] - policy
    if len(pair) == 2:
        del found[OF_WORLD], found[OF_REWARD]
        found["refitting world and reward model"] = sum(pair) - policy
    return found


def world_refit(config: TrainConfig, at: WorldAt) -> int:
    """Estimate `pace.refit` of what draws latents."""
    fit = load_fitted(at.folder, torch.device("meta"), torch.float32)
    if not isinstance(fit, CountsFit):  # A kind that does not say it: its weights alone.
        return _numbers(fit.world.modules().values()) * FLOAT32
    weights = _numbers(fit.world.modules().values()) * FLOAT32
    changing = _numbers(fit.trained().values()) * (OPTIMIZER + AVERAGE)
    return weights + changing + fit.step_bytes(config.pace.batch) + _latents(config, fit)


def reward_refit(config: TrainConfig, at: WorldAt) -> int:
    """Estimate `pace.refit` of the reward model: the world redraws its frames first, and is then gone."""
    meta = torch.device("meta")
    tasks = sorted({state.task for state in check_world_model(config).starts})
    judge = load_reward(at.reward, tasks=tasks, device=meta).network
    weights = _numbers([judge]) * FLOAT32
    fit = load_fitted(at.folder, meta, torch.float32)
    redrawing = _numbers(fit.world.modules().values()) * FLOAT32 + _latents(config, fit)
    judge.requires_grad_(True).train()
    side, batch = fit.image_size, config.pace.batch

    def loss() -> torch.Tensor:
        tasks = torch.zeros(batch, dtype=torch.int64, device=meta)
        logits = judge.logits(torch.empty(batch, 3, side, side, device=meta), tasks)
        return binary_cross_entropy_with_logits(logits, torch.empty(batch, device=meta))

    fitting = _numbers([judge]) * OPTIMIZER + kept_bytes(loss, [judge])
    return weights + max(redrawing, fitting)


def most_episodes(config: TrainConfig) -> int:
    """Count the episodes that the last round can fit, those of --pace.base included.

    >>> from asyncrl.config.pace import PaceSettings
    >>> pace = PaceSettings(every=6, episodes=100, held_out=0.5, fresh=0.5)
    >>> most_episodes(TrainConfig(updates=20, pace=pace))
    250
    """
    pace = config.pace
    rounds = (config.updates - 1) // pace.every
    if pace.budget:
        rounds = min(rounds, pace.budget // pace.episodes)
    own = max(0, rounds * pace.episodes - pace.audited)
    return round(own / pace.fresh) if pace.base else own


def _latents(config: TrainConfig, fit: object) -> int:
    """Bytes of the latents of all episodes, each as long as the run lets one be."""
    if not isinstance(fit, CountsFit):
        return 0
    return most_episodes(config) * fit.episode_bytes(1 + config.actor.max_decisions * CHUNK)


def _numbers(modules: Iterable[nn.Module]) -> int:
    return sum(tensor.numel() for module in modules for tensor in (*module.parameters(), *module.buffers()))
