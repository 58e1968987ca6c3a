"""`asyncrl evaluate [POLICY]`: measure the success rate of a policy in a true simulator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from asyncrl import registry
from asyncrl.config.bounds import PIXELS, SEEDS, THREADS, AtLeast, Bounded, Within
from asyncrl.config.help import ShortHelp
from asyncrl.errors import ConfigError
from asyncrl.evaluation import success_rate
from asyncrl.simulators.interface import Demonstrator, SimulatorSource
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import EPISODES, SEEDS_PER_EVALUATION, evaluation_plays

if TYPE_CHECKING:
    from asyncrl.launch.named_models import RunSettings
    from asyncrl.simulators.interface import SimulatorSource, SimulatorSpec
    from asyncrl.simulators.rollout import Act, SimulatedEpisode
    from asyncrl.worlds.interface import World

OTHER_TASKS = "Choose another --simulator, or add --other-tasks: no task of training is measured then."
Workers = Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)]
WORKERS: Final = min(8, os.cpu_count() or 1)
EXPERT = "expert"  # Name of the simulator's own demonstrator


@dataclass(frozen=True, kw_only=True)
class PlayConfig(Bounded):
    """Flags of all commands that play a policy in a simulator."""

    policy_settings: tuple[str, ...] = ()
    """Keywords of the policy's class: key=value ..."""
    simulator: str = "tabletop"
    """Built-in, or package.module:Class; or a function that makes one."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    tasks: tuple[str, ...] = ()
    """Numbers or instructions; for simulators with stored starts. Empty: all."""
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0, or 0 for greedy.")] = (
        1.0
    )
    """Temperature of the action tokens; 0: always the likeliest one."""
    workers: Workers = WORKERS
    """Simulator processes."""
    device: str = "auto"
    """Where models run: cpu, cuda, or auto."""

    def source(self, episodes: int, *settings: str, places: int = 0, **sizes: int) -> SimulatorSource:
        """Return the simulator of every worker; `episodes` bounds the places if `places` is 0."""
        source = SimulatorSource(name=self.simulator, settings=(*self.simulator_settings, *settings), **sizes)
        most = min(source.usual_places(), -(-episodes // self.workers))
        return source.with_(places=places or max(1, most))


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(PlayConfig):
    """Flags of all commands that play held-out starts."""

    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Seed of the held-out starts; no effect on stored ones. In an audit also of the noise."""
    trials: Annotated[int, AtLeast(0, "it counts starts.", "Use 0 for all.", highest=1_000_000)] = 0
    """Stored starts of each task, from the first; 0: all."""
    top_k: Annotated[int, AtLeast(0, "it counts tokens.", "Use 0 for all.", highest=1_000_000)] = 0
    """Sample among this many most likely tokens; 0: among all."""
    json: str = ""
    """File for the result, with every episode."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(HeldOutConfig):
    """Play a policy from held-out starts in a true simulator and count successes.

    Settings left open are those of the policy's run.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[POLICY]")] = ""
    """Run folder (its newest checkpoint), checkpoint, policy folder, or 'tabletop' (the shipped policy); of a
    class of your own: package.module:Class@FOLDER; 'expert': the simulator's scripted expert."""
    episodes: Annotated[int, AtLeast(0, "it counts episodes.", "Use 256.", SEEDS_PER_EVALUATION)] = 0
    """Episodes, where starts are seeds; 0: 256."""
    repeats: Annotated[int, AtLeast(1, "each start is played.", "Use 1.", highest=10_000)] = 1
    """How often each start is played; a policy that samples decides differently each time."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: as in the simulator's protocol."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Side of the pictures; 0: as in the simulator's protocol, else the policy's preferred size."""
    other_tasks: bool = False
    """Play a run's policy in a simulator that lacks some of the tasks it was trained on."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """Quality of the expert, if it plays."""
    places: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0.", highest=65536)] = 0
    """Episodes of a process at once; 0: the simulator's usual number."""
    rows: Annotated[int, AtLeast(1, "a pass has a row.", "Use 8.", highest=65536)] = 8
    """Rows of every pass of the policy, padded with copies, so results do not depend on --workers."""
    video: str = ""
    """File for episodes, true and imagined: .mp4 (needs the extra 'video') or .gif."""
    world: str = "tabletop"
    """World model of --video; see `asyncrl train --world`."""
    world_settings: tuple[str, ...] = ()
    """Keywords of the world's class: key=value ..."""
    movies: str = ""
    """Folder for a movie of every episode: .mp4 with the extra 'video', else .gif."""


HELP: Final = ShortHelp(
    command="asyncrl evaluate",
    usage="[POLICY] [--flags]",
    groups={
        "What is played": "simulator simulator_settings episodes tasks trials seed temperature",
        "How fast": "workers places device",
        "What is written": "json movies video world",
    },
    examples=["asyncrl evaluate runs/mine --episodes 256 --video sheet.gif"],
)


def main(arguments: list[str]) -> int:
    """Evaluate and print a table."""
    config, run = _parse(arguments)
    registry.resolve("simulator", config.simulator)
    check_json(config.json)
    expert = config.checkpoint == EXPERT
    if config.repeats > 1 and (expert or not config.temperature):
        alike = "the expert" if expert else "a policy at --temperature 0"
        raise ConfigError(
            f"--repeats is {config.repeats}, but {alike} plays a start alike each time, so that the "
            "same episodes would count again. Use --repeats 1."
        )
    if run is not None:
        print(f"simulator {config.simulator}, temperature {config.temperature:g}, top-k {config.top_k}")
    _evaluate(config, run)
    return 0


def _parse(arguments: list[str]) -> tuple[EvaluateConfig, RunSettings | None]:
    from asyncrl.launch.named_models import run_of, settings_of_run

    config = HELP.parse(EvaluateConfig, arguments)
    if not config.checkpoint:
        raise ConfigError(
            "Say what is evaluated: `asyncrl evaluate POLICY`; 'expert' is the simulator's scripted expert."
        )
    folder = None if config.checkpoint == EXPERT else run_of(config.checkpoint)
    if folder is None:
        return config, None
    run = settings_of_run(folder)
    own = run.config
    default = EvaluateConfig(
        policy_settings=own.policy_settings if registry.names_code(config.checkpoint) else (),
        simulator=run.simulator,
        simulator_settings=run.simulator_settings,
        horizon=own.simulator.horizon,
        temperature=own.algorithm.temperature,
        top_k=own.algorithm.top_k,
        world="tabletop" if registry.names_code(own.world) else own.world,
    )
    config = HELP.parse(EvaluateConfig, arguments, default)
    if not config.simulator:
        trained = f"as {run.tasks[0]!r}" if run.tasks else "which are not known here"
        raise ConfigError(
            f"No built-in simulator is known to have the tasks of {folder}, {trained}. Name one: --simulator "
            "NAME, or package.module:make; `asyncrl simulators list` shows what there is."
        )
    if config.simulator != run.simulator and run.simulator_settings == config.simulator_settings:
        config = replace(config, simulator_settings=())  # They were another simulator's.
    return config, run


def check_json(path: str) -> None:
    """Refuse a --json file that cannot be written; an empty `path` is no file."""
    if path and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {Path(path).parent}. Make it.")
    if path and Path(path).is_dir():
        raise ConfigError(f"--json {path} is a folder, where a file is expected. Add a file's name.")


def _evaluate(config: EvaluateConfig, run: RunSettings | None) -> None:
    import torch

    from asyncrl.config.sections import ImaginationSettings
    from asyncrl.devices.tensors import take_device
    from asyncrl.evaluation import contact_sheet
    from asyncrl.launch.named_models import named_policy, named_world
    from asyncrl.policies.interface import SamplingParams

    policy, folder = None, EXPERT
    act: Act | Demonstrator = config.expert
    if config.checkpoint != EXPERT:
        named = named_policy(config.checkpoint, config.policy_settings)
        policy, folder = named.load(take_device(config.device)), str(named.folder)
        sampling = SamplingParams(temperature=config.temperature, top_k=config.top_k)
        act = success_rate.acting(policy, sampling, config.rows, f"policy {config.checkpoint}")
    world: World[Any] | None = None
    if config.video:  # Its errors come before the episodes are played.
        contact_sheet.check_suffix(Path(config.video))
        imagining = named_world(config.world, config.world_settings)
        world = imagining.load(torch.device("cpu"), ImaginationSettings())
    size, kind = config.image_size, registry.resolve("simulator", config.simulator)
    if policy is not None and not size and getattr(kind, "any_image_size", False):
        size = policy.image_size
    # An upper bound of the episodes: the simulator has not been asked yet.
    episodes = max(config.episodes or EPISODES, config.trials * max(1, len(config.tasks))) * config.repeats
    source = config.source(episodes, places=config.places, image_size=size, horizon=config.horizon)
    if policy is None and not source.may_have_expert():
        raise ConfigError(
            f"--simulator {config.simulator} has no expert. Name a policy, or add the method `expert`: "
            "docs/extending.md."
        )
    with SimulatorPool(source, config.workers) as pool:
        spec = pool.spec
        chosen = {name: getattr(config, name) for name in ("episodes", "seed", "tasks", "trials", "repeats")}
        plays = evaluation_plays(spec, **chosen)
        if policy is not None:
            success_rate.check_fits(policy, spec, (play.start.task for play in plays))
            if run is not None and not config.other_tasks:
                success_rate.refuse_foreign_tasks(run.tasks, spec.tasks, config.simulator, OTHER_TASKS)
        if world is not None:
            contact_sheet.check_imagines(world, spec)
        shown = contact_sheet.PAIRS if world is not None else 0
        on_frames = movie_writer(Path(config.movies)) if config.movies else None
        result, played = success_rate.evaluate(pool, act, plays, on_frames=on_frames, keep_frames=shown)
    print(table(result))
    if spec.protocol:
        print(spec.protocol)
    if config.json:
        _write_json(config, folder, source, spec, result, played)
    if config.movies:
        print(f"{len(played)} movies in {config.movies}")
    if world is not None:
        contact_sheet.write_contact_sheet(Path(config.video), played, world=world)
        print(f"contact sheet in {config.video}")


def _write_json(
    config: EvaluateConfig,
    checkpoint: str,
    source: SimulatorSource,
    spec: SimulatorSpec,
    result: success_rate.Evaluation,
    episodes: list[SimulatedEpisode],
) -> None:
    names = ("max_steps", "image_size", "protocol")
    simulator = asdict(source) | {name: getattr(spec, name) for name in names}
    del simulator["places"]  # They change speed, never a result.
    player: dict[str, object] = {"temperature": config.temperature, "top_k": config.top_k}
    if checkpoint == EXPERT:
        player = {"expert": asdict(config.expert)}
    content = {"checkpoint": checkpoint, "seed": config.seed} | player | {"simulator": simulator}
    content |= result.as_dict() | {"episodes": [success_rate.episode_row(episode) for episode in episodes]}
    Path(config.json).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def movie_writer(folder: Path) -> Callable[[SimulatedEpisode], None]:
    """Make a folder, and return a function that writes an episode's movie into it."""
    from asyncrl.evaluation.contact_sheet import movie, unjudged
    from asyncrl.storage.media import movie_suffix, write_movie

    def write(episode: SimulatedEpisode) -> None:
        outcome = "solved" if episode.solved else "failed"
        name = f"{episode.start.name.replace('/', '_')}_{episode.repeat}_{outcome}{movie_suffix()}"
        write_movie(folder / name, movie([unjudged(episode)], episode.start.name), rate=20)

    folder.mkdir(parents=True, exist_ok=True)
    return write


def table(result: success_rate.Evaluation) -> str:
    """Format the success rates as aligned rows."""
    width = max(len(task) for task in [*result.by_task, "all tasks"])
    rows = [f"{task:<{width}}  {rate}" for task, rate in result.by_task.items()]
    head = f"{'task':<{width}}  success  95 % interval   episodes"
    steps = f"   mean steps to success {result.mean_steps:.1f}" if result.overall.successes else ""
    total = f"{'all tasks':<{width}}  {result.overall}{steps}"
    return "\n".join([head, *rows, total])
