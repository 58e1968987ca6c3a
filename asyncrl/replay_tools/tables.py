"""Run `asyncrl replay list` and `show`: print episodes as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from asyncrl.episode_layout import EPISODE_SCALARS, optional_of, scalar_types, version_of
from asyncrl.errors import ConfigError
from asyncrl.records import UNKNOWN_LENGTH, Episode
from asyncrl.replay_tools.episodes import NOTHING, StoredEpisode, find_row, table
from asyncrl.replay_tools.selection import EpisodeSelection, ReplayCommand

SORTS = Literal["number", "success", "steps", "lag", "version"]
TITLES = ("episode", "group", "member", "task", "success", "steps", "versions", "lag", "world", "group was")
_KEYS: dict[str, Callable[[StoredEpisode], Any]] = {
    "number": lambda row: 0,
    "success": lambda row: not row.episode.success,
    "steps": lambda row: row.steps,
    "lag": lambda row: -1 if row.lag is None else row.lag,
    "version": lambda row: row.episode.oldest_version,
}


@dataclass(frozen=True, kw_only=True)
class List(EpisodeSelection):
    """List the stored episodes."""

    sort: SORTS = "number"
    """Order of the rows: number is that of the group; successes come first; no lag comes first."""
    limit: int = 0
    """Show at most this many; 0: all."""
    json: bool = False
    """Print JSON, one object per episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit < 0:
            raise ConfigError(f"--limit is {self.limit}, but it counts rows. Use 0 for all of them.")

    def run(self) -> int:
        """Print the table."""
        rows = sorted(self.rows(), key=lambda row: (_KEYS[self.sort](row), row.number, row.episode.member))
        shown = rows[: self.limit] if self.limit else rows
        if self.json:
            print(json.dumps([as_dict(row) for row in shown], indent=1))
            return 0
        lines = [TITLES, *(_cells(row) for row in shown)]
        print(table(lines, ("world", "member", "lag", "group")))
        print(f"{len(rows)} episodes" + (f", {len(shown)} shown" if len(shown) < len(rows) else ""))
        return 0


@dataclass(frozen=True, kw_only=True)
class Show(ReplayCommand):
    """Show one episode, decision by decision."""

    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Its id, or the beginning of it."""

    def run(self) -> int:
        """Print its scalars and why it ended, then one row per decision."""
        row = find_row(self.folder, self.episode)
        kept = len(row.episode.video)
        scalars = scalar_types(version_of(row.episode))
        about = {name: str(getattr(row.episode, name)) for name in scalars} | {
            "group number": str(row.number),
            "group was": row.outcome if row.used_at is None else f"used at version {row.used_at}",
            "observations": f"{len(row.episode.frames)} of {_size(row)}",
            "sample": _sample(row),
            **_optional(row.episode),
            "video": f"{kept} frames" if kept else "not kept",
            "ended": why_ended(row),
        }
        print(table([*about.items(), ("", "")]))
        decisions = [_decision(row, n) for n in range(len(row.episode.frames))]
        print(table([_SHOW_TITLES, *decisions], ("noise seed", "last action", "value", "lag")))
        return 0


def why_ended(row: StoredEpisode) -> str:
    """Say how many steps an episode took, and why there were no more."""
    scores = row.episode.success_scores
    steps = f"{row.steps} steps ({len(scores)} decisions)"
    if row.episode.steps_taken != UNKNOWN_LENGTH:
        return f"{row.episode.end_reason} after {steps} in a simulator"
    if row.episode.success:
        score = scores.reshape(-1)[row.steps - 1]
        return f"success after {steps}: the reward model's score was {score:.3f} there"
    return f"truncated after {steps} without success; the best score was {scores.max():.3f}"


def as_dict(row: StoredEpisode) -> dict[str, Any]:
    """Describe one episode for JSON; `lag` and `used_at` are null when its group was not used."""
    return {name: getattr(row.episode, name) for name in EPISODE_SCALARS} | {
        "group_number": row.number,
        "success": row.episode.success,
        "steps": row.steps,
        "oldest_version": row.episode.oldest_version,
        "newest_version": row.newest_version,
        "used_at": row.used_at,
        "lag": row.lag,
        "outcome": row.outcome,
    }


_SHOW_TITLES = (
    "decision", "step", "version", "lag", "reward", "score", "logprob", "value",
    "first action", "last action", "noise seed",
)  # fmt: skip


def _decision(row: StoredEpisode, n: int) -> tuple[str, ...]:
    episode = row.episode
    version = int(episode.policy_versions[n])
    return (
        str(n),
        str(n * episode.rewards.shape[1]),
        str(version),
        NOTHING if row.used_at is None else str(row.used_at - version),
        f"{episode.rewards[n].sum():g}",
        f"{episode.success_scores[n].max():.3f}",
        f"{episode.logprobs[n].mean():.4f}",
        NOTHING if episode.values[n] != episode.values[n] else f"{episode.values[n]:.4f}",
        _action(episode.actions[n, 0]),
        _action(episode.actions[n, -1]),
        str(episode.noise_seeds[n]),
    )


def _action(action_A: Any) -> str:
    return "[" + " ".join(f"{x:+.2f}" for x in action_A) + "]"


def _sample(row: StoredEpisode) -> str:
    """Say what the policy is shown again: name, shape and type of each array."""
    arrays = row.episode.sample.items()
    return ", ".join(f"{name} {list(array.shape)} {array.dtype}" for name, array in arrays)


def _optional(episode: Episode) -> dict[str, str]:
    """Say which other cameras and states there are."""
    return {name: str(list(getattr(episode, name).shape)) for name in optional_of(episode)}


def _size(row: StoredEpisode) -> str:
    height, width = row.episode.frames.shape[1:3]
    return f"{height} x {width} pixels"


def _cells(row: StoredEpisode) -> tuple[str, ...]:
    episode = row.episode
    return (
        episode.episode_id[:12],
        str(row.number),
        str(episode.member),
        episode.task,
        "yes" if episode.success else "no",
        str(row.steps),
        row.versions,
        NOTHING if row.lag is None else str(row.lag),
        str(episode.world_version),
        row.outcome,
    )
