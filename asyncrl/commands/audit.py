"""`asyncrl audit [POLICY]`: compare imagined episodes with the true outcome of the same actions."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from asyncrl import registry
from asyncrl.commands.evaluate import HeldOutConfig, check_json
from asyncrl.config.bounds import AtLeast, Within
from asyncrl.config.help import ShortHelp
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ImaginationSettings, SuccessFrames
from asyncrl.errors import ConfigError
from asyncrl.evaluation.success_rate import check_fits, refuse_foreign_tasks
from asyncrl.observability.terminal import progress
from asyncrl.simulators.interface import SimulatorSource
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import SEEDS_PER_EVALUATION, evaluation_plays
from asyncrl.storage.assets import simulator_named, start_states_path

if TYPE_CHECKING:
    import torch

    from asyncrl.evaluation.imagined_and_true import AuditedEpisode, AuditModels
    from asyncrl.launch.named_models import RunSettings

EPISODES: Final = 128  # By default, of simulators whose starts are seeds


@dataclass(frozen=True, kw_only=True)
class AuditConfig(HeldOutConfig):
    """Imagine held-out episodes closed-loop, play their actions in the simulator, and compare.

    Settings left open are those of the policy's run.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[POLICY]")] = "tabletop"
    """Run folder (its newest checkpoint), checkpoint, policy folder or shipped policy; of a class of your
    own: package.module:Class@FOLDER."""
    every_checkpoint: bool = False
    """All checkpoints of the run, a row each."""
    world: str = "tabletop"
    """World model that imagines; see `asyncrl train --world`."""
    world_settings: tuple[str, ...] = ()
    """Keywords of the world's class: key=value ..."""
    reward: str = ""
    """Reward model, by default the world's own."""
    reward_settings: tuple[str, ...] = ()
    """Keywords of the reward model's class: key=value ..."""
    start_states: str = ""
    """Start states of training, whose tasks the reward model must know; empty: it must know those of the
    simulator, if it names them. Episodes begin in the simulator."""
    imagination: ImaginationSettings = field(default_factory=ImaginationSettings)
    max_decisions: Annotated[int, AtLeast(0, "it counts decisions.", "Use 0.", highest=100_000)] = 0
    """Decisions of an episode; 0: the world's own."""
    true_decisions: Annotated[int, AtLeast(0, "it counts decisions.", "Use 0.", highest=100_000)] = 0
    """True decisions before imagination begins. Episodes that end in them are left out."""
    success_threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.", open_below=True)] = (
        0.7
    )
    """Least probability of a successful frame."""
    success_frames: SuccessFrames = 1
    """Successful frames in a row for a success; last: a decision's last frame."""
    episodes: Annotated[int, AtLeast(0, "it counts episodes.", "Use 128.", SEEDS_PER_EVALUATION)] = 0
    """Episodes, where starts are seeds; 0: 128."""
    rows: Annotated[int, AtLeast(1, "a pass has a row.", "Use 16.", highest=65536)] = 16
    """Episodes imagined together; padded with copies, so results do not depend on --workers."""


HELP: Final = ShortHelp(
    command="asyncrl audit",
    usage="[POLICY] [--flags]",
    groups={
        "What is audited": "every_checkpoint world reward max_decisions true_decisions success_threshold "
        "success_frames temperature",
        "The truth": "simulator episodes trials seed",
        "How fast, and what is written": "rows workers device json",
    },
    examples=["asyncrl audit runs/mine --every-checkpoint --episodes 256"],
)


def main(arguments: list[str]) -> int:
    """Audit and print tables."""
    from asyncrl.evaluation.imagined_and_true import Audit, table

    config, run = _parse(arguments)
    check_json(config.json)
    policies = _policies(config)
    audited = _audit_all(config, run, policies)
    head = f"world {config.world}, simulator {config.simulator}, temperature {config.temperature:g}"
    print(table(head, audited))
    audits = {name: Audit.of(episodes) for name, episodes in audited.items()}
    if config.json:
        rows = [
            {"name": name, **_plain(asdict(audit)), "episodes": [asdict(one) for one in audited[name]]}
            for name, audit in audits.items()
        ]
        content = {"settings": asdict(config), "audits": rows}
        Path(config.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _parse(arguments: list[str]) -> tuple[AuditConfig, RunSettings | None]:
    from asyncrl.launch.named_models import run_of, settings_of_run, without_code

    config, run = HELP.parse(AuditConfig, arguments), None
    if folder := run_of(config.checkpoint):
        run = settings_of_run(folder)
        own = run.config
        models: dict[str, Any] = {"world": ""}
        if not (registry.names_code(own.world) or registry.names_code(own.reward)):
            models = {name: getattr(own, name) for name in ("world", "reward", "reward_settings")}
            models["world_settings"] = without_code(own.world_settings)
        default = AuditConfig(
            **models,
            policy_settings=own.policy_settings if registry.names_code(config.checkpoint) else (),
            start_states=own.start_states,
            imagination=own.imagination,
            max_decisions=own.actor.max_decisions,
            success_threshold=own.actor.success_threshold,
            success_frames=own.success_frames,
            simulator=run.simulator,
            simulator_settings=run.simulator_settings,
            temperature=own.algorithm.temperature,
            top_k=own.algorithm.top_k,
        )
        config = HELP.parse(AuditConfig, arguments, default)
    for flag, value in (("world", config.world), ("simulator", config.simulator)):
        if not value:
            raise ConfigError(
                f"{config.checkpoint} does not say with which {flag} it is audited: it is a class of your "
                f"own, which a folder cannot name, or none is known to have its tasks. Say it: --{flag} NAME."
            )
    if simulator_named(config.world):
        raise ConfigError(
            f"--world {config.world} is a simulator: nothing is imagined that could be wrong. Name a world "
            "model."
        )
    return config, run


def _policies(config: AuditConfig) -> dict[str, str]:
    from asyncrl.launch.named_models import run_of
    from asyncrl.storage import checkpoint

    if not config.every_checkpoint:
        return {config.checkpoint: config.checkpoint}
    folder = run_of(config.checkpoint)
    if folder is None:
        raise ConfigError(f"--every-checkpoint needs a run's folder, and {config.checkpoint} is none.")
    if kept := checkpoint.kept(folder):
        return {f"update {version}": str(kept[version]) for version in sorted(kept)}
    raise ConfigError(f"--every-checkpoint needs a checkpoint, but {folder} has none yet.")


def _audit_all(
    config: AuditConfig, run: RunSettings | None, policies: dict[str, str]
) -> dict[str, list[AuditedEpisode]]:
    from asyncrl.devices.tensors import take_device
    from asyncrl.evaluation.contact_sheet import check_imagines
    from asyncrl.evaluation.imagined_and_true import audit
    from asyncrl.launch.named_models import named_policy

    device, found = take_device(config.device), {}
    models = _load_models(config, next(iter(policies.values())), device)
    size, chunk = models.world.image_size, models.world.action_spec.chunk
    source = config.source(config.rows, image_size=size, horizon=models.max_decisions * chunk)
    with SimulatorPool(source, workers=config.workers) as pool:
        check_imagines(models.world, pool.spec, "the audit")
        if run is not None:
            refuse_foreign_tasks(run.tasks, pool.spec.tasks, config.simulator, "Choose another --simulator.")
        chosen = {name: getattr(config, name) for name in ("seed", "tasks", "trials")}
        episodes = config.episodes or (0 if pool.spec.trials else EPISODES)
        plays = evaluation_plays(pool.spec, episodes=episodes, repeats=1, **chosen)
        check_fits(models.policy, pool.spec, (play.start.task for play in plays))
        with progress(total=len(plays) * len(policies), desc="audit", unit="episode") as bar:
            for name, text in policies.items():
                if found:
                    models = replace(models, policy=named_policy(text, config.policy_settings).load(device))
                models = replace(models, policy_name=f"policy {text}")
                found[name] = audit(
                    models, pool, plays, rows=config.rows, seed=config.seed, progress=bar.update
                )
    return found


def _load_models(config: AuditConfig, policy: str, device: torch.device) -> AuditModels:
    from asyncrl.evaluation.imagined_and_true import AuditModels
    from asyncrl.launch.environment import tasks_of, with_world_defaults
    from asyncrl.launch.named_models import folder_part, named_policy, named_reward, named_world
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.worlds.start_states import load_start_states

    tasks = SimulatorSource(name=config.simulator, settings=config.simulator_settings).spec().tasks
    if config.start_states:
        path = start_states_path(config.start_states, folder_part(config.world))
        tasks = tasks_of(load_start_states(path))
    settings, _ = with_world_defaults(
        TrainConfig(
            world=config.world,
            world_settings=config.world_settings,
            imagination=config.imagination,
            actor=ActorSettings(max_decisions=config.max_decisions),
        )
    )
    most = settings.actor.max_decisions
    if config.true_decisions >= most:
        raise ConfigError(f"--true-decisions leaves nothing of {most} decisions to imagine. Use fewer.")
    world = named_world(config.world, config.world_settings)
    reward = named_reward(config.reward, world.folder, config.reward_settings)
    return AuditModels(
        policy=named_policy(policy, config.policy_settings).load(device),
        world=world.load(device, settings.imagination),
        reward=reward.load(device, list(tasks)),
        sampling=SamplingParams(temperature=config.temperature, top_k=config.top_k),
        max_decisions=most,
        threshold=config.success_threshold,
        success_frames=config.success_frames,
        true_decisions=config.true_decisions,
    )
