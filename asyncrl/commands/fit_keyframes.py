"""`asyncrl fit keyframes`: start states on the way to the goal, of recorded true episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitKeyframes

if TYPE_CHECKING:
    from asyncrl.evaluation.audit import Models
    from asyncrl.records import StartState

CANDIDATES = 2
"""As many as this for each key frame that is wanted, where only some are taken."""
ROWS = 32
"""Episodes imagined together."""


def fit_keyframes_command(config: FitKeyframes, recordings: Recordings) -> None:
    """Write key frames of the recorded episodes."""
    from asyncrl.fitting.keyframes import keyframe_states
    from asyncrl.fitting.rlinf_trajectories import write_trajectories
    from asyncrl.worlds.start_states import save_start_states

    if config.layout == "npy":
        starts, written = write_trajectories(recordings, config.out)
        print(f"{starts} starts and {written} key frames in {config.out}")
        return
    states = _open(config, recordings) if config.policy else keyframe_states(recordings, config.count)
    save_start_states(config.out, states)
    print(f"{len(states)} key frames of {len({state.task for state in states})} tasks in {config.out}")


def _open(config: FitKeyframes, recordings: Recordings) -> list[StartState]:
    """Choose those from which the outcome of `--policy` in `--world` is open."""
    from asyncrl.evaluation.open_outcomes import open_starts
    from asyncrl.fitting.keyframes import balanced, keyframe_states

    models = _models(config, sorted(set(recordings.tasks)))
    candidates = keyframe_states(recordings, CANDIDATES * config.count)
    candidates = [state for state in candidates if state.elapsed < models.max_decisions]
    with tqdm(total=len(candidates) * config.siblings, unit="episode", mininterval=2.0) as bar:
        found = open_starts(
            models, candidates, siblings=config.siblings, rows=ROWS, seed=config.seed, progress=bar.update
        )
    print(f"{len(found)} of {len(candidates)} candidates have an open outcome")
    if not found:
        raise ConfigError(
            f"From none of {len(candidates)} candidates some of the {config.siblings} episodes that --policy "
            f"{config.policy} imagines in --world {config.world} succeed and some do not. Use more "
            "--siblings or --data, or leave --policy out to take them all."
        )
    return balanced(found, config.count)


def _models(config: FitKeyframes, tasks: list[str]) -> Models:
    from asyncrl.config.run import TrainConfig
    from asyncrl.evaluation.audit import Models
    from asyncrl.launch.environment import with_world_defaults
    from asyncrl.launch.named_models import named_policy, named_reward, named_world
    from asyncrl.launch.own_device import take_device
    from asyncrl.policies.interface import SamplingParams

    device = take_device(config.device)
    settings, _ = with_world_defaults(TrainConfig(world=config.world))
    world = named_world(config.world, ())
    reward = named_reward("", world.folder, ())
    policy = named_policy(config.policy, ())
    return Models(
        policy=policy.kind.load(policy.folder, device, **policy.settings),
        world=world.kind.load(world.folder, device, settings.imagination, **world.settings),
        reward=reward.kind.load(reward.folder, device, tasks, **reward.settings),
        sampling=SamplingParams(temperature=config.temperature, top_k=0),
        max_decisions=settings.actor.max_decisions,
        threshold=settings.actor.success_threshold,
        success_frames=settings.success_frames,
    )
