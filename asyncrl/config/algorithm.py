"""Settings of learning: advantages, objective, correction and critic. No torch.

Docstrings of fields are the `--help` text. Combinations are checked by `check_recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, Literal

from asyncrl.config.bounds import AtLeast, Bounded, Positive, Within
from asyncrl.errors import ConfigError
from asyncrl.registry import BUILT_IN, check_name, names_code

Level = Literal["token", "action", "decision"]
"""Unit of a probability ratio: a token, an action (the tokens of a step), a decision (all its actions)."""
CorrectionLevel = Literal["token", "action", "decision", "episode"]
TrustRegion = float | Literal["auto"]  # See `CorrectionSettings.trust_region`
TRUST_REGIONS: Final = (0.2, 0.02)  # Values of `auto`: with a lag of at most `SMALL_LAG`, and beyond
SMALL_LAG: Final = 2
LEVELS = ("token", "action", "decision", "episode")  # From fine to coarse


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(Bounded, section="algorithm."):
    """Advantages and objective."""

    kind: Literal["grpo", "ppo"] = "grpo"
    """Source of the advantages. grpo: an episode's siblings. ppo: a critic (--critic)."""
    group_size: Annotated[int, AtLeast(1, "a start state needs an episode.", "Use 8.", highest=4096)] = 8
    """Episodes from each start state; all must arrive before the group is used."""
    groups_per_update: Annotated[int, AtLeast(1, "an update needs data.", "Use 8.", highest=65_536)] = 16
    """Groups in one update."""
    advantage_scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """grpo: divisor of the difference between a return and the mean of its siblings: the group's standard
    deviation (GRPO), the batch's, none (Dr. GRPO, WoVR)."""
    filter_groups: bool = False
    """Replace groups of equal returns by fresh ones (DAPO's dynamic sampling). The run ends with a checkpoint
    when 10 times --algorithm.groups-per-update were replaced since the last update."""
    advantage: str = "auto"
    """group_relative: return against the siblings'. gae: rewards against the critic's values. auto:
    group_relative for grpo, gae for ppo. Or your own package.module:Class."""
    objective: str = "ppo"
    """ppo: clipped ratio. cispo: clipped, but every token keeps its gradient. gspo: clipped geometric mean of
    a decision's ratios. Or your own package.module:Class."""
    settings: tuple[str, ...] = ()
    """key=value texts for your own advantage and objective; a value is TOML, or else a text."""
    level: Level = "token"
    """Unit of a ratio: a token, an action (tokens of a step), a decision (all tokens)."""
    aggregation: Literal["token_mean", "length_normalised", "constant"] = "token_mean"
    """Weights of ratios in the loss: equal for all; equal for every episode; or
    divided by the number of ratios of the longest episodes (Dr. GRPO)."""
    clip_low: Annotated[
        float, Within(0, 1, "a ratio is kept above 1 - clip_low, which must lie in 0..1.", "Use 0.2.")
    ] = 0.2
    """The probability ratio is kept above 1 - clip_low."""
    clip_high: Annotated[float, AtLeast(0, "a ratio of 1 is never clipped.", "Use 0.28.")] = 0.28
    """The probability ratio is kept below 1 + clip_high."""
    dual_clip: float = 3.0
    """ppo, gspo: where the advantage A is negative the loss is at most -A * dual_clip; 0 = no limit, so that
    one unit of an old sample can outweigh all others."""
    entropy_coef: Annotated[float, AtLeast(0, "it rewards entropy.", "Use 0.")] = 0.0
    """Reward for entropy, per token."""
    kl_coef: Annotated[float, AtLeast(0, "it is a penalty.", "Use 0.")] = 0.0
    """Penalty per token of the KL to the initial policy (with LoRA: without adapters)."""
    epochs: Annotated[int, AtLeast(1, "a batch that is never used teaches nothing.", "Use 1.")] = 1
    """Passes over each batch; the proximal policy is the one before the first pass."""
    minibatches: Annotated[int, AtLeast(1, "an epoch has a step.", "Use 1.")] = 1
    """Optimizer steps per epoch, each on its share of the batch."""
    micro_batch: Annotated[int, AtLeast(1, "a pass needs a decision.", "Use 32.", highest=1_000_000)] = 32
    """Decisions of a forward and backward pass. Changes memory and speed, never the result."""
    temperature: Annotated[
        float,
        Positive(
            "sampling needs a positive one: without sampling all siblings are equal and nothing is learned.",
            "Use 1.0.",
            highest=1000,
        ),
    ] = 1.0
    """Softmax temperature of the action tokens; in imagination and in evaluation."""
    top_k: Annotated[int, Within(0, 256, "there are 256 action bins.", "Use 0 for all.")] = 0
    """Sample only among the k most likely tokens; 0 = all 256."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2 and (self.kind == "grpo" or self.filter_groups):
            raise ConfigError(
                f"--algorithm.group-size is {self.group_size}, but it must be at least 2: with one episode "
                "per start state grpo's advantage is always zero, and --algorithm.filter-groups replaces "
                "every group. Use 8, or --algorithm.kind ppo without the filter."
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError(
                f"--algorithm.dual-clip is {self.dual_clip}, but it would clip ratios of 1. Use 3, or 0 to "
                "leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings(Bounded, section="correction."):
    """Correction of samples of older policies."""

    kind: str = "tis"
    """How samples of older policies count. none: as fresh. naive: the clipped ratio uses the behaviour
    policy. tis: truncated importance weights. mis: weights outside the limits are 0 (with a lower limit:
    IcePop). decoupled: weights above the cap are 0. vtrace: corrected advantages and value targets; needs
    ppo. Or your own package.module:Class."""
    settings: tuple[str, ...] = ()
    """key=value texts for your own correction; a value is TOML, or else a text."""
    level: Literal["auto", "token", "action", "decision", "episode"] = "auto"
    """Unit of an importance weight. auto: as --algorithm.level."""
    trust_region: TrustRegion = "auto"
    """Leave out a unit once its probability differs by more than this from the behaviour policy's, in the
    direction of its advantage (DPPO-TV); of several tokens the geometric mean. Only for policies of tokens. 0
    = no bound. auto: 0.2 if --replay.max-lag is at most 2, else 0.02 (docs/measurements/staleness.md)."""
    geometric: bool = False
    """The weight of an action, decision or episode is the geometric mean of its tokens' ratios."""
    min_weight: Annotated[
        float, Within(0, 1, "fresh samples have weight 1 and must pass.", "Use 0.", open_above=True)
    ] = 0.0
    """tis, mis: lower limit of the importance weight."""
    max_weight: Annotated[float, AtLeast(1.0, "fresh samples have weight 1.", "Use 2.")] = 2.0
    """tis, mis, decoupled: upper limit of the importance weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trust_region != "auto":
            Within(0, 1, "it is a difference of probabilities.", "Use 0.2, or the word auto.").check(
                "correction.trust-region", self.trust_region
            )


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Bounded, section="critic."):
    """The critic of PPO: a value head at the last prompt token."""

    level: Literal["decision", "action"] = "decision"
    """decision: one value per decision. action: one per step; rewards and advantages are per step as well."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")] = 1e-3
    """AdamW learning rate of the value head."""
    gamma: Annotated[float, Within(0, 1, "it must lie in 0..1.", "Use 0.95.")] = 0.99
    """Discount per decision or step (--critic.level)."""
    lam: Annotated[float, Within(0, 1, "it must lie in 0..1.", "Use 0.95.")] = 0.95
    """Lambda of GAE and V-trace."""
    truncation: Literal["bootstrap", "failure"] = "bootstrap"
    """Value after a time limit. bootstrap: the critic's, for the final observation. failure: 0, as the limit
    is part of the task."""
    value_clip: Annotated[float, AtLeast(0, "it is a distance.", "Use 0 for no clip.")] = 0.0
    """Change of a value during the update beyond which its loss is clipped; 0 = no clip."""
    huber: Annotated[float, Positive("it must be positive.", "Use 10.")] = 10.0
    """Error beyond which the value loss grows linearly."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""
    warmup_updates: Annotated[int, AtLeast(0, "it counts updates.", "Use 0.")] = 0
    """First updates that train only the critic."""


def check_recipe(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> None:
    """Refuse combinations that cannot be computed."""
    _check_names(algorithm, correction)
    episodes = algorithm.groups_per_update * algorithm.group_size
    if algorithm.minibatches > episodes:
        raise ConfigError(
            f"--algorithm.minibatches is {algorithm.minibatches}, but a batch has {episodes} episodes, and a "
            f"minibatch holds whole ones. Use {episodes} or fewer."
        )
    if correction.kind == "vtrace" and algorithm.kind != "ppo":
        raise ConfigError(
            f"--correction.kind is vtrace, but --algorithm.kind is {algorithm.kind}: V-trace corrects the "
            "values of a critic, and grpo has none. Use --algorithm.kind ppo, or tis, mis or decoupled."
        )
    if algorithm.objective == "gspo" and algorithm.level != "decision":
        raise ConfigError(
            f"--algorithm.objective is gspo, but --algorithm.level is {algorithm.level}: its ratio "
            "belongs to a whole decision. Use --algorithm.level decision."
        )
    level = algorithm.level if correction.level == "auto" else correction.level
    if LEVELS.index(level) < LEVELS.index(algorithm.level):
        raise ConfigError(
            f"--correction.level is {level}, but --algorithm.level is {algorithm.level}: one ratio cannot "
            "have several weights. Use --correction.level auto or a coarser one."
        )
    if algorithm.kind == "ppo" and critic.level == "action" and algorithm.level == "decision":
        raise ConfigError(
            "--critic.level is action, but --algorithm.level is decision: the ratio of a whole decision "
            "cannot have an advantage per step. Use --critic.level decision, or --algorithm.level action."
        )


def _check_names(algorithm: AlgorithmSettings, correction: CorrectionSettings) -> None:
    # Nothing is imported for it.
    check_name("correction", correction.kind)
    check_name("objective", algorithm.objective)
    if algorithm.advantage != "auto":
        check_name("advantage", algorithm.advantage)
    if correction.settings and not names_code(correction.kind):
        raise ConfigError(
            f"--correction.settings is {' '.join(correction.settings)}, but --correction.kind "
            f"{correction.kind} is set by the other --correction flags. Leave it out."
        )
    if algorithm.settings and not any(map(names_code, (algorithm.advantage, algorithm.objective))):
        raise ConfigError(
            f"--algorithm.settings is {' '.join(algorithm.settings)}, but neither --algorithm.advantage nor "
            "--algorithm.objective names a class of yours. Leave it out."
        )


# --- settings without effect ---

ACTING: Final = {
    "none": (),
    "naive": (),
    "tis": ("geometric", "level", "max_weight", "min_weight"),
    "mis": ("geometric", "level", "max_weight", "min_weight"),
    "decoupled": ("geometric", "level", "max_weight"),
    "vtrace": (),
}
"""Kind of correction -> its settings that have an effect, besides kind, settings and trust_region."""
assert ACTING.keys() == BUILT_IN["correction"].keys()
_ONE_STEP: Final = (
    "with one step per batch the ratio to the proximal policy is 1. --correction.trust-region bounds the "
    "policy against the one that sampled"
)


def idle_settings(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> list[str]:
    """Return a line for each setting that differs from its default without effect, with the reason."""
    reasons: dict[str, str] = {}
    if correction.kind in ACTING:
        acting = {*ACTING[correction.kind], "kind", "settings", "trust_region"}
        idle = (f"correction.{field.name}" for field in fields(correction) if field.name not in acting)
        reasons |= dict.fromkeys(idle, f"--correction.kind is {correction.kind}")
    fresh = correction.kind in ACTING and correction.kind != "naive"
    if fresh and algorithm.epochs * algorithm.minibatches == 1 and not names_code(algorithm.objective):
        reasons |= {f"algorithm.{name}": _ONE_STEP for name in ("clip_low", "clip_high", "dual_clip")}
    elif algorithm.objective == "cispo":
        reasons["algorithm.dual_clip"] = "cispo has no clipped loss to limit"
    if algorithm.kind == "grpo":
        reasons |= {f"critic.{x.name}": "--algorithm.kind grpo has no critic" for x in fields(critic)}
    elif algorithm.advantage in ("auto", "gae"):
        why = "--algorithm.kind ppo compares with the critic, not with siblings"
        reasons["algorithm.advantage_scale"] = why
    lines = [
        f"--{name.replace('_', '-')} has no effect: {reasons[name]}"
        for settings in (correction, algorithm, critic)
        for field in fields(settings)
        if (name := settings.SECTION + field.name) in reasons
        and getattr(settings, field.name) != field.default
    ]
    if correction.kind == "mis" and correction.min_weight == 0:
        lines.append(
            "--correction.kind mis without a lower limit is the same as decoupled; IcePop has "
            "--correction.min-weight 0.5"
        )
    return lines
