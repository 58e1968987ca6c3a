"""The model card of an export: a README.md with the policy's facts, and those in its run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import CheckpointError
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.storage.atomic import read_json
from asyncrl.storage.untrusted import read_json_lines

SUCCESS: Final = "env/success_once"
LAST_UPDATES: Final = 10
"""Updates, at most, whose success in training is averaged: one update alone varies too much."""
# Settings of the run in the card; of a path only the last part is shown.
_SETTINGS: Final = (
    *("policy", "world", "reward", "start_states", "algorithm.kind", "algorithm.objective"),
    *("algorithm.groups_per_update", "algorithm.group_size", "algorithm.temperature", "algorithm.top_k"),
    *("correction.kind", "replay.max_lag", "updates", "optimizer.learning_rate", "optimizer.schedule"),
    *("lora.rank", "learner.precision", "actor.success_threshold", "seed"),
)
_TEMPLATE: Final = """\
---
{header}
---

# {title}

Vision-language-action policy, written by asyncrl {version} from {source}. {licence}

| | |
|---|---|
| decision | {policy.chunk} steps of {policy.action_dim} numbers, {policy.decoding} |
| inputs | {policy.images} picture(s) of {policy.image_size} pixels ({policy.image_pipeline}), \
{policy.proprio_dim} numbers of proprioception |
| actions | statistics `{policy.norm_key}`, gripper {policy.gripper} |
| critic | {policy.value_head} |
| dtype | {policy.dtype} |

{run}

Not measured: other tasks than those it was trained on, and any robot.

## Loading

{loading}
"""
NO_RUN: Final = "The source is no checkpoint of a run, so nothing is known here of its training."


def card(
    policy: OpenVLAOFTConfig,
    run: str = NO_RUN,
    *,
    title: str,
    source: str,
    loading: str,
    imagined: bool = True,
    library: str = "transformers",
    hub: Mapping[str, str],
) -> str:
    """Return the README.md of an export: a header in YAML for a hub, then Markdown.

    Args:
        run: Result of `about_run`, if the source is a checkpoint of a run.
        source: Last part of the converted name, and an adapter that was merged.
        imagined: False if the run trained in a simulator.
        hub: Hub identifiers given by the user: base_model, license.
    """
    from huggingface_hub import ModelCardData

    tags = ["vision-language-action", "openvla" if policy.causal else "openvla-oft", "asyncrl"]
    if run != NO_RUN:
        tags += ["reinforcement-learning", *["world-model"] * imagined]
    given: dict[str, Any] = {name: value for name, value in hub.items() if value}
    header = ModelCardData(
        library_name=library, pipeline_tag="robotics", tags=tags, ignore_metadata_errors=False, **given
    )
    licence = "" if given.get("license") else "No licence is stated here; the original weights have one."
    return _TEMPLATE.format(
        header=header.to_yaml().strip(),
        title=title,
        version=__version__,
        source=source,
        licence=licence,
        policy=policy,
        run=run,
        loading=loading,
    )


def about_run(checkpoint: Path, *, imagined: bool) -> str:
    """Describe training and success of a checkpoint in its run's folder; a damaged file raises."""
    return "\n".join(_about_run(checkpoint, imagined=imagined))


def _about_run(checkpoint: Path, *, imagined: bool) -> Iterator[str]:
    run_dir, progress = checkpoint.parents[1], read_json(checkpoint / "state.json").get("progress")
    version = progress.get("version") if isinstance(progress, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{checkpoint / 'state.json'} does not say which version it is. Copy it again.")
    settings = read_json(run_dir / "config.json")
    yield f"## Training\n\nVersion {version}: the policy after {version} updates.\n"
    yield "| setting | |\n|---|---|"
    for key in _SETTINGS:
        section, _, name = key.rpartition(".")
        value = (settings.get(section) or {} if section else settings).get(name, "")
        if value != "":
            text = Path(value).name.replace("|", "\\|") if isinstance(value, str) else f"{value:g}"
            yield f"| `--{key.replace('_', '-')}` | {text} |"
    if (run_dir / "provenance.json").exists():
        start = (read_json(run_dir / "provenance.json").get("starts") or [{}])[-1]
        versions = ", ".join(f"{name} {v}" for name, v in start.get("versions", {}).items())
        commit = str(start.get("commit", ""))[:12] + " with changes" * bool(start.get("dirty"))
        yield f"\nRun with {versions}; commit {commit}."
    yield f"\n## Success in {'imagination' if imagined else 'training'}\n"
    metrics = {
        row["step"]: row[SUCCESS] for row in read_json_lines(run_dir / "metrics.jsonl") if SUCCESS in row
    }
    rates = [metrics[step] for step in sorted(metrics) if step <= version][-LAST_UPDATES:]
    if rates:
        yield f"{sum(rates) / len(rates):.1%} of the episodes of the last {len(rates)} updates, on average."
    if imagined:
        yield "As the reward model judged imagined frames: this is not true success."
    yield "\n## True success, in a simulator\n"
    yield from _measured(
        version, {row["version"]: row for row in read_json_lines(run_dir / "evaluations.jsonl")}
    )


def _measured(version: int, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield "| version | success | 95 % interval (Wilson) | episodes | simulator | temperature |"
        yield "|---|---|---|---|---|---|"
    for measured, row in sorted(rows.items()):
        name = f"**{measured}, this one**" if measured == version else str(measured)
        yield (
            f"| {name} | {row['success']:.1%} | {row['low']:.1%} to {row['high']:.1%} | {row['episodes']} "
            f"| `{row['simulator']}` | {row['temperature']:g} |"
        )
    if version not in rows:
        yield "\nThis version was not measured."
    elif len(rows) > 1 and rows[version]["success"] == max(row["success"] for row in rows.values()):
        yield (
            f"\n**Selected**: the best of {len(rows)} measured versions, by these very episodes, so the "
            "number tends to be too high. `asyncrl evaluate --seed N` measures at other starts."
        )
