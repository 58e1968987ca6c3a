"""`asyncrl evaluate [POLICY]`: measure the success rate of a policy in a true simulator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from asyncrl import registry
from asyncrl.config.bounds import PIXELS, SEEDS, THREADS, AtLeast, Bounded, Within
from asyncrl.config.help import EVALUATE, answer_help
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import Evaluation, acting, check_fits, episode_row, evaluate
from asyncrl.evaluation.simulator_of_tasks import refuse_foreign_tasks
from asyncrl.simulators.interface import Demonstrator
from asyncrl.simulators.rollout import EPISODES, evaluation_plays, evaluation_seeds

if TYPE_CHECKING:
    from asyncrl.launch.run_settings import RunSettings
    from asyncrl.policies.interface import Policy
    from asyncrl.simulators.build import SimulatorSource
    from asyncrl.simulators.interface import SimulatorSpec
    from asyncrl.simulators.pool import SimulatorPool
    from asyncrl.simulators.rollout import SimulatedEpisode
    from asyncrl.worlds.interface import World

OTHER_TASKS = "Choose another simulator, or add --other-tasks: no task of training is measured then."
EXPERT = "expert"
"""Names the simulator's own demonstrator in the place of a policy."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Bounded):
    """Play a policy from held-out starts in a true simulator and count successes."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[POLICY]")] = ""
    """Run folder (its newest checkpoint), checkpoint, policy folder, or 'tabletop' (the shipped policy); of a
    class of your own: package.module:Class@FOLDER; 'expert': the simulator's scripted expert."""
    policy: str = ""
    """The same, as a flag."""
    policy_settings: tuple[str, ...] = ()
    """Keywords of the policy's class: key=value ..."""
    simulator: str = "tabletop"
    """Simulator to play in: a built-in one, or package.module:Class (or a function that makes one). Of a run
    the one that it trained in, or that has the tasks of its start states."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    episodes: Annotated[int, AtLeast(0, "it counts episodes.", "Use 256.", highest=1_000_000)] = 0
    """Episodes, each from its own start, of simulators whose starts are seeds; 0: 256."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Which held-out starts, of simulators whose starts are seeds; the same seed gives the same ones."""
    tasks: tuple[str, ...] = ()
    """Tasks to play, as numbers or instructions, of simulators with stored starts; none: all."""
    trials: Annotated[int, AtLeast(0, "it counts starts.", "Use 0 for all.", highest=1_000_000)] = 0
    """Stored starts to play of each task, from the first on; 0: all."""
    repeats: Annotated[int, AtLeast(1, "each start is played.", "Use 1.", highest=10_000)] = 1
    """How often each start is played; a policy that samples decides anew each time."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: what the simulator's protocol says."""
    settle: Annotated[int, AtLeast(-1, "it counts steps.", "Use -1.", highest=10_000)] = -1
    """Idle steps after a reset until objects rest, of simulators with such; -1: what its protocol says."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Side of the pictures; 0: what the simulator's protocol says, else what the policy is best shown."""
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0, or 0 for greedy.")] = (
        1.0
    )
    """Sampling temperature of the action tokens; of a run its own, else 1; 0: always the most likely one."""
    top_k: Annotated[int, AtLeast(0, "it counts tokens.", "Use 0 for all.", highest=1_000_000)] = 0
    """Sample among so many of the most likely tokens; of a run its own, else 0: among all."""
    other_tasks: bool = False
    """Play a run's policy in a simulator that lacks some of the tasks it was trained on."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """How good the expert is, where it plays."""
    workers: Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)] = min(
        8, os.cpu_count() or 1
    )
    """Simulator processes."""
    places: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0.", highest=65536)] = 0
    """Episodes that each process plays at once; 0: as many as the simulator likes."""
    rows: Annotated[int, AtLeast(1, "a pass has a row.", "Use 8.", highest=65536)] = 8
    """Rows of every pass of the policy, filled up with copies: so results do not depend on --workers."""
    device: str = "auto"
    """Where the policy runs: cpu, cuda, or auto."""
    video: str = ""
    """Write a contact sheet of true and imagined episodes here: .mp4 (needs the extra 'video') or .gif."""
    world: str = "tabletop"
    """World model that imagines the episodes of --video; see `asyncrl train --world`."""
    world_settings: tuple[str, ...] = ()
    """Keywords of the world's class: key=value ..."""
    movies: str = ""
    """Write a movie of every episode into this folder: .mp4 with the extra 'video', else .gif."""
    json: str = ""
    """Also write the result, with every episode, to this file."""
    tensorboard: str = ""
    """Also write eval/* there; of a checkpoint of a run, at its update."""

    @property
    def player(self) -> str:
        """Return what plays."""
        if bool(self.checkpoint) == bool(self.policy):
            raise ConfigError(
                "Say once what is evaluated: `asyncrl evaluate CHECKPOINT`, or --policy CHECKPOINT; 'expert' "
                "is the simulator's scripted expert."
            )
        return self.checkpoint or self.policy


ARGUMENTS: Final = EvaluateConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str]) -> int:
    """Evaluate and print a table."""
    arguments = answer_help(arguments, lambda: EVALUATE.text(EvaluateConfig()))
    config, run = _parse(arguments)
    player = config.player
    evaluation_seeds(config.seed, config.episodes or EPISODES)
    registry.resolve("simulator", config.simulator)
    _check_outputs(config)
    _refuse_idle(config, player)
    if run is not None:
        print(_of_run(config, run))
    played = _play_expert(config) if player == EXPERT else _play_policy(config, run)
    print(table(played.result))
    if protocol := played.simulator["protocol"]:
        print(protocol)
    if config.json:
        content = {
            "checkpoint": played.folder,
            "seed": config.seed,
            "temperature": config.temperature,
            "top_k": config.top_k,
        }
        if player == EXPERT:
            content = {"checkpoint": EXPERT, "seed": config.seed, "expert": asdict(config.expert)}
        rows = {"episodes": [episode_row(episode) for episode in played.episodes]}
        whole = content | {"simulator": played.simulator} | played.result.as_dict() | rows
        Path(config.json).write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n")
    if config.tensorboard:
        _write_curves(Path(config.tensorboard), played.folder, config.simulator, played.result)
    if config.movies:
        print(f"{len(played.episodes)} movies in {config.movies}")
    if played.write_video is not None:
        played.write_video(played.episodes)
        print(f"contact sheet in {config.video}")
    return 0


def _parse(arguments: list[str]) -> tuple[EvaluateConfig, RunSettings | None]:
    """Read the flags; what they leave open is as in the run that the policy is of, if it is of one."""
    from asyncrl.launch.run_settings import run_of, settings_of_run

    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl evaluate")
    folder = None if config.player == EXPERT else run_of(config.player)
    if folder is None:
        return config, None
    run = settings_of_run(folder)
    default = EvaluateConfig(
        policy_settings=run.config.policy_settings if registry.names_code(config.player) else (),
        simulator=run.simulator,
        simulator_settings=run.simulator_settings,
        horizon=run.config.simulator.horizon,
        temperature=run.config.algorithm.temperature,
        top_k=run.config.algorithm.top_k,
        world=run.config.world if config.video and not registry.names_code(run.config.world) else "tabletop",
    )
    config = tyro.cli(ARGUMENTS, args=arguments, default=default, prog="asyncrl evaluate")
    if not config.simulator:
        trained = f"as {run.tasks[0]!r}" if run.tasks else "which are not known here"
        raise ConfigError(
            f"No built-in simulator is known to have the tasks of {folder}, {trained}. Name one: --simulator "
            "NAME, or package.module:make; `asyncrl simulators list` shows what there is."
        )
    if config.simulator != run.simulator and run.simulator_settings == config.simulator_settings:
        config = replace(config, simulator_settings=())  # They were another simulator's.
    return config, run


def _of_run(config: EvaluateConfig, run: RunSettings) -> str:
    """Say in a line what was taken from the run."""
    top_k = f", top-k {config.top_k}" if config.top_k else ""
    horizon = f", horizon {config.horizon}" if config.horizon else ""
    changed = "" if config.temperature == run.config.algorithm.temperature else " (the run's: "
    changed += f"{run.config.algorithm.temperature:g})" if changed else ""
    return f"simulator {config.simulator}, temperature {config.temperature:g}{changed}{top_k}{horizon}"


def _refuse_idle(config: EvaluateConfig, player: str) -> None:
    """Refuse what would be set without any effect."""
    expert = player == EXPERT
    if expert and config.video:
        raise ConfigError("--video draws what a policy did beside a world. Use --movies with the expert.")
    if not expert and config.expert != Demonstrator():
        raise ConfigError(f"--expert.* says how the expert plays, but {player} does. Leave it out.")
    if not config.video and (config.world != "tabletop" or config.world_settings):
        raise ConfigError("--world imagines the episodes of --video. Set --video too, or leave --world out.")
    if config.repeats > 1 and (expert or not config.temperature):
        alike = "the expert" if expert else "a policy at --temperature 0"
        raise ConfigError(
            f"--repeats is {config.repeats}, but {alike} plays a start alike each time, so that the "
            "same episodes would count again. Use --repeats 1."
        )


def _check_outputs(config: EvaluateConfig) -> None:
    """Refuse what could not be written before anything is played."""
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {config.json}: there is no folder {Path(config.json).parent}. Make it.")
    if config.json and Path(config.json).is_dir():
        raise ConfigError(f"--json {config.json} is a folder, where a file is expected. Add a file's name.")
    for flag, folder in (("--movies", config.movies), ("--tensorboard", config.tensorboard)):
        if folder and Path(folder).exists() and not Path(folder).is_dir():
            raise ConfigError(f"{flag} {folder} is a file, where a folder is expected. Choose another name.")


def _source(config: EvaluateConfig, wanted_size: int, episodes: int) -> SimulatorSource:
    """Say what every worker builds."""
    from asyncrl.simulators.build import SimulatorSource

    settle = (f"settle={config.settle}",) if config.settle >= 0 else ()
    source = SimulatorSource(
        name=config.simulator,
        settings=(*config.simulator_settings, *settle),
        image_size=config.image_size,
        horizon=config.horizon,
    )
    kind = registry.resolve("simulator", config.simulator)
    if not config.image_size and getattr(kind, "any_image_size", False):
        source = source.with_(image_size=wanted_size)
    most = -(-episodes // config.workers)
    return source.with_(places=config.places or max(1, min(source.usual_places(), most)))


def _episodes(config: EvaluateConfig) -> int:
    """Bound the number of episodes from above, before the simulator says what it has."""
    return max(config.episodes or EPISODES, config.trials * max(1, len(config.tasks))) * config.repeats


def _plays(config: EvaluateConfig, pool: SimulatorPool) -> list:
    return evaluation_plays(
        pool.spec,
        episodes=config.episodes,
        seed=config.seed,
        tasks=config.tasks,
        trials=config.trials,
        repeats=config.repeats,
    )


@dataclass(frozen=True, kw_only=True)
class _Played:
    """What came of it."""

    result: Evaluation
    episodes: list[SimulatedEpisode]
    simulator: dict[str, object]
    """What it was and how it was set, without what must not matter."""
    folder: str
    write_video: Callable[[list[SimulatedEpisode]], None] | None = None


def _simulator_row(source: SimulatorSource, spec: SimulatorSpec) -> dict[str, object]:
    row = {name: value for name, value in asdict(source).items() if name != "places"}
    return row | {"max_steps": spec.max_steps, "image_size": spec.image_size, "protocol": spec.protocol}


def _play_expert(config: EvaluateConfig) -> _Played:
    from asyncrl.simulators.pool import SimulatorPool

    source = _source(config, 0, _episodes(config))
    if not source.may_have_expert():
        raise ConfigError(
            f"--simulator {config.simulator} has no expert. Name a policy, or add the method `expert`: "
            "docs/extending.md."
        )
    with SimulatorPool(source, workers=config.workers) as pool:
        result, episodes = evaluate(
            pool, config.expert, _plays(config, pool), on_frames=_movie_writer(config)
        )
        row = _simulator_row(source, pool.spec)
    return _Played(result=result, episodes=episodes, simulator=row, folder=EXPERT)


def _play_policy(config: EvaluateConfig, run: RunSettings | None) -> _Played:
    from asyncrl.evaluation.contact_sheet import PAIRS, check_imagines, write_contact_sheet
    from asyncrl.launch.named_models import named_policy
    from asyncrl.launch.own_device import take_device
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.simulators.pool import SimulatorPool

    named = named_policy(config.player, config.policy_settings)
    device = take_device(config.device)
    world = _world_of_video(config) if config.video else None
    policy: Policy = named.kind.load(named.folder, device, **named.settings)
    source = _source(config, policy.image_size, _episodes(config))
    act = acting(policy, SamplingParams(temperature=config.temperature, top_k=config.top_k), config.rows)
    with SimulatorPool(source, workers=config.workers, steps=policy.action_spec.chunk) as pool:
        check_fits(policy, pool.spec)
        if run is not None and not config.other_tasks:
            refuse_foreign_tasks(run.tasks, pool.spec.tasks, config.simulator, OTHER_TASKS)
        if world is not None:
            check_imagines(world, pool.spec)
        result, episodes = evaluate(
            pool,
            act,
            _plays(config, pool),
            on_frames=_movie_writer(config),
            keep_frames=PAIRS if config.video else 0,
        )
        row = _simulator_row(source, pool.spec)
    write_video = partial(write_contact_sheet, Path(config.video), world=world) if world else None
    return _Played(
        result=result, episodes=episodes, simulator=row, folder=str(named.folder), write_video=write_video
    )


def _world_of_video(config: EvaluateConfig) -> World[Any]:
    """Load what --video needs, so that what cannot work is said before the episodes are played."""
    import torch

    from asyncrl.config.sections import ImaginationSettings
    from asyncrl.evaluation.contact_sheet import check_suffix
    from asyncrl.launch.named_models import named_world

    check_suffix(Path(config.video))
    named = named_world(config.world, config.world_settings)
    return named.kind.load(named.folder, torch.device("cpu"), ImaginationSettings(), **named.settings)


def _movie_writer(config: EvaluateConfig) -> Callable[[SimulatedEpisode], None] | None:
    """Return what writes an episode's pictures, named by its start and by what became of it."""
    from asyncrl.storage.media import movie_suffix, write_movie

    if not config.movies:
        return None
    folder = Path(config.movies)
    folder.mkdir(parents=True, exist_ok=True)

    def write(episode: SimulatedEpisode) -> None:
        outcome = "solved" if episode.solved else "failed"
        name = f"{episode.start.name.replace('/', '_')}_{episode.repeat}_{outcome}{movie_suffix()}"
        write_movie(folder / name, episode.frames, rate=20)

    return write


def _write_curves(folder: Path, checkpoint: str, simulator: str, result: Evaluation) -> None:
    """Write the rates as one point of the curves eval/*: at the update that the checkpoint's name says."""
    from asyncrl.observability import metrics_training as m
    from asyncrl.observability.logger import write_curves

    number = Path(checkpoint).name.rpartition("_")[2]
    step = int(number) if Path(checkpoint).name.startswith("update_") and number.isdecimal() else 0
    values = {
        m.EVAL_SUCCESS: result.overall.rate,
        m.EVAL_LOW: result.overall.low,
        m.EVAL_HIGH: result.overall.high,
        m.EVAL_EPISODES: float(result.overall.episodes),
        m.EVAL_STEPS: result.mean_steps,
    }
    write_curves(folder / simulator.replace(":", "_"), {step: values})


def table(result: Evaluation) -> str:
    """The success rates as aligned rows."""
    width = max(len(task) for task in [*result.by_task, "all tasks"])
    rows = [f"{task:<{width}}  {rate}" for task, rate in result.by_task.items()]
    head = f"{'task':<{width}}  success  95 % interval   episodes"
    steps = f"   mean steps to success {result.mean_steps:.1f}" if result.overall.successes else ""
    total = f"{'all tasks':<{width}}  {result.overall}{steps}"
    return "\n".join([head, *rows, total])
