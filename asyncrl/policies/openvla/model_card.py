"""The model card of an export: a README.md with the policy's facts, and those in its run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import CheckpointError, first_line
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.storage.atomic import read_json, write_text
from asyncrl.storage.untrusted import read_rows

NAME: Final = "README.md"
SUCCESS: Final = "env/success_once"
LAST_UPDATES: Final = 10
"""Updates, at most, whose success in training is averaged: one update alone varies too much."""
_SETTINGS: Final = (
    *("policy", "world", "reward", "start_states", "algorithm.kind", "algorithm.objective"),
    *("algorithm.groups_per_update", "algorithm.group_size", "algorithm.temperature", "algorithm.top_k"),
    *("correction.kind", "replay.max_lag", "updates", "optimizer.learning_rate", "optimizer.schedule"),
    *("lora.rank", "learner.precision", "actor.success_threshold", "seed"),
)
"""Settings of the run in the card; of a path only the last part is shown."""
_TEMPLATE: Final = """\
---
{header}
---

# {title}

{intro}

| | |
|---|---|
| decision | {policy.chunk} steps of {policy.action_dim} numbers, {policy.decoding}{stop} |
| inputs | {policy.images} picture(s) of {policy.image_size} pixels ({policy.image_pipeline}), {state} |
| actions | {actions} |
| gripper | {policy.gripper} |
| dtype | {policy.dtype} |
| critic | {critic} |
{training}
## True success, in a simulator

{success}

Not measured: {unmeasured}other tasks than those it was trained on, and any robot.

## Loading

{loading}
"""


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """Facts of a run's folder about one version of its policy; notes name unreadable files."""

    version: int
    from_best: bool
    """True if it is the run's checkpoint of the best version."""
    settings: Mapping[str, Any]
    simulator: str | None
    """Simulator of the training; empty: a world model; None: unknown."""
    evaluations: Mapping[int, Mapping[str, Any]]
    """Rows of evaluations.jsonl by version, in their order."""
    successes: tuple[float, ...]
    """Success in training of the last updates."""
    start: Mapping[str, Any]
    """Last start in provenance.json."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """All facts of a card."""

    title: str
    source: str
    """Last part of the converted name."""
    policy: OpenVLAOFTConfig
    trained: TrainedPolicy | None = None
    """None if the source is no checkpoint of a run."""
    adapter: bool = False
    """True if the folder holds adapters alone."""
    merged: str = ""
    """Name of the merged adapter folder; empty: none."""
    missing: str = ""
    """Files that other stacks lack; see `export.listed`."""
    unpublished: str = ""
    """Reason why other stacks cannot build the policy."""
    model_class: str = ""
    """Class of transformers in its auto_map."""
    hub: Mapping[str, str] = field(default_factory=dict)
    """Hub identifiers given by the user: base_model, license."""


def trained_policy(
    folder: Path, run_dir: Path | None, simulator_of: Callable[[str], str | None]
) -> TrainedPolicy | None:
    """Read the facts of a checkpoint's run; None for any other folder.

    Raises:
        CheckpointError: The checkpoint's version cannot be read.
    """
    if run_dir is None or not (folder / "state.json").is_file():
        return None
    progress = read_json(folder / "state.json").get("progress")
    version = progress.get("version") if isinstance(progress, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{folder / 'state.json'} does not say which version it is. Copy it again.")
    notes: list[str] = []

    def read(name: str, parse: Callable[[Path], Any], nothing: Any) -> Any:
        try:
            return parse(run_dir / name) if (run_dir / name).exists() else nothing
        except (OSError, ValueError, CheckpointError) as error:
            notes.append(f"{name} of the run cannot be read: {first_line(error)}.")
            return nothing

    settings: dict[str, Any] = read("config.json", read_json, {})
    starts = read("provenance.json", read_json, {}).get("starts") or [{}]
    rows = read("evaluations.jsonl", lambda path: [row for _, row in read_rows(path)], [])
    metrics = read("metrics.jsonl", lambda path: [row or {} for _, row in read_rows(path)], [])
    evaluations = {row["version"]: row for row in rows if row and isinstance(row.get("version"), int)}
    rates = {row["step"]: row[SUCCESS] for row in metrics if SUCCESS in row and row.get("step", 0) <= version}
    return TrainedPolicy(
        version=version,
        from_best=folder.name == "best",
        settings=settings,
        simulator=simulator_of(str(settings.get("world", ""))) if settings else None,
        evaluations=dict(sorted(evaluations.items())),
        successes=tuple(rates[step] for step in sorted(rates)[-LAST_UPDATES:]),
        start=starts[-1],
        notes=tuple(notes),
    )


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card into a folder."""
    write_text(folder / NAME, card(facts))


def card(facts: CardFacts) -> str:
    """Return the whole card: a header in YAML for a hub, then Markdown."""
    policy, trained = facts.policy, facts.trained
    intro = "Low-rank adapters of a" if facts.adapter else "A"
    intro += f" vision-language-action policy, written by asyncrl {__version__} from `{facts.source}`"
    intro += f", with the adapter `{facts.merged}` merged." if facts.merged else "."
    if trained is None:
        intro += " The source is no checkpoint of a run, so nothing is known here of its training."
    if not facts.hub.get("license"):
        intro += " No licence is stated here; it depends on the original weights."
    values = {"none": "none", "chunk": "a value per decision", "action": "a value per step"}
    measured = trained is not None and trained.version in trained.evaluations
    return _TEMPLATE.format(
        header=_header(facts),
        title=facts.title,
        intro=intro,
        policy=policy,
        stop=", a stop token behind the slots" if policy.stop_token else "",
        state=f"{policy.proprio_dim or 'no'} numbers of proprioception",
        actions=f"scaled with the statistics `{policy.norm_key}`" if policy.norm_key else "in [-1, 1]",
        critic=values[policy.value_head],
        training="\n".join(_training(trained)) if trained else "",
        success="\n\n".join(_success(trained)) if trained else "Not measured.",
        unmeasured="" if measured else "true success of this version, ",
        loading="\n\n".join(_loading(facts)),
    )


def _header(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    tags = ["vision-language-action", "openvla" if facts.policy.causal else "openvla-oft", "asyncrl"]
    if facts.trained is not None:
        tags += ["reinforcement-learning", *["world-model"] * (facts.trained.simulator == "")]
    library = "peft" if facts.adapter else "transformers"
    given: dict[str, Any] = {name: value for name, value in facts.hub.items() if value}
    data = ModelCardData(
        library_name=library, pipeline_tag="robotics", tags=tags, ignore_metadata_errors=False, **given
    )
    return data.to_yaml().strip()


def _training(trained: TrainedPolicy) -> Iterator[str]:
    yield f"\n## Training\n\nVersion {trained.version}: the policy after {trained.version} updates.\n"
    yield "| setting | |\n|---|---|"
    for key in _SETTINGS if trained.settings else ():
        section, _, name = key.rpartition(".")
        value = (trained.settings.get(section) or {} if section else trained.settings).get(name, "")
        if value != "":
            text = Path(value).name.replace("|", "\\|") if isinstance(value, str) else f"{value:g}"
            yield f"| `--{key.replace('_', '-')}` | {text} |"
    if trained.start:
        start, commit = trained.start, str(trained.start.get("commit", ""))[:12]
        versions = ", ".join(f"{name} {v}" for name, v in start.get("versions", {}).items())
        changed = " with changes" if start.get("dirty") else ""
        yield f"\nRun on {', '.join(start.get('devices', []))} with {versions}; commit {commit}{changed}."
    yield from (f"\n{note}" for note in trained.notes)


def _success(trained: TrainedPolicy) -> Iterator[str]:
    rows, measured = trained.evaluations, trained.evaluations.get(trained.version)
    if measured is not None:
        yield f"This version: {_rate(measured)}."
        best = max(rows.values(), key=lambda row: (row["success"], row["version"]))
        if len(rows) > 1 and (trained.from_best or measured["success"] == best["success"]):
            yield (
                f"**Selected**: the best of {len(rows)} measured versions, by these very episodes, so the "
                "number tends to be too high. `asyncrl evaluate --seed N` measures at other starts."
            )
    else:
        yield "This version was not measured." if rows else "Not measured."
    if others := [f"- version {v}: {_rate(row)}" for v, row in rows.items() if v != trained.version]:
        yield "Measured of the same run:"
        yield "\n".join(others)
    if trained.successes:
        mean, count = sum(trained.successes) / len(trained.successes), len(trained.successes)
        title, where = "training", f"in `{trained.simulator}`" if trained.simulator else ""
        if trained.simulator == "":
            title, where = (
                "imagination",
                "as the reward model judged imagined frames. This is not true success",
            )
        filtered = (trained.settings.get("algorithm") or {}).get("filter_groups")
        only = " Only of groups that the filter kept." if filtered else ""
        yield f"## Success in {title}"
        yield f"{mean:.1%} of the episodes of the last {count} updates, on average, {where}.{only}"


def _rate(row: Mapping[str, Any]) -> str:
    steps = f", {row['steps']:.1f} steps to success on average" if row["successes"] else ""
    return (
        f"**{row['success']:.1%}**, 95 % interval {row['low']:.1%} to {row['high']:.1%} (Wilson): "
        f"{row['successes']} of {row['episodes']} episodes in `{row['simulator']}`, actions sampled at "
        f"temperature {row['temperature']:g}{steps}"
    )


def _loading(facts: CardFacts) -> Iterator[str]:
    if facts.adapter:
        yield "`peft` puts the adapters on the published model that training began with:"
        yield '```python\nmodel = PeftModel.from_pretrained(model, "FOLDER")\n```'
        return
    yield "```bash\nasyncrl evaluate FOLDER\nasyncrl train --policy FOLDER\n```"
    if facts.unpublished:
        yield f"Other stacks cannot build {facts.unpublished}."
    elif facts.missing:
        yield (
            f"Other stacks do not open this folder, because it lacks {facts.missing}. They are in the "
            "published folder that training began with: copy them, or convert again with `--original FOLDER`."
        )
    else:
        name = facts.model_class
        key = f" (`unnorm_key` is `{facts.policy.norm_key}`)" if facts.policy.norm_key else ""
        yield f"With other stacks, which run the code that came with the original{key}:"
        yield (
            f"```python\nfrom transformers import {name}\n\n"
            f'model = {name}.from_pretrained("FOLDER", trust_remote_code=True)\n```'
        )
