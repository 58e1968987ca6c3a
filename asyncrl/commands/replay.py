"""`asyncrl replay list|show|video|sheet|stats|verify|imagine|export|prune`: look into a replay.

All commands but `prune`, the only one that changes files, work on a live run. Only `imagine` runs models, and
imports their packages only then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from asyncrl.config.bounds import AtLeast
from asyncrl.config.help import subcommands
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import Episode, StartState
from asyncrl.registry import MODELS
from asyncrl.replay_tools.episodes import ReplayCommand, find_group
from asyncrl.replay_tools.files import Export, Prune, Verify
from asyncrl.replay_tools.pictures import Comparison, Sheet, Video, comparison_table
from asyncrl.replay_tools.tables import ListEpisodes, Show, Stats
from asyncrl.storage.assets import simulator_named

if TYPE_CHECKING:
    import torch

    from asyncrl.config.run import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Imagine(ReplayCommand):
    """Imagine a group again from its stored actions and noise, and compare frames, scores and log-probs."""

    group: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="GROUP")]
    """Number of the group."""
    rows: Annotated[int, AtLeast(0, "it counts rows.", "Use 0 for those of the run.", highest=4096)] = 0
    """Rows of every pass of the models: 1 runs every member alone. 0: with --imagination.fixed-shape as many
    as in the run, else the members still running."""
    device: str = "auto"
    """Where the models run: cpu, cuda, or auto."""
    policy: str = ""
    """In place of the run's --policy, as for `train`. Classes of your own must be named here again, as for
    the next three."""
    world: str = ""
    """In place of the run's --world."""
    reward: str = ""
    """In place of the run's --reward."""
    start_states: str = ""
    """In place of the run's --start-states."""

    def run(self) -> int:
        """Print the table; return 1 if a member differs, else 0."""
        from asyncrl.devices.tensors import take_device
        from asyncrl.evaluation.imagined_and_true import imagine_group
        from asyncrl.launch.environment import build_world_model, rows_of_a_pass

        episodes = find_group(self.folder, self.group)
        run, config = self._run()
        if simulator_named(config.world):
            raise ConfigError(
                f"the episodes of group {self.group} were played in the simulator {config.world}, so there "
                "is nothing to imagine again. Name a world model with --world to see what it would imagine."
            )
        device = take_device(self.device)
        world, reward, starts = build_world_model(config, device)
        start = _start_of(episodes, starts)
        print(f"group {self.group}: {start.task}, from start state {start.name}, {len(episodes)} members")
        others = {episode.world_version for episode in episodes} - {world.version}
        note = f", but the group's was {min(others)}: it cannot come out the same" if others else ""
        print(f"world {config.world}, version {world.version}{note}")
        logprobs = _logprobs(run, config, episodes, device)
        rows, why = self.rows, f"{self.rows} (--rows)"
        if not rows and config.imagination.fixed_shape:
            rows = rows_of_a_pass(config)
            why = f"{rows}, as in the run (--imagination.fixed-shape)"
        elif not rows:
            why = f"{len(episodes)} and fewer; the run's varied, which shows in the last digits"
        print(f"rows of a pass: {why}\n")
        imagined = imagine_group(world, reward, start, episodes, rows=rows)
        found = [
            Comparison(
                episode=episode,
                video=video,
                scores=scores,
                logprobs=of_policy,
                threshold=config.actor.success_threshold,
                success_frames=config.success_frames,
            )
            for episode, (video, scores), of_policy in zip(episodes, imagined, logprobs, strict=True)
        ]
        print(comparison_table(found))
        verdicts = [one.verdict for one in found]
        counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(verdicts))
        print(f"{len(found)} members: {counts}")
        return int("differs" in verdicts)

    def _run(self) -> tuple[Path, TrainConfig]:
        from asyncrl.config.run import TrainConfig, load_file
        from asyncrl.launch.named_models import refuse_foreign_code

        folders = (self.path, self.folder.parent)
        run = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        if run is None:
            raise ConfigError(
                f"{self.path} has no config.json, so it is not known with what its groups were imagined. "
                "Give a run's folder."
            )
        given: Any = {name: text for name in (*MODELS, "start_states") if (text := getattr(self, name))}
        config = replace(load_file(run / "config.json"), **given)
        refuse_foreign_code(config, TrainConfig(**given), str(run / "config.json"), MODELS)
        return run, config


def _start_of(episodes: Sequence[Episode], starts: Sequence[StartState]) -> StartState:
    first = episodes[0]
    if first.world_version < 0:
        raise ConfigError("the group was recorded in a simulator: no world imagined it.")
    start = next((start for start in starts if start.name == first.start_state), None)
    if start is None:
        raise ConfigError(
            f"the group began at start state {first.start_state}, which is not among the {len(starts)} that "
            "the run's settings name now. Name the file or folder they are in: --start-states."
        )
    if not np.array_equal(start.present_frame, first.frames[0]):
        raise ConfigError(
            f"start state {start.name} does not look like the first frame of the group: it is another one of "
            "that name. Name the file or folder that the run had: --start-states."
        )
    return start


def _logprobs(
    run: Path, config: TrainConfig, episodes: Sequence[Episode], device: torch.device
) -> list[np.ndarray]:
    from asyncrl.evaluation.imagined_and_true import logprobs_again
    from asyncrl.launch.named_models import load_policy_version
    from asyncrl.storage import checkpoint

    kept = checkpoint.kept(run)
    found = [np.full_like(episode.logprobs, np.nan) for episode in episodes]
    for version in sorted({int(v) for episode in episodes for v in episode.policy_versions}):
        if version and version not in kept:
            nearest = min([0, *kept], key=lambda other: abs(other - version))
            why = f"not kept (the nearest is {nearest}), its log-probs are left out"
            print(f"policy version {version}: {why}")
            continue
        source = str(kept[version]) if version in kept else f"{config.policy}, with which the run began"
        print(f"policy version {version}: {source}")
        policy = load_policy_version(config, kept.get(version), device)
        for episode, logprobs in zip(episodes, found, strict=True):
            if (decisions := np.flatnonzero(episode.policy_versions == version)).size:
                logprobs[decisions] = logprobs_again(policy, episode, decisions.tolist())
    return found


ARGUMENTS: Any = tyro.conf.FlagCreatePairsOff[
    subcommands(
        {
            **{"list": ListEpisodes, "show": Show, "video": Video, "sheet": Sheet, "stats": Stats},
            **{"verify": Verify, "imagine": Imagine, "export": Export, "prune": Prune},
        }
    )
]


def main(arguments: list[str]) -> int:
    """Run a replay command; return 0, 1 if it found damage or a difference, 2 for invalid input."""
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl replay")
    try:
        return wanted.run()
    except (ConfigError, ReplayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
