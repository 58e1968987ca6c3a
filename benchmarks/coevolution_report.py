"""What `coevolution.py` measured: a row for every policy that was judged, tables of them, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.evaluation.evaluate import SuccessRate
from asyncrl.pace import rounds

SHIPPED: Final = "shipped"
"""Name of the policy that all begin with."""
THRESHOLD: Final = 0.7
"""--actor.success-threshold of the default run."""
GUARDS: Final[dict[str, Callable[[dict[str, float]], tuple[float, float]]]] = {
    "none": lambda signals: (1.0, 1.0),
    "lasting": lambda signals: (float(1.0 - signals["last frame"] >= THRESHOLD), 1.0),
    "probability": lambda signals: (1.0 - signals["best frame"], 1.0),
    "second": lambda signals: (1.0, 1.0 - signals["second draw: verdict"]),
}
"""By name: reward and weight that a guard gives a success with these signals. Approximate: a success that is
none under *lasting* would have gone on, and *probability* pays the first score, not the best."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy that was judged. Counts of what was not measured are 0."""

    arm: str
    seed: int
    update: int
    true: int
    """Successes of the evaluation, and..."""
    episodes: int
    """...its episodes."""
    audit_imagined: int = 0
    """Of the audited episodes those that succeeded in imagination..."""
    audit_true: int = 0
    """...and those in which the same actions succeed in truth."""
    audit_wrong: int = 0
    """Those in which both differ."""
    audit_episodes: int = 0
    chosen: int = 0
    """Successes of the evaluation by which early stopping chooses, of other starts, and..."""
    chosen_episodes: int = 0
    """...its episodes."""
    spent: int = 0
    """True episodes of the whole run."""
    rounds: int = 0
    accepted: int = 0
    """Rounds of refits, and those whose world was accepted."""
    guards: dict[str, float] = field(default_factory=dict)
    """Guard -> correlation of reward and truth that it would have had."""

    @property
    def rate(self) -> float:
        """True success in percent."""
        return 100 * self.true / self.episodes

    @property
    def gap(self) -> float:
        """Imagined minus true success of the same actions, in points; not a number without an audit."""
        return self._of_audit(self.audit_imagined - self.audit_true)

    @property
    def praise(self) -> float:
        """Imagined success minus true success of the evaluation, in points; not a number without an audit."""
        return self._of_audit(self.audit_imagined) - self.rate

    @property
    def wrong(self) -> float:
        """Wrong verdicts in percent; not a number without an audit."""
        return self._of_audit(self.audit_wrong)

    def _of_audit(self, count: int) -> float:
        return 100 * count / self.audit_episodes if self.audit_episodes else float("nan")


def read(source: Path, arms: Mapping[str, str]) -> list[Row]:
    """Return the rows of a folder of results, or of a file of rows.

    Args:
        source: Of `coevolution.py run`, or what `write` wrote.
        arms: Name of an arm in files -> its name.
    """
    if source.is_file():
        known = {one.name for one in fields(Row)}
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        return [Row(**{key: value for key, value in line.items() if key in known}) for line in lines]
    found = []
    for answer in sorted(source.glob("*.update*.evaluate.json")):
        name, _, version = answer.name.removesuffix(".evaluate.json").rpartition(".update")
        arm, _, seed = name.rpartition(".seed")
        if arm in arms:
            found.append(_row(source, name, arms[arm], int(seed), int(version)))
    shipped = audits(source, SHIPPED)
    for one in shipped.values():
        found.append(Row(arm=SHIPPED, seed=0, update=0, true=0, episodes=0, **_audited(one)))
    return found


def write(rows: Sequence[Row]) -> Iterator[str]:
    """Return rows as lines of JSON, without what was not measured."""
    for row in rows:
        named = asdict(row).items()
        yield json.dumps({key: value for key, value in named if value or key in ("seed", "update")})


def _row(out: Path, name: str, arm: str, seed: int, version: int) -> Row:
    file = out / f"{name}.update{version:02d}"
    judged = json.loads(file.with_name(f"{file.name}.evaluate.json").read_text())["overall"]
    choice = file.with_name(f"{file.name}.choose.json")
    chosen = json.loads(choice.read_text())["overall"] if choice.exists() else {"successes": 0, "episodes": 0}
    made, folder = rounds.read(out / "runs" / name), out / "runs" / name
    return Row(
        arm=arm,
        seed=seed,
        update=version,
        true=judged["successes"],
        episodes=judged["episodes"],
        chosen=chosen["successes"],
        chosen_episodes=chosen["episodes"],
        spent=sum(one.episodes for one in made) or imagined_nothing(folder),
        rounds=len(made),
        accepted=sum(one.accepted for one in made),
        **_audited(audits(out, name).get(version)),
    )


def _audited(audit: dict[str, Any] | None) -> dict[str, Any]:
    if audit is None:
        return {}
    names = {"imagined": "imagined_success", "true": "true_success", "wrong": "wrong"}
    counts = {f"audit_{name}": audit[key]["successes"] for name, key in names.items()}
    guards = {}
    if any(one["signals"] for one in audit["episodes"]):
        guards = {guard: round(correlation(audit["episodes"], guard), 3) for guard in GUARDS}
    return {**counts, "audit_episodes": audit["wrong"]["episodes"], "guards": guards}


def audits(out: Path, name: str) -> dict[int, dict[str, Any]]:
    """Read the audits of a run, by version; that of a policy of no run is 0."""
    file = out / f"{name}.audit.json"
    found = json.loads(file.read_text())["audits"] if file.exists() else []
    return {_version(one["name"]): one for one in found}


def _version(name: str) -> int:
    last = name.rpartition(" ")[2]
    return int(last) if last.isdecimal() else 0


def correlation(episodes: Sequence[dict[str, Any]], guard: str) -> float:
    """Of reward and truth under a guard, over audited episodes, each with the guard's weight."""
    kept = [GUARDS[guard](one["signals"]) if one["imagined"] else (0.0, 1.0) for one in episodes]
    rewards, weights = np.array(kept).T
    true = np.array([one["true"] for one in episodes], float)
    deviations = np.cov(np.stack([rewards, true]), aweights=weights)
    return float(deviations[0, 1] / np.sqrt(deviations[0, 0] * deviations[1, 1]))


def imagined_nothing(folder: Path) -> int:
    """Count the true episodes of a run that trained on nothing else; 0: it imagined."""
    if not (folder / "config.json").exists():
        return 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    if config["world"] != "tabletop_true":
        return 0
    algorithm = config["algorithm"]
    return sum("train/loss" in row for row in rows) * algorithm["groups_per_update"] * algorithm["group_size"]


def interval(successes: int, episodes: int) -> str:
    """Write a rate with its interval, in percent."""
    rate = SuccessRate.of(successes, episodes)
    return f"{100 * rate.rate:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def by_arm(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, list[Row]]:
    """Part rows by arm, in the order of `arms`; there is no empty part."""
    parts = {arm: [row for row in rows if row.arm == arm] for arm in arms}
    return {arm: part for arm, part in parts.items() if part}


def last_of(part: Sequence[Row]) -> list[Row]:
    """Return the newest row of each seed."""
    return [
        max((row for row in part if row.seed == seed), key=lambda row: row.update) for seed in seeds(part)
    ]


def seeds(part: Sequence[Row]) -> list[int]:
    """Return the seeds, ascending."""
    return sorted({row.seed for row in part})


def table(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """Write a line per arm: every seed's true success, and of audits means over seeds that have one."""
    parts = by_arm(rows, arms)
    titles = ["arm", "seeds", "true success by updates, %", "seeds at the end, together"]
    titles += [
        "audited seeds",
        "imagined minus true of the same actions",
        "of the evaluation",
        "wrong verdicts, %",
    ]
    lines = _head([*titles, "true episodes", "accepted"])
    for arm, part in parts.items():
        updates, last = sorted({row.update for row in part}), last_of(part)
        at = {update: [row for row in part if row.update == update] for update in updates}
        rates = "; ".join(f"{u}: {', '.join(f'{row.rate:.0f}' for row in at[u])}" for u in updates)
        means = [_means(at.values(), name) for name in ("gap", "praise", "wrong")]
        spent, accepted = sum(row.spent for row in last) / len(last), sum(row.accepted for row in last)
        ends = at[updates[-1]]
        pooled = interval(sum(row.true for row in ends), sum(row.episodes for row in ends))
        audited = seeds([row for row in part if row.audit_episodes])
        cells = [arm, len(last), rates, f"{pooled} of {len(ends)}", len(audited), *means, f"{spent:.0f}"]
        lines.append(_line([*cells, f"{accepted} of {sum(row.rounds for row in last)}"]))
        if early := chosen_of(part):
            pooled = interval(sum(row.true for row in early), sum(row.episodes for row in early))
            pooled += f" of {len(early)}"
            asked = sum(row.chosen_episodes for row in part) / len(early)
            which = ", ".join(str(row.update) for row in early)
            cells = [f"{arm}, stopped early", len(early), f"updates {which}", pooled]
            lines.append(_line([*cells, *[""] * 4, f"{asked:.0f}", ""]))
    return "\n".join(lines)


def chosen_of(part: Sequence[Row]) -> list[Row]:
    """Of each seed the row that its evaluation of other starts calls the best; the later of two alike."""
    found = []
    for seed in seeds(part):
        some = [row for row in part if row.seed == seed and row.chosen_episodes]
        if some:
            found.append(max(some, key=lambda row: (row.chosen / row.chosen_episodes, row.update)))
    return found


def guard_table(rows: Sequence[Row]) -> str:
    """Write what guards would have made of the successes: a line per version, means over the seeds."""
    asked = [row for row in rows if row.guards]
    lines = _head(["updates", "seeds", *GUARDS])
    for update in sorted({row.update for row in asked}):
        some = [row for row in asked if row.update == update]
        means = [f"{np.mean([row.guards[guard] for row in some]):.2f}" for guard in GUARDS]
        lines.append(_line([update, len(some), *means]))
    return "\n".join(lines)


def _means(groups: Iterable[Sequence[Row]], name: str) -> str:
    """Write the mean of each group over its rows that have a number."""
    measured = [[value for row in group if not math.isnan(value := getattr(row, name))] for group in groups]
    return " ".join(f"{np.mean(values):.0f}" for values in measured if values) or "-"


def _head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), "|---" * len(titles) + "|"]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def draw(rows: Sequence[Row], arms: Sequence[str], picture: Path) -> None:
    """Draw true success, imagined minus true, wrong verdicts by update, and true success by true episodes."""
    import_module("matplotlib").use("Agg")  # Of the extra `benchmarks`, and of this function alone.
    _, axes = import_module("matplotlib.pyplot").subplots(2, 2, figsize=(13, 9))
    titles = {"rate": "true success, %", "gap": "imagined minus true success of the same actions, points",
              "wrong": "wrong verdicts, %"}  # fmt: skip
    for number, (arm, part) in enumerate(by_arm(rows, arms).items()):
        turn = number // 10  # There are ten colours.
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[turn], "marker": "os^"[turn]}
        for axis, name in zip(axes.flat, titles, strict=False):
            points = _curve(part, name)
            axis.plot(list(points), list(points.values()), label=f"{arm} ({len(seeds(part))})", **style)
        ends = last_of(part)
        axes[1, 1].plot([row.spent for row in ends], [row.rate for row in ends], **{**style, "linestyle": ""})
    for axis, title in zip(axes.flat, titles.values(), strict=False):
        axis.set(xlabel="updates", title=title)
    axes[1, 1].set(xlabel="true episodes spent on training", title="true success at the end, %, each seed")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right", fontsize=8,
                             title="arm (seeds)")  # fmt: skip
    axes[0, 0].figure.tight_layout(rect=(0, 0, 0.8, 1))
    axes[0, 0].figure.savefig(picture, dpi=110)


def _curve(part: Sequence[Row], name: str) -> dict[int, float]:
    """Mean over the rows that have a number, by update, of those updates that every seed has."""
    updates = [{row.update for row in part if row.seed == seed} for seed in seeds(part)]
    found = {u: [getattr(row, name) for row in part if row.update == u] for u in set.intersection(*updates)}
    return {u: float(np.nanmean(values)) for u, values in sorted(found.items()) if not np.isnan(values).all()}
