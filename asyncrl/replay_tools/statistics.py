"""Run `asyncrl replay stats`: sum up success, lag and lengths as text, JSON or a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from asyncrl.errors import ConfigError
from asyncrl.replay_tools.episodes import StoredEpisode, bar, read_outcomes, table, warn
from asyncrl.replay_tools.selection import EpisodeSelection
from asyncrl.storage.media import BLUE, FAINT, INK, PAPER, fitted, font, require_png

WIDTH, MARGIN, ROW = 760, 16, 22
"""Pixels: of the picture, around it, and per bar."""
NAMES, NUMBERS = 280, 110
"""Pixels for the names at the left and the numbers at the right."""
TITLE = 30


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Hold one row of a panel."""

    name: str
    value: float
    text: str
    """What stands at the right of the bar."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Hold the bars of one topic and one unit."""

    title: str
    bars: Sequence[Bar]
    full: float = 0.0
    """Value of a bar over the whole width; 0: the largest one's."""

    @property
    def most(self) -> float:
        """Return the value of a bar over the whole width; positive."""
        return self.full or max((bar.value for bar in self.bars), default=0.0) or 1.0


def draw_panels(heading: str, panels: Sequence[Panel]) -> Image.Image:
    """Draw panels below each other."""
    heights = [TITLE + ROW * len(panel.bars) + MARGIN for panel in panels]
    picture = Image.new("RGB", (WIDTH, TITLE + 2 * MARGIN + sum(heights)), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN), fitted(heading, WIDTH - 2 * MARGIN, 19), fill=INK, font=font(19))
    top = TITLE + 2 * MARGIN
    for panel, height in zip(panels, heights, strict=True):
        _draw_panel(draw, panel, top)
        top += height
    return picture


def _draw_panel(draw: ImageDraw.ImageDraw, panel: Panel, top: int) -> None:
    draw.text((MARGIN, top), panel.title, fill=INK, font=font(16))
    left, right = MARGIN + NAMES, WIDTH - MARGIN - NUMBERS
    for index, drawn in enumerate(panel.bars):
        y = top + TITLE - 4 + index * ROW
        draw.text((MARGIN, y), fitted(drawn.name, NAMES - 10, 14), fill=INK, font=font(14))
        draw.rectangle((left, y + 2, right, y + ROW - 6), fill=FAINT)
        if drawn.value > 0:
            end = left + max(1, round((right - left) * min(1.0, drawn.value / panel.most)))
            draw.rectangle((left, y + 2, end, y + ROW - 6), fill=BLUE)
        draw.text((right + 10, y), drawn.text, fill=INK, font=font(14))


@dataclass(frozen=True, kw_only=True)
class Stats(EpisodeSelection):
    """Sum up: success by task and policy version, lag of the decisions, lengths of the episodes."""

    out: Path | None = None
    """Also draw the bars into this file, ending in .png."""
    json: bool = False
    """Print JSON instead of bars."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            require_png(self.out)

    def run(self) -> int:
        """Print the bars, and draw them if asked to."""
        summary = sum_up(self.rows())
        summary.drops = read_outcomes(self.folder, warn).drops
        if not summary.episodes.total:
            raise ConfigError(
                f"{self.path} holds no episode that fits. Widen the flags, or wait for the run."
            )
        print(json.dumps(summary.as_dict(), indent=1) if self.json else text_of(summary))
        if self.out is not None:
            draw_panels(heading(summary), panels(summary)).save(self.out)
            if not self.json:
                print(f"\ndrawn in {self.out}")
        return 0


@dataclass(kw_only=True)
class SuccessCount:
    """Count episodes and how many of them succeeded."""

    total: int = 0
    won: int = 0

    @property
    def share(self) -> float:
        """Return successes over episodes, in [0, 1]."""
        return self.won / self.total if self.total else 0.0

    def add(self, won: bool) -> None:
        """Count one episode."""
        self.total += 1
        self.won += won


@dataclass(kw_only=True)
class Summary:
    """Count what `stats` says."""

    episodes: SuccessCount = field(default_factory=SuccessCount)
    by_task: dict[str, SuccessCount] = field(default_factory=dict)
    by_version: dict[int, SuccessCount] = field(default_factory=dict)
    """By the version of the oldest decision of an episode."""
    lags: Counter[int] = field(default_factory=Counter)
    """Lag in updates -> decisions of the used groups."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Decisions begun until the end -> episodes."""
    steps: int = 0
    """Until the end, of all episodes."""
    groups: dict[int, str] = field(default_factory=dict)
    """Group -> what became of it."""
    drops: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """See `GroupOutcomes.drops`; of the whole run, whatever was selected."""

    def add(self, row: StoredEpisode) -> None:
        """Count one episode."""
        won = row.episode.success
        self.episodes.add(won)
        self.by_task.setdefault(row.episode.task, SuccessCount()).add(won)
        self.by_version.setdefault(row.episode.oldest_version, SuccessCount()).add(won)
        if row.used_at is not None:
            self.lags.update(row.used_at - int(v) for v in row.episode.policy_versions)
        self.lengths[-(-row.steps // row.episode.rewards.shape[1])] += 1
        self.steps += row.steps
        self.groups[row.number] = row.outcome

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON; success is a share in [0, 1], lags and lengths count decisions."""

        def counts(of: SuccessCount) -> dict[str, float]:
            return {"episodes": of.total, "successes": of.won, "success": round(of.share, 6)}

        return {
            **counts(self.episodes),
            "mean_steps": round(self.steps / max(1, self.episodes.total), 3),
            "groups": dict(sorted(Counter(self.groups.values()).items())),
            "by_task": {task: counts(self.by_task[task]) for task in sorted(self.by_task)},
            "by_version": {str(v): counts(self.by_version[v]) for v in sorted(self.by_version)},
            "decisions_by_lag": {str(lag): self.lags[lag] for lag in sorted(self.lags)},
            "episodes_by_decisions": {str(n): self.lengths[n] for n in sorted(self.lengths)},
            "groups_given_up": [
                {"why": why, "task": task, "episodes_arrived": arrived, "times": times}
                for (why, task, arrived), times in sorted(self.drops.items())
            ],
        }


def sum_up(rows: Iterable[StoredEpisode]) -> Summary:
    """Count episodes."""
    summary = Summary()
    for row in rows:
        summary.add(row)
    return summary


def heading(summary: Summary) -> str:
    """Say in one line what all episodes are like."""
    found = Counter(summary.groups.values())
    outcomes = ", ".join(f"{found[outcome]} {outcome}" for outcome in sorted(found))
    total = max(1, summary.episodes.total)
    return (
        f"{summary.episodes.total} episodes, {summary.episodes.share:.1%} successful, "
        f"{summary.steps / total:.1f} steps on average; {len(summary.groups)} groups: {outcomes}"
    )


def panels(summary: Summary) -> list[Panel]:
    """Return the bars by topic; a topic without numbers is left out."""
    all_panels = [
        Panel(title="success by task", bars=_shares(summary.by_task), full=1.0),
        Panel(title="success by policy version", bars=_shares(summary.by_version), full=1.0),
        Panel(title="decisions by lag when used (updates)", bars=_counts(summary.lags)),
        Panel(title="episodes by length (decisions)", bars=_counts(summary.lengths)),
        Panel(title="groups given up: why, episodes that had arrived, task", bars=_drops(summary.drops)),
    ]
    return [panel for panel in all_panels if panel.bars]


def text_of(summary: Summary) -> str:
    """Return the bars as text for a terminal."""
    parts = [heading(summary)]
    for panel in panels(summary):
        rows = [(each.name, each.text, bar(each.value, panel.most)) for each in panel.bars]
        parts.append(f"{panel.title}\n{table([('', '', ''), *rows])[1:]}")
    return "\n\n".join(parts)


def _shares(counts: dict[Any, SuccessCount]) -> list[Bar]:
    keys: list[Hashable] = sorted(counts)
    return [
        Bar(name=str(key), value=counts[key].share, text=f"{counts[key].share:.1%} of {counts[key].total}")
        for key in keys
    ]


def _drops(drops: Counter[tuple[str, str, int]]) -> list[Bar]:
    return [
        Bar(
            name=f"{why.removeprefix('dropped_')}, {arrived}, {task or 'not known'}",
            value=times,
            text=str(times),
        )
        for (why, task, arrived), times in sorted(drops.items())
    ]


def _counts(counter: Counter[int]) -> list[Bar]:
    return [Bar(name=str(key), value=counter[key], text=str(counter[key])) for key in sorted(counter)]
