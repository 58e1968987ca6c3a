"""`asyncrl evaluate CHECKPOINT`: success rate in the true simulator."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import Evaluation, acting, evaluate, evaluation_seeds
from asyncrl.storage.asset_paths import policy_folder

SIMULATORS = ("tabletop",)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Play a policy from held-out start states in the true simulator and count successes."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Run folder (its newest checkpoint), checkpoint, policy folder, or 'tabletop' (the shipped policy)."""
    simulator: str = "tabletop"
    """Simulator to play in."""
    episodes: int = 256
    """Episodes, each from its own start state."""
    seed: int = 0
    """Which held-out start states; the same seed gives the same ones."""
    temperature: float = 1.0
    """Sampling temperature of the action tokens, as in training; 0 = always the most likely token."""
    max_decisions: int = 6
    """Longest episode, in decisions of 8 steps."""
    workers: int = min(8, os.cpu_count() or 1)
    """Simulator processes."""
    device: str = "auto"
    """Where the policy runs: cpu, cuda, or auto."""
    video: str = ""
    """Write a contact sheet of true and imagined episodes here: .mp4 (needs the extra 'video') or .gif."""
    world: str = "tabletop"
    """World model that imagines the episodes of --video."""
    json: str = ""
    """Also write the result to this file."""


def main(arguments: list[str]) -> int:
    """Evaluate and print a table."""
    config = tyro.cli(EvaluateConfig, args=arguments, prog="asyncrl evaluate")
    if config.simulator not in SIMULATORS:
        raise ConfigError(
            f"--simulator {config.simulator} is not built in. There is: {', '.join(SIMULATORS)}."
        )
    if config.temperature < 0:
        raise ConfigError(f"--temperature {config.temperature} is negative. Use 1.0, or 0 for greedy.")
    evaluation_seeds(config.seed, config.episodes)
    folder = policy_folder(config.checkpoint)
    from asyncrl.simulators.rendering import require_backend

    require_backend()
    result = _play(config, folder)
    print(table(result))
    if config.json:
        content = {"checkpoint": str(folder), "seed": config.seed, "temperature": config.temperature}
        Path(config.json).write_text(json.dumps(content | result.as_dict(), indent=2) + "\n")
    return 0


def _play(config: EvaluateConfig, folder: Path) -> Evaluation:
    from asyncrl.launch.placement import pick_device
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.policies.openvla.policy import load_policy
    from asyncrl.simulators.pool import SimulatorPool

    policy = load_policy(folder, device=pick_device(config.device))
    act = acting(policy, SamplingParams(temperature=config.temperature, top_k=0))
    places = max(1, min(16, -(-config.episodes // config.workers)))
    with SimulatorPool(
        config.simulator, workers=config.workers, envs_per_worker=places, image_size=policy.config.image_size
    ) as pool:
        result, episodes = evaluate(
            pool, act, episodes=config.episodes, seed=config.seed, max_decisions=config.max_decisions
        )
    if config.video:
        from asyncrl.evaluation.contact_sheet import write_contact_sheet

        write_contact_sheet(Path(config.video), episodes, config.world)
        print(f"contact sheet in {config.video}")
    return result


def table(result: Evaluation) -> str:
    """The success rates as aligned rows."""
    width = max(len(task) for task in [*result.by_task, "all tasks"])
    rows = [f"{task:<{width}}  {rate}" for task, rate in result.by_task.items()]
    head = f"{'task':<{width}}  success  95 % interval   episodes"
    total = f"{'all tasks':<{width}}  {result.overall}   mean steps to success {result.mean_steps:.1f}"
    return "\n".join([head, *rows, total])
