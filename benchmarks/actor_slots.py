"""How full actors are: the share of their slots that have an episode, with a real replay behind a socket.

    python benchmarks/actor_slots.py

Only the decisions are not real: they take a set time, and an episode ends after a number of them drawn by its
seed. The learner takes every batch at once, so credit is never short for long.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from asyncrl.config.actor import ActorSettings
from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.replay import ReplaySettings
from asyncrl.config.run import TrainConfig
from support.timed_imagination import measure_slots

ROWS: tuple[tuple[str, int, Literal[1, 2], int, int, int, int], ...] = (
    # Name, slots, stages, episodes per group, groups per update, shortest and longest episode
    ("tabletop", 16, 1, 8, 16, 2, 6),
    ("tabletop, ppo", 16, 1, 8, 8, 2, 6),
    ("Wan, grpo", 8, 1, 8, 128, 16, 32),
    ("Wan, grpo, 141 GB", 32, 1, 8, 128, 16, 32),
    ("Wan, ppo", 16, 1, 1, 256, 8, 16),
    ("Wan, ppo, 141 GB", 32, 1, 1, 256, 8, 16),
    ("Wan, ppo, two stages", 32, 2, 1, 256, 8, 16),
    ("64 slots, groups of 8", 64, 1, 8, 128, 8, 16),
    ("64 slots, groups of 1", 64, 1, 1, 256, 8, 16),
)


def main(seconds: float = 0.1, decisions: int = 150) -> None:
    """Print a row per recipe.

    Args:
        seconds: Of one decision of all slots.
        decisions: Of each row.
    """
    print(
        "| recipe | slots | stages | group size | decisions per episode | live slots | most groups at once |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, slots, stages, group_size, groups, shortest, longest in ROWS:
        config = TrainConfig(
            algorithm=AlgorithmSettings(
                kind="ppo" if group_size == 1 else "grpo", group_size=group_size, groups_per_update=groups
            ),
            actor=ActorSettings(slots=slots, pipeline_stages=stages, max_decisions=longest),
            replay=ReplaySettings(keep_video_every=0),
        )
        with tempfile.TemporaryDirectory() as folder:
            found = measure_slots(
                Path(folder) / "run",
                config,
                shortest=shortest,
                longest=longest,
                seconds=seconds,
                decisions=decisions,
            )
        print(
            f"| {name} | {slots} | {stages} | {group_size} | {shortest} to {longest} | {found.live:.1%} | "
            f"{found.most_groups} |",
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
