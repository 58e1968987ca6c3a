"""Write the model card of an exported policy: a README.md that says what is known, and what is not.

Every number in it was read from the run's folder. What nobody measured is listed as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from asyncrl import __version__, registry
from asyncrl.config.run import TrainConfig
from asyncrl.evaluation.evaluations_file import EvaluatedVersion
from asyncrl.launch.model_facts import TrainedPolicy
from asyncrl.launch.named_models import folder_part
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.storage.atomic import write_text
from asyncrl.storage.provenance import Start

NAME: Final = "README.md"
Layout = Literal["openvla", "asyncrl", "adapter"]
_LIBRARY: Final = {"openvla": "transformers", "asyncrl": "asyncrl", "adapter": "peft"}
_LAYOUT: Final = {
    "openvla": "the published layout of OpenVLA",
    "asyncrl": "asyncrl's own layout",
    "adapter": "peft's layout: low-rank adapters without the policy they belong to",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """All that a card says."""

    title: str
    layout: Layout
    source: str
    """Last part of what was converted."""
    policy: OpenVLAOFTConfig
    trained: TrainedPolicy | None = None
    """None: what was converted is no checkpoint of a run, and nothing is known of its training."""
    merged: str = ""
    """Name of the adapter folder that was merged; empty: none."""
    missing: str = ""
    """What other stacks need and is not there; see `other_stacks.by_reader`."""
    unpublished: str = ""
    """Why other stacks cannot build the policy."""
    model_class: str = ""
    """Class of transformers that opens it, as its config.json says."""
    repo: str = ""
    """Where it is sent, OWNER/NAME."""
    base_model: str = ""
    license: str = ""
    """Identifiers of a hub, as the user gave them."""


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card into a folder."""
    write_text(folder / NAME, card(facts))


def card(facts: CardFacts) -> str:
    """Return the whole card: a header in YAML for a hub, then Markdown."""
    parts = [f"---\n{_header(facts)}\n---", f"# {facts.title}", *_about(facts)]
    if facts.trained is not None:
        parts += [*_training(facts.trained), *_success(facts.trained)]
    parts += [*_unmeasured(facts), *_loading(facts)]
    return "\n\n".join(parts) + "\n"


def _header(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    kind = "openvla" if facts.policy.decoding == "autoregressive" else "openvla-oft"
    tags = ["vision-language-action", kind, "asyncrl"]
    tags += ["reinforcement-learning"] if facts.trained is not None else []
    tags += ["world-model"] if facts.trained is not None and facts.trained.imagined else []
    data = ModelCardData(
        library_name=_LIBRARY[facts.layout],
        pipeline_tag="robotics",
        tags=tags,
        base_model=facts.base_model or None,
        license=facts.license or None,
        ignore_metadata_errors=False,
    )
    return data.to_yaml().strip()


def _about(facts: CardFacts) -> list[str]:
    policy = facts.policy
    told = (
        f"A vision-language-action policy in {_LAYOUT[facts.layout]}, written by asyncrl {__version__} from "
        f"`{facts.source}`{f', with the adapter `{facts.merged}` merged' if facts.merged else ''}."
    )
    if facts.trained is None:
        told += " What it was made from is no checkpoint of a run, so nothing is known here of its training."
    if not facts.license:
        told += " No licence is stated here; it depends on the weights that it was made from."
    stop = ", a stop token behind the slots" if policy.stop_token else ""
    rows = {
        "decision": f"{policy.chunk} steps of {policy.action_dim} numbers, {policy.decoding}{stop}",
        "sees": f"{policy.images} picture(s) of {policy.image_size} pixels ({policy.image_pipeline}), "
        + (f"{policy.proprio_dim} numbers of the robot's state" if policy.proprio_dim else "no robot state"),
        "actions": f"scaled with the statistics `{policy.norm_key}`" if policy.norm_key else "in [-1, 1]",
        "gripper": policy.gripper,
        "computes in": policy.dtype,
        "critic": "none" if policy.value_head == "none" else f"one value per {_values(policy)}",
    }
    return [told, _table(rows)]


def _values(policy: OpenVLAOFTConfig) -> str:
    return "decision" if policy.value_head == "chunk" else "step"


def _training(trained: TrainedPolicy) -> list[str]:
    parts = ["## Training", f"Version {trained.version}: the policy after {trained.version} updates."]
    if trained.settings is not None:
        parts.append(_table(_settings(trained.settings)))
    if trained.starts:
        parts.append("\n".join(_start(start) for start in trained.starts))
    return [*parts, *(f"{note}." for note in trained.notes)]


def _settings(run: TrainConfig) -> dict[str, str]:
    """List the settings that matter; of paths only the last part: the others are nobody's business."""
    algorithm, optimizer, lora = run.algorithm, run.optimizer, run.lora
    rate = f"{optimizer.learning_rate:g}, {optimizer.schedule}"
    rows = {
        "`--policy`, with which it began": _name(run.policy),
        "`--world`": _name(run.world),
        "`--reward`": _name(run.reward) or "the world's own",
        "`--start-states`": _name(run.start_states),
        "`--algorithm.kind`": f"{algorithm.kind}, objective {algorithm.objective} per {algorithm.level}",
        "episodes per update": f"{algorithm.groups_per_update} groups of {algorithm.group_size}",
        "`--algorithm.temperature`": f"{algorithm.temperature:g}"
        + (f", top-k {algorithm.top_k}" if algorithm.top_k else ""),
        "`--correction.kind`": run.correction.kind,
        "largest lag": f"{run.max_lag} updates",
        "`--updates`": f"{run.updates}",
        "learning rate": rate,
        "trained": f"LoRA of rank {lora.rank}, {lora.targets} layers" if lora.rank else "all weights",
        "`--learner.precision`": run.learner.precision,
        "`--actor.success-threshold`": f"{run.actor.success_threshold:g}",
        "`--seed`": f"{run.seed}",
    }
    if algorithm.kind == "ppo":
        rows["critic"] = f"gamma {run.critic.gamma:g}, lambda {run.critic.lam:g}"
    return rows


def _name(text: str) -> str:
    """Shorten a name of a part: the class if it is one, and the last part of its folder."""
    owner, folder = registry.split(text)
    last = Path(folder_part(text)).name if folder_part(text) else ""
    return f"{owner}@{last}" if owner and folder else owner or last


def _start(start: Start) -> str:
    commit = f", commit {start.commit[:12]}{' with changes' * start.dirty}" if start.commit else ""
    wanted = ("torch", "transformers")
    versions = "".join(f", {name} {start.versions[name]}" for name in wanted if name in start.versions)
    ended = f"{start.how.partition(':')[0] or 'no end noted'}, updates {start.from_update}..{start.to_update}"
    return (
        f"- {start.began[:10]}: asyncrl {start.versions.get('asyncrl', '?')}{commit}{versions}, Python "
        f"{start.python}, on {', '.join(start.devices) or 'unknown devices'}, {start.ranks} rank(s): {ended}"
    )


def _success(trained: TrainedPolicy) -> list[str]:
    parts = ["## True success, in a simulator"]
    found = trained.measured
    if found is not None:
        parts.append(f"This version: {_rate(found)}.")
        parts += list(_compared(found, trained))
    elif trained.evaluations:
        others = "\n".join(f"- version {row.version}: {_rate(row)}" for row in _ends(trained))
        parts += ["This version was not measured. Measured of the same run:", others]
    else:
        parts.append("Not measured.")
    return [*parts, *_imagined(trained)]


def _rate(row: EvaluatedVersion) -> str:
    steps = f", {row.steps:.1f} steps to success on average" if row.successes else ""
    return (
        f"**{row.success:.1%}**, 95 % interval {row.low:.1%} to {row.high:.1%} (Wilson): {row.successes} of "
        f"{row.episodes} episodes in `{row.simulator}`, actions sampled at temperature {row.temperature:g}"
        f"{steps}"
    )


def _compared(found: EvaluatedVersion, trained: TrainedPolicy) -> Iterator[str]:
    """Say what the number must be held against: how it was chosen, and what the run began with."""
    rows, most = list(trained.evaluations), max(row.success for row in trained.evaluations)
    if len(rows) > 1 and (trained.from_best or found.success == most):
        yield (
            f"**Selected**: the best of {len(rows)} measured versions, by these very episodes, so the number "
            "tends to be too high. `asyncrl evaluate --seed N` measures at other starts."
        )
    elif found.success < most and (best := max(rows, key=lambda row: (row.success, row.version))).version:
        yield f"The best of the {len(rows)} measured versions is {best.version}: {_rate(best)}."
    if rows[0].version == 0 and found.version:
        yield f"Before training (version 0): {_rate(rows[0])}."


def _ends(trained: TrainedPolicy) -> list[EvaluatedVersion]:
    rows = trained.evaluations
    before = [row for row in rows if row.version < trained.version]
    after = [row for row in rows if row.version > trained.version]
    chosen = {row.version: row for row in (rows[0], *before[-1:], *after[:1])}
    return [chosen[version] for version in sorted(chosen)]


def _imagined(trained: TrainedPolicy) -> list[str]:
    if not trained.successes:
        return []
    mean, count = sum(trained.successes) / len(trained.successes), len(trained.successes)
    updates = "the last update" if count == 1 else f"the last {count} updates, on average"
    kept = trained.settings is not None and trained.settings.algorithm.filter_groups
    only = " Only of groups that the filter kept." if kept else ""
    title, what = "## Success in training", "where it was trained, at training's starts"
    if trained.simulator:
        what = f"in the simulator `{trained.simulator}`, at training's starts"
    elif trained.imagined:
        title = "## Success in imagination"
        what = "as the run's reward model judged what its world model drew. This is not true success"
    return [title, f"{mean:.1%} of the episodes of {updates}, {what}.{only}"]


def _unmeasured(facts: CardFacts) -> list[str]:
    trained, lines = facts.trained, []
    if trained is None or not trained.evaluations:
        lines.append("true success, in any simulator")
    elif trained.measured is None:
        lines.append("true success of this version")
    simulators = sorted({row.simulator for row in trained.evaluations} if trained is not None else ())
    other = f"simulators other than {', '.join(f'`{name}`' for name in simulators)}" if simulators else ""
    lines += [other] if other else []
    lines.append("other tasks than those it was trained on, and any robot")
    return ["## Not measured", "\n".join(f"- {line}" for line in lines)]


def _loading(facts: CardFacts) -> list[str]:
    fetch = f"hf download {facts.repo} --local-dir FOLDER\n" if facts.repo else ""
    if facts.layout == "adapter":
        how = "`peft` puts the adapters on the published model that training began with:"
        return ["## Loading", how, _code("python", 'model = PeftModel.from_pretrained(model, "FOLDER")')]
    convert = "asyncrl convert FOLDER POLICY\n" if facts.layout == "openvla" else ""
    policy = "POLICY" if convert else "FOLDER"
    commands = f"{fetch}{convert}asyncrl evaluate {policy}\nasyncrl train --policy {policy}"
    return ["## Loading", "With asyncrl:", _code("bash", commands), *_elsewhere(facts)]


def _elsewhere(facts: CardFacts) -> list[str]:
    """Say how other stacks open it, or why they do not."""
    if facts.layout == "asyncrl":
        return ["For other stacks: `asyncrl convert FOLDER EXPORT --to openvla --original PUBLISHED`."]
    if facts.unpublished:
        return [f"Other stacks cannot build {facts.unpublished}."]
    if facts.missing:
        return [
            f"Other stacks do not open this folder, because it lacks {facts.missing}. They are in the "
            "published folder that training began with: copy them, or convert again with `--original FOLDER`."
        ]
    where = facts.repo or "FOLDER"
    code = f"from transformers import {facts.model_class}\n\n"
    code += f'model = {facts.model_class}.from_pretrained("{where}", trust_remote_code=True)'
    key = f" Its statistics are `{facts.policy.norm_key}` (`unnorm_key`)." if facts.policy.norm_key else ""
    return [f"With other stacks, which run the code that came with the original:{key}", _code("python", code)]


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows.items())])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
