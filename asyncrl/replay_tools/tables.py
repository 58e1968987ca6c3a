"""Run `asyncrl replay list`, `show` and `stats`: print episodes and their counts as text or JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from asyncrl.config.bounds import AtLeast
from asyncrl.episode_layout import EPISODE_SCALARS, optional_of, scalar_types, version_of
from asyncrl.errors import ConfigError
from asyncrl.records import UNKNOWN_LENGTH
from asyncrl.replay_tools import episodes as stored
from asyncrl.replay_tools.episodes import EpisodeSelection, StoredEpisode, bar, table, versions_of

_COLUMNS: dict[str, Callable[[StoredEpisode], Any]] = {
    "episode": lambda row: row.episode.episode_id[:12],
    "group": lambda row: row.number,
    "member": lambda row: row.episode.member,
    "task": lambda row: row.episode.task,
    "success": lambda row: "yes" if row.episode.success else "no",
    "steps": lambda row: row.episode.steps,
    "versions": lambda row: versions_of(row.episode),
    "lag": lambda row: stored.NOTHING if row.lag is None else row.lag,
    "world": lambda row: row.episode.world_version,
    "group was": lambda row: row.outcome,
}


@dataclass(frozen=True, kw_only=True)
class ListEpisodes(EpisodeSelection):
    """List the stored episodes."""

    limit: Annotated[int, AtLeast(0, "it counts rows.", "Use 0 for all of them.")] = 0
    """Show at most this many; 0: all."""
    json: bool = False
    """Print JSON, one object per episode."""

    def run(self) -> int:
        """Print the table."""
        rows = list(self.rows())
        shown = rows[: self.limit] if self.limit else rows
        if self.json:
            print(json.dumps([as_dict(row) for row in shown], indent=1))
            return 0
        lines = [[str(cell(row)) for cell in _COLUMNS.values()] for row in shown]
        print(table([list(_COLUMNS), *lines]))
        print(f"{len(rows)} episodes" + (f", {len(shown)} shown" if len(shown) < len(rows) else ""))
        return 0


@dataclass(frozen=True, kw_only=True)
class Show(stored.ReplayCommand):
    """Show one episode, decision by decision."""

    episode: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Its id, or the beginning of it."""

    def run(self) -> int:
        """Print an episode's scalars and the reason of its end, then one row per decision."""
        row = stored.find_row(self.folder, self.episode)
        kept, (height, width) = len(row.episode.video), row.episode.frames.shape[1:3]
        scalars = scalar_types(version_of(row.episode))
        about = {name: str(getattr(row.episode, name)) for name in scalars} | {
            "group number": str(row.number),
            "group was": row.outcome if row.used_at is None else f"used at version {row.used_at}",
            "observations": f"{len(row.episode.frames)} of {height} x {width} pixels",
            "sample": ", ".join(
                f"{name} {list(array.shape)} {array.dtype}" for name, array in row.episode.sample.items()
            ),
            **{name: str(list(getattr(row.episode, name).shape)) for name in optional_of(row.episode)},
            "video": f"{kept} frames" if kept else "not kept",
            "ended": why_ended(row),
        }
        print(table([*about.items(), ("", "")]))
        decisions = [_decision(row, n) for n in range(len(row.episode.frames))]
        lines = [list(decisions[0]), *(list(one.values()) for one in decisions)]
        print(table(lines))
        return 0


def why_ended(row: StoredEpisode) -> str:
    """Return an episode's number of steps and the reason of its end, as text."""
    scores = row.episode.success_scores
    steps = f"{row.episode.steps} steps ({len(scores)} decisions)"
    if row.episode.steps_taken != UNKNOWN_LENGTH:
        return f"{row.episode.end_reason} after {steps} in a simulator"
    if row.episode.success:
        score = scores.reshape(-1)[row.episode.steps - 1]
        return f"success after {steps}: the reward model's score was {score:.3f} there"
    return f"truncated after {steps} without success; the best score was {scores.max():.3f}"


def as_dict(row: StoredEpisode) -> dict[str, Any]:
    """Describe one episode for JSON; `lag` and `used_at` are null when its group was not used."""
    return {name: getattr(row.episode, name) for name in EPISODE_SCALARS} | {
        "group_number": row.number,
        "success": row.episode.success,
        "steps": row.episode.steps,
        "oldest_version": row.episode.oldest_version,
        "newest_version": row.newest_version,
        "used_at": row.used_at,
        "lag": row.lag,
        "outcome": row.outcome,
    }


def _decision(row: StoredEpisode, n: int) -> dict[str, str]:
    episode = row.episode
    version = int(episode.policy_versions[n])
    return {
        "decision": str(n),
        "step": str(n * episode.rewards.shape[1]),
        "version": str(version),
        "lag": stored.NOTHING if row.used_at is None else str(row.used_at - version),
        "reward": f"{episode.rewards[n].sum():g}",
        "score": f"{episode.success_scores[n].max():.3f}",
        "logprob": f"{episode.logprobs[n].mean():.4f}",
        "value": stored.NOTHING if episode.values[n] != episode.values[n] else f"{episode.values[n]:.4f}",
        "first action": _action(episode.actions[n, 0]),
        "last action": _action(episode.actions[n, -1]),
        "noise seed": str(episode.noise_seeds[n]),
    }


def _action(action_A: Any) -> str:
    return "[" + " ".join(f"{x:+.2f}" for x in action_A) + "]"


@dataclass(frozen=True, kw_only=True)
class Stats(EpisodeSelection):
    """Summarise success by task and policy version, lag of decisions, lengths of episodes."""

    json: bool = False
    """Print JSON instead of bars."""

    def run(self) -> int:
        """Print the bars."""
        found = summarise(self.rows())
        if not found["episodes"]:
            raise ConfigError(
                f"{self.path} holds no episode that fits. Widen the flags, or wait for the run."
            )
        print(json.dumps(found, indent=1) if self.json else _as_text(found))
        return 0


def summarise(rows: Iterable[StoredEpisode]) -> dict[str, Any]:
    """Count episodes, for JSON; success is a share in [0, 1], lags and lengths count decisions."""
    won, by_task = list[bool](), defaultdict[str, list[bool]](list)
    by_version = defaultdict[int, list[bool]](list)
    lags, lengths, groups, steps = Counter[int](), Counter[int](), dict[int, str](), 0
    for row in rows:
        for outcomes in (won, by_task[row.episode.task], by_version[row.episode.oldest_version]):
            outcomes.append(row.episode.success)
        if row.used_at is not None:
            lags.update(row.used_at - int(version) for version in row.episode.policy_versions)
        lengths[-(-row.episode.steps // row.episode.rewards.shape[1])] += 1
        groups[row.number] = row.outcome
        steps += row.episode.steps
    return {
        **_success_of(won),
        "mean_steps": round(steps / max(1, len(won)), 3),
        "groups": dict(sorted(Counter(groups.values()).items())),
        "by_task": {task: _success_of(own) for task, own in sorted(by_task.items())},
        "by_version": {str(version): _success_of(own) for version, own in sorted(by_version.items())},
        "decisions_by_lag": {str(lag): n for lag, n in sorted(lags.items())},
        "episodes_by_decisions": {str(length): n for length, n in sorted(lengths.items())},
    }


def _success_of(won: Sequence[bool]) -> dict[str, float]:
    return {"episodes": len(won), "successes": sum(won), "success": round(sum(won) / max(1, len(won)), 6)}


def _as_text(found: dict[str, Any]) -> str:
    groups = ", ".join(f"{count} {outcome}" for outcome, count in found["groups"].items())
    parts = [
        f"{found['episodes']} episodes, {found['success']:.1%} successful, {found['mean_steps']:.1f} steps "
        f"on average; {sum(found['groups'].values())} groups: {groups}"
    ]
    topics = dict[str, list[tuple[str, str, str]]]()
    for title, key in (("success by task", "by_task"), ("success by policy version", "by_version")):
        topics[title] = [
            (name, f"{count['success']:.1%} of {count['episodes']}", bar(count["success"], 1.0))
            for name, count in found[key].items()
        ]
    for title, numbers in (
        ("decisions by lag when used (updates)", found["decisions_by_lag"]),
        ("episodes by length (decisions)", found["episodes_by_decisions"]),
    ):
        topics[title] = [(name, str(n), bar(n, max(numbers.values()))) for name, n in numbers.items()]
    parts += [f"{title}\n{table([('', '', ''), *rows])[1:]}" for title, rows in topics.items() if rows]
    return "\n\n".join(parts)
