"""What a user can set about learning: advantages, objective, correction, critic, optimizer. Imports no torch.

Every field's docstring is its `--help` text. What cannot work alone raises where it is set; what cannot work
together is refused by `check_recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError

Level = Literal["token", "action", "chunk"]
"""What has one probability ratio: a token, an action (7 tokens), a decision (8 actions)."""
CorrectionLevel = Literal["token", "action", "chunk", "episode"]
LEVELS = ("token", "action", "chunk", "episode")
"""From fine to coarse."""


def at_least(flag: str, value: float, lowest: float, why: str, remedy: str) -> None:
    """Refuse a value below `lowest` (and NaN): what was set, why it cannot work, what to do."""
    if not value >= lowest:
        raise ConfigError(f"--{flag} is {value}, but it must be at least {lowest}: {why} {remedy}")


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """What is maximised: advantages and objective."""

    kind: Literal["grpo", "ppo"] = "grpo"
    """grpo: the advantage of an episode comes from its siblings. ppo: it comes from a critic (--critic)."""
    group_size: int = 8
    """Episodes imagined from each start state. All of them must arrive before the group is used."""
    groups_per_update: int = 16
    """Groups in one update."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """grpo: what a sibling's return is compared with: the mean of all, or of the others (RLOO)."""
    spread: Literal["group_std", "batch_std", "none"] = "group_std"
    """grpo: what the difference is divided by: the group's standard deviation (GRPO), the batch's, nothing
    (Dr. GRPO, WoVR)."""
    filter_groups: bool = False
    """Replace groups whose episodes all scored the same by fresh ones (DAPO's dynamic sampling)."""
    objective: Literal["ppo", "cispo", "gspo"] = "ppo"
    """ppo: clipped ratio. cispo: the ratio is clipped but every token keeps its gradient. gspo: clipped
    geometric mean of the ratios of a decision."""
    level: Level = "token"
    """What has one ratio of its own: a token, an action (7 tokens) or a chunk (a decision of 56 tokens)."""
    aggregation: Literal["token_mean", "episode_mean", "length_normalised", "constant"] = "token_mean"
    """How ratios add up to the loss: equal weight for all; equal weight for every episode (RLinf calls it
    length-normalised); or divided by the constant number that the longest episodes would have (Dr. GRPO)."""
    clip_low: float = 0.2
    """The probability ratio is kept above 1 - clip_low."""
    clip_high: float = 0.28
    """The probability ratio is kept below 1 + clip_high."""
    dual_clip: float = 0.0
    """ppo, gspo: with a negative advantage the loss is at most dual_clip times it; 0 = no such limit."""
    entropy_coef: float = 0.0
    """Reward for entropy, per token."""
    kl_coef: float = 0.0
    """Penalty per token for leaving the policy the run began with (with LoRA: that without adapters)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of that KL divergence. Only k2 has the right gradient; k1's is zero on average."""
    epochs: int = 1
    """Passes over each batch; the proximal policy is the one before the first of them."""
    minibatches: int = 1
    """Optimizer steps per epoch, each on its share of the batch."""
    micro_batch: int = 32
    """Decisions per forward and backward pass. Changes memory and speed, never the result."""
    temperature: float = 1.0
    """Softmax temperature of the action tokens, in imagination and in evaluation."""
    top_k: int = 0
    """Sample only among the k most likely tokens; 0 = all 256."""

    def __post_init__(self) -> None:
        at_least("algorithm.group-size", self.group_size, 1, "a start state needs an episode.", "Use 8.")
        if self.kind == "grpo":
            at_least(
                "algorithm.group-size",
                self.group_size,
                2,
                "with one episode per start state the advantage is always zero.",
                "Use 8, or --algorithm.kind ppo.",
            )
        if self.filter_groups:
            at_least(
                "algorithm.group-size",
                self.group_size,
                2,
                "one episode differs from nothing, so --algorithm.filter-groups replaces every group.",
                "Use 8, or leave the filter out.",
            )
        at_least("algorithm.groups-per-update", self.groups_per_update, 1, "an update needs data.", "Use 8.")
        at_least("algorithm.micro-batch", self.micro_batch, 1, "a pass needs a decision.", "Use 32.")
        at_least("algorithm.epochs", self.epochs, 1, "a batch that is never used teaches nothing.", "Use 1.")
        at_least("algorithm.minibatches", self.minibatches, 1, "an epoch has a step.", "Use 1.")
        at_least("algorithm.entropy-coef", self.entropy_coef, 0, "it rewards entropy.", "Use 0.")
        at_least("algorithm.kl-coef", self.kl_coef, 0, "it is a penalty.", "Use 0.")
        at_least("algorithm.clip-high", self.clip_high, 0, "a ratio of 1 is never clipped.", "Use 0.28.")
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(
                f"--algorithm.clip-low is {self.clip_low}, but a ratio is kept above 1 - clip_low, "
                "which must lie in 0..1. Use 0.2."
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError(
                f"--algorithm.dual-clip is {self.dual_clip}, but it would clip ratios of 1. Use 3, or 0 to "
                "leave it out."
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"--algorithm.temperature is {self.temperature}, but sampling needs a positive one: without "
                "sampling all siblings are equal and nothing is learned. Use 1.0."
            )
        if not 0 <= self.top_k <= 256:
            raise ConfigError(
                f"--algorithm.top-k is {self.top_k}, but there are 256 action bins. Use 0 for all."
            )


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How samples of older policies are corrected."""

    kind: Literal["none", "naive", "tis", "mis", "decoupled", "vtrace"] = "tis"
    """none: samples count as fresh. naive: the clipped ratio is taken against the policy that sampled.
    tis: truncated importance weights. mis: weights outside the limits become 0 (IcePop). decoupled: weights
    as they are, 0 above the cap. vtrace: corrected advantages and value targets; needs ppo."""
    level: Literal["auto", "token", "action", "chunk", "episode"] = "auto"
    """What has one importance weight. auto: as --algorithm.level."""
    geometric: bool = False
    """The weight of an action, chunk or episode is the geometric mean of its tokens' ratios."""
    low: float = 0.0
    """tis, mis: lower limit of the importance weight."""
    cap: float = 2.0
    """tis, mis, decoupled: upper limit of the importance weight."""
    veto: float = 0.0
    """tis, mis, decoupled: drop an episode when the ratio of one of its tokens is below this; 0 = never."""
    proximal: Literal["recomputed", "log_linear"] = "recomputed"
    """tis, mis, decoupled: the policy the clipped ratio is taken against: the learner's before the update,
    or its interpolation between the policy that sampled and the current one (A-3PO), which saves a pass."""
    rho_cap: float = 1.0
    """vtrace: upper limit of the importance weight of a temporal difference (rho bar)."""
    trace_cap: float = 1.0
    """vtrace: upper limit of the weight a correction is passed on with (c bar)."""

    def __post_init__(self) -> None:
        at_least("correction.cap", self.cap, 1.0, "fresh samples have weight 1.", "Use 2.")
        at_least("correction.rho-cap", self.rho_cap, self.trace_cap, "rho bar >= c bar.", "Use 1.")
        for flag, value in (("low", self.low), ("veto", self.veto)):
            if not 0 <= value < 1:
                raise ConfigError(
                    f"--correction.{flag} is {value}, but fresh samples have weight 1 and must pass. Use 0."
                )
        at_least("correction.trace-cap", self.trace_cap, 0, "it is a weight.", "Use 1.")


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic of PPO: a value head at the last prompt token."""

    level: Literal["chunk", "action"] = "chunk"
    """chunk: one value per decision. action: one per step; rewards and advantages are per step as well."""
    learning_rate: float = 1e-3
    """AdamW learning rate of the value head."""
    through_policy: bool = False
    """Let the value loss reach the policy's trunk."""
    coef: float = 0.5
    """Weight of the value loss."""
    gamma: float = 0.99
    """Discount per decision or step (--critic.level)."""
    lam: float = 0.95
    """Lambda of GAE and V-trace."""
    truncation: Literal["bootstrap", "failure"] = "bootstrap"
    """What an episode that ran out of time could still have got: bootstrap: the critic's value of the final
    observation. failure: nothing, the time limit is part of the task."""
    value_clip: float = 0.0
    """A value may move this far from the one before the update before its loss is clipped; 0 = no clip."""
    huber: float = 10.0
    """Error beyond which the value loss grows linearly."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""
    warmup_updates: int = 0
    """First updates that train only the critic."""

    def __post_init__(self) -> None:
        for flag, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ConfigError(f"--critic.{flag} is {value}, but it must lie in 0..1. Use 0.95.")
        at_least("critic.coef", self.coef, 0, "it weighs a loss.", "Use 0.5.")
        at_least("critic.value-clip", self.value_clip, 0, "it is a distance.", "Use 0 for no clip.")
        at_least("critic.warmup-updates", self.warmup_updates, 0, "it counts updates.", "Use 0.")
        if not self.huber > 0:
            raise ConfigError(f"--critic.huber is {self.huber}, but it must be positive. Use 10.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate."""

    learning_rate: float = 1e-4
    """AdamW learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rates fall after the warm-up."""
    warmup_updates: int = 0
    """Updates in which the learning rates rise linearly to their full size."""
    decay_updates: int = 0
    """linear, cosine: update at which the end is reached; 0 = --updates."""
    final_share: float = 0.0
    """linear, cosine: the learning rate at the end, as a share of the full one."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    beta1: float = 0.9
    """AdamW decay rate of the first moment."""
    beta2: float = 0.95
    """AdamW decay rate of the second moment."""
    eps: float = 1e-8
    """AdamW epsilon."""
    clip_grad: float = 1.0
    """Largest gradient norm; larger gradients are scaled down."""
    max_bad_updates: int = 3
    """Stop the run after this many steps in a row whose gradient is not finite."""

    def __post_init__(self) -> None:
        at_least("optimizer.warmup-updates", self.warmup_updates, 0, "it counts updates.", "Use 0.")
        at_least("optimizer.decay-updates", self.decay_updates, 0, "it counts updates.", "Use 0.")
        at_least("optimizer.max-bad-updates", self.max_bad_updates, 1, "it counts updates.", "Use 3.")
        if not 0 <= self.final_share <= 1:
            raise ConfigError(f"--optimizer.final-share is {self.final_share}, but it is a share. Use 0.")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (peft) instead of full fine-tuning."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 0.0
    """The adapters' output is scaled by alpha / rank; 0 = rank."""
    targets: Literal["language", "all"] = "all"
    """all: every linear layer of vision, projector and language model. language: the language model's."""

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 0, "it counts directions.", "Use 32, or 0 for no adapters.")
        at_least("lora.alpha", self.alpha, 0, "it is a scale.", "Use 0 for the rank.")


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How the learner computes."""

    threads: int = 1
    """CPU threads of a learner process."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward passes in bfloat16; weights, log-probs and optimizer stay float32."""
    compile: bool = False
    """Compile the layers: about a minute at the first update. For GPUs; its gain was not measured yet."""
    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass: less memory, a third more time."""
    offload: bool = False
    """Keep weights, gradient and optimizer state in pinned host memory while the learner waits."""

    def __post_init__(self) -> None:
        at_least("learner.threads", self.threads, 1, "a process needs a thread.", "Use 1.")


def check_recipe(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> None:
    """Refuse combinations that cannot be computed.

    Raises:
        ConfigError: V-trace without a critic, a finer correction than objective, or another such pair.
    """
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
    if algorithm.objective == "gspo" and algorithm.level != "chunk":
        raise ConfigError(
            f"--algorithm.objective is gspo, but --algorithm.level is {algorithm.level}: its ratio "
            "belongs to a whole decision. Use --algorithm.level chunk."
        )
    if algorithm.objective == "cispo" and algorithm.dual_clip:
        raise ConfigError(
            f"--algorithm.dual-clip is {algorithm.dual_clip}, but cispo has no clipped loss to limit. "
            "Use 0, or --algorithm.objective ppo."
        )
    level = algorithm.level if correction.level == "auto" else correction.level
    if LEVELS.index(level) < LEVELS.index(algorithm.level):
        raise ConfigError(
            f"--correction.level is {level}, but --algorithm.level is {algorithm.level}: one ratio cannot "
            "have several weights. Use --correction.level auto or a coarser one."
        )
    if algorithm.kind == "ppo" and critic.level == "action" and algorithm.level == "chunk":
        raise ConfigError(
            "--critic.level is action, but --algorithm.level is chunk: the ratio of a whole decision cannot "
            "have eight advantages. Use --critic.level chunk, or --algorithm.level action or token."
        )
    if correction.proximal == "log_linear" and (level == "episode" or correction.veto):
        raise ConfigError(
            "--correction.proximal is log_linear, but weights or vetoes of whole episodes need the log-probs "
            "of all their tokens before the loss. Use --correction.proximal recomputed."
        )
