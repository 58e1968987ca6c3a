"""`asyncrl evaluate CHECKPOINT`: measure the success rate of a policy in the true simulator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from asyncrl import registry
from asyncrl.config.bounds import SEEDS, THREADS, AtLeast, Bounded, Within
from asyncrl.evaluation.evaluate import Evaluation, acting, evaluate, evaluation_seeds

if TYPE_CHECKING:
    from asyncrl.launch.named_models import NamedModel
    from asyncrl.simulators.rollout import SimulatedEpisode


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Bounded):
    """Play a policy from held-out start states in the true simulator and count successes."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Run folder (its newest checkpoint), checkpoint, policy folder, or 'tabletop' (the shipped policy); of a
    class of your own: package.module:Class@FOLDER."""
    policy_settings: tuple[str, ...] = ()
    """Keywords of the policy's class: key=value ..."""
    simulator: str = "tabletop"
    """Simulator to play in: a built-in one, or package.module:Class."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    episodes: Annotated[int, AtLeast(1, "a rate needs an episode.", "Use 256.", highest=1_000_000)] = 256
    """Episodes, each from its own start state."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Which held-out start states; the same seed gives the same ones."""
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0, or 0 for greedy.")] = (
        1.0
    )
    """Sampling temperature of the action tokens, as in training; 0 = always the most likely token."""
    max_decisions: Annotated[int, AtLeast(1, "an episode has a decision.", "Use 6.", highest=10_000)] = 6
    """Longest episode, in decisions of 8 steps."""
    workers: Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)] = min(
        8, os.cpu_count() or 1
    )
    """Simulator processes."""
    device: str = "auto"
    """Where the policy runs: cpu, cuda, or auto."""
    video: str = ""
    """Write a contact sheet of true and imagined episodes here: .mp4 (needs the extra 'video') or .gif."""
    world: str = "tabletop"
    """World model that imagines the episodes of --video; see `asyncrl train --world`."""
    world_settings: tuple[str, ...] = ()
    """Keywords of the world's class: key=value ..."""
    json: str = ""
    """Also write the result to this file."""


def main(arguments: list[str]) -> int:
    """Evaluate and print a table."""
    config = tyro.cli(EvaluateConfig, args=arguments, prog="asyncrl evaluate")
    evaluation_seeds(config.seed, config.episodes)
    from asyncrl.launch.named_models import named_policy

    registry.resolve("simulator", config.simulator)
    policy = named_policy(config.checkpoint, config.policy_settings)
    result = _play(config, policy)
    print(table(result))
    if config.json:
        content = {"checkpoint": str(policy.folder), "seed": config.seed, "temperature": config.temperature}
        Path(config.json).write_text(json.dumps(content | result.as_dict(), indent=2) + "\n")
    return 0


def _play(config: EvaluateConfig, named: NamedModel) -> Evaluation:
    from asyncrl.launch.placement import pick_device
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.simulators.pool import SimulatorPool

    device = pick_device(config.device)
    write_video = _video_writer(config) if config.video else None
    policy = named.kind.load(named.folder, device, **named.settings)
    act = acting(policy, SamplingParams(temperature=config.temperature, top_k=0))
    envs = max(1, min(16, -(-config.episodes // config.workers)))
    with SimulatorPool(
        config.simulator,
        workers=config.workers,
        envs_per_worker=envs,
        image_size=policy.image_size,
        settings=config.simulator_settings,
        action_spec=policy.action_spec,
    ) as pool:
        result, episodes = evaluate(
            pool, act, episodes=config.episodes, seed=config.seed, max_decisions=config.max_decisions
        )
    if write_video is not None:
        write_video(episodes)
        print(f"contact sheet in {config.video}")
    return result


def _video_writer(config: EvaluateConfig) -> Callable[[list[SimulatedEpisode]], None]:
    """Load what --video needs, so that what cannot work is said before the episodes are played."""
    import torch

    from asyncrl.config.run import ImaginationSettings
    from asyncrl.evaluation.contact_sheet import check_suffix, write_contact_sheet
    from asyncrl.launch.named_models import named_world

    check_suffix(Path(config.video))
    named = named_world(config.world, config.world_settings)
    world = named.kind.load(named.folder, torch.device("cpu"), ImaginationSettings(), **named.settings)
    return lambda episodes: write_contact_sheet(Path(config.video), episodes, world)


def table(result: Evaluation) -> str:
    """The success rates as aligned rows."""
    width = max(len(task) for task in [*result.by_task, "all tasks"])
    rows = [f"{task:<{width}}  {rate}" for task, rate in result.by_task.items()]
    head = f"{'task':<{width}}  success  95 % interval   episodes"
    total = f"{'all tasks':<{width}}  {result.overall}   mean steps to success {result.mean_steps:.1f}"
    return "\n".join([head, *rows, total])
