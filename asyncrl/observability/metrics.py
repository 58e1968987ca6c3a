"""Every number a run reports, defined once: name, how ranks and micro-batches are folded, unit and meaning.

Callers log ``{m.GRAD_NORM: 3.2}``, never a bare string. `docs/metrics.md` is generated from this registry
and the advice in `metric_advice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How several readings of one metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """One number that a run reports."""

    name: str
    over: Reduction
    unit: str
    meaning: str


REGISTRY: dict[str, Metric] = {}


def define(name: str, over: Reduction, unit: str, meaning: str) -> Metric:
    """Add a metric to the registry; its name must be new."""
    assert name not in REGISTRY, name
    REGISTRY[name] = Metric(name, over, unit, meaning)
    return REGISTRY[name]


SUCCESS_ONCE = define(
    "env/success_once", Reduction.MEAN, "share", "Imagined episodes that succeeded, by the reward model."
)
RETURN = define("env/return", Reduction.MEAN, "1", "Sum of rewards of an episode.")
REWARD = define("env/reward", Reduction.MEAN, "1/step", "Return divided by the episode's length.")
EPISODE_LEN = define("env/episode_len", Reduction.MEAN, "steps", "Steps until success or truncation.")

REWARDS = define("rollout/rewards", Reduction.MEAN, "1", "Mean return of the episodes in the batch.")
ADVANTAGES_MEAN = define("rollout/advantages_mean", Reduction.MEAN, "1", "Mean advantage over valid tokens.")
ADVANTAGES_MAX = define("rollout/advantages_max", Reduction.MAX, "1", "Largest advantage.")
ADVANTAGES_MIN = define("rollout/advantages_min", Reduction.MIN, "1", "Smallest advantage.")

LOSS = define("train/loss", Reduction.MEAN, "1", "What was minimised.")
POLICY_LOSS = define("train/actor/policy_loss", Reduction.MEAN, "1", "Clipped policy objective, negated.")
ENTROPY_LOSS = define(
    "train/entropy_loss", Reduction.MEAN, "nats", "Entropy of the action-token distribution, per token."
)
APPROX_KL = define(
    "train/actor/approx_kl", Reduction.MEAN, "nats", "KL(before || after) the update per token, k3."
)
CLIP_FRACTION = define(
    "train/actor/clip_fraction", Reduction.MEAN, "share", "Valid units whose gradient the clip removed."
)
CLIPPED_RATIO = define(
    "train/actor/clipped_ratio", Reduction.MEAN, "1", "Mean probability ratio after clipping."
)
GRAD_NORM = define("train/actor/grad_norm", Reduction.MAX, "1", "Gradient norm before clipping.")
LEARNING_RATE = define("train/actor/lr", Reduction.LAST, "1", "Learning rate of this update.")
MISMATCH_KL = define(
    "train/actor/mismatch_kl",
    Reduction.MEAN,
    "nats",
    "KL(behaviour || learner's) per token, before the update, k3.",
)
IMPORTANCE_MEAN = define(
    "train/actor/importance_mean", Reduction.MEAN, "1", "Mean importance weight after truncation."
)
IMPORTANCE_MAX = define(
    "train/actor/importance_max", Reduction.MAX, "1", "Largest importance weight before truncation."
)
IMPORTANCE_CAPPED = define(
    "train/actor/importance_capped", Reduction.MEAN, "share", "Valid units whose weight a limit changed."
)
ESS = define(
    "train/actor/effective_sample_size",
    Reduction.MEAN,
    "share",
    "(sum r)^2 / (n sum r^2) of the ratios learner's / behaviour, at the correction's level, untruncated.",
)
IMPORTANCE_ESS = define(
    "train/actor/importance_ess", Reduction.MEAN, "share", "The same of the importance weights in use."
)
VETOED = define("train/actor/vetoed", Reduction.MEAN, "share", "Units whose episode was vetoed.")
DUAL_CLIPPED = define(
    "train/actor/dual_clip_fraction",
    Reduction.MEAN,
    "share",
    "Valid units whose gradient the dual clip removed.",
)
RATIO = define("train/actor/ratio", Reduction.MEAN, "1", "Mean probability ratio current / proximal.")
KL_REFERENCE = define(
    "train/actor/kl_reference",
    Reduction.MEAN,
    "nats",
    "KL(current || reference) per token by --algorithm.kl-estimator.",
)
VALUE_LOSS = define("train/critic/value_loss", Reduction.MEAN, "1", "Value loss; only with a critic.")
VALUE_CLIP_RATIO = define(
    "train/critic/value_clip_ratio", Reduction.MEAN, "share", "Values the clip cut; only with a critic."
)
EXPLAINED_VARIANCE = define(
    "train/critic/explained_variance",
    Reduction.MEAN,
    "share",
    "1 - Var(return - value) / Var(return); only with a critic.",
)
CRITIC_GRAD_NORM = define(
    "train/critic/grad_norm", Reduction.MAX, "1", "Gradient norm of the value head before clipping."
)
CRITIC_LEARNING_RATE = define("train/critic/lr", Reduction.LAST, "1", "Learning rate of the value head.")
RETURNS_MEAN = define("rollout/returns_mean", Reduction.MEAN, "1", "Mean value target; only with a critic.")
VALUES_MEAN = define(
    "rollout/values_mean", Reduction.MEAN, "1", "Mean value before the update; only with a critic."
)
BAD_UPDATES = define(
    "train/bad_updates", Reduction.LAST, "updates", "Updates skipped because the gradient was not finite."
)

LAG_MEAN = define(
    "replay/lag_mean", Reduction.MEAN, "versions", "Learner's version minus the decision's, mean."
)
LAG_MAX = define("replay/lag_max", Reduction.MAX, "versions", "The same, largest in the batch.")
LAG_HISTOGRAM = [
    (
        define(
            f"replay/lag_{name}", Reduction.MEAN, "share", f"Decisions of the batch with a lag of {text}."
        ),
        low,
        high,
    )
    for name, text, low, high in (
        ("0", "0", 0, 0),
        ("1", "1", 1, 1),
        ("2", "2", 2, 2),
        ("3_4", "3 or 4", 3, 4),
        ("5_8", "5 to 8", 5, 8),
        ("9_up", "9 or more", 9, 1 << 40),
    )
]
"""Metric, lowest and highest lag of each bar."""
GROUPS_READY = define("replay/groups_ready", Reduction.LAST, "groups", "Complete groups waiting to be used.")
GROUPS_IN_FLIGHT = define(
    "replay/groups_in_flight", Reduction.LAST, "groups", "Groups granted and not yet complete."
)
FILTERED_GROUPS = define(
    "replay/filtered_groups",
    Reduction.LAST,
    "groups",
    "Groups replaced because all their episodes had the same return; with --algorithm.filter-groups.",
)
REPLAY_SUCCESS = define(
    "replay/success",
    Reduction.MEAN,
    "share",
    "Successful episodes of all groups completed at the learner's last version, filtered ones included.",
)
SIGNAL_GROUPS = define(
    "replay/signal_groups", Reduction.MEAN, "share", "Groups of the batch whose episodes differ in return."
)
EPISODES = define("replay/episodes", Reduction.LAST, "episodes", "Episodes acknowledged since the run began.")
DROPPED_LAG = define("replay/dropped_lag", Reduction.LAST, "episodes", "Dropped: older than the lag bound.")
DROPPED_DEADLINE = define(
    "replay/dropped_deadline", Reduction.LAST, "episodes", "Dropped: their group never became complete."
)
DROPPED_RESUME = define(
    "replay/dropped_resume",
    Reduction.LAST,
    "episodes",
    "Dropped on a resume and imagined again: incomplete, or of versions that were lost.",
)
DROPPED_INVALID = define(
    "replay/dropped_invalid", Reduction.LAST, "episodes", "Refused: inconsistent content."
)
DROPPED_POISONED = define(
    "replay/dropped_poisoned",
    Reduction.LAST,
    "episodes",
    "Dropped: finished, but a sibling was poisoned. Episodes that had not ended are not counted.",
)
(
    DROPPED_LAG_DECISIONS,
    DROPPED_DEADLINE_DECISIONS,
    DROPPED_RESUME_DECISIONS,
    DROPPED_INVALID_DECISIONS,
    DROPPED_POISONED_DECISIONS,
) = (
    define(f"{dropped.name}_decisions", Reduction.LAST, "decisions", f"Decisions in `{dropped.name}`.")
    for dropped in (DROPPED_LAG, DROPPED_DEADLINE, DROPPED_RESUME, DROPPED_INVALID, DROPPED_POISONED)
)
POISONED_POLICY, POISONED_WORLD, POISONED_REWARD = (
    define(f"replay/poisoned_{model}", Reduction.LAST, "groups", f"Given up: {what} not finite.")
    for model, what in (
        ("policy", "a log-prob, action or value of the policy was"),
        ("world", "what the world model drew was"),
        ("reward", "a score of the reward model was"),
    )
)
POISONED_RAISED = define(
    "replay/poisoned_raised",
    Reduction.LAST,
    "groups",
    "Given up: imagining one of its episodes raised an error.",
)
POISONED_QUARANTINED = define(
    "replay/poisoned_quarantined", Reduction.LAST, "groups", "Not begun: their start state is quarantined."
)
QUARANTINED = define(
    "replay/quarantined",
    Reduction.LAST,
    "start states",
    "Not used any more: they failed in --replay.quarantine-after groups.",
)
DUPLICATES = define("replay/duplicates", Reduction.LAST, "episodes", "Received again and recognised.")
DISK_WAITING = define(
    "replay/disk_waiting", Reduction.LAST, "s", "Time that complete groups waited for disk space."
)
REPLAY_BYTES = define("replay/bytes", Reduction.LAST, "bytes", "Size of the HDF5 files.")

WEIGHTS_VERSION = define("weights/version", Reduction.LAST, "versions", "Version last published.")
WEIGHTS_BYTES = define("weights/bytes", Reduction.LAST, "bytes", "Size of one broadcast.")
WEIGHTS_SECONDS = define("weights/seconds", Reduction.LAST, "s", "Duration of the last broadcast.")
WEIGHTS_MEMBERS = define(
    "weights/members",
    Reduction.LAST,
    "actors",
    "Actors that took part in the last broadcast, and joined ones that hold a version.",
)
WEIGHTS_JOINED = define(
    "weights/joined",
    Reduction.LAST,
    "actors",
    "Actors that joined and hold a version; absent where none can.",
)
WEIGHTS_PULL_SECONDS = define(
    "weights/pull_seconds",
    Reduction.LAST,
    "s",
    "Time the slowest joined actor needed to fetch its last version.",
)
WEIGHTS_PULLED_BYTES = define(
    "weights/pulled_bytes", Reduction.LAST, "bytes", "Bytes of weights that joined actors fetched."
)

GROUPS_PER_MINUTE = define(
    "time/groups_per_minute", Reduction.MEAN, "1/min", "Groups used by the learner per minute."
)
LEARNER_WAITING = define(
    "time/learner_waiting", Reduction.MEAN, "share", "Share of the time the learner waited for episodes."
)
CHECKPOINT_WAITING = define(
    "time/checkpoint_waiting",
    Reduction.SUM,
    "s",
    "Time the learner waited for the checkpoint before to be written.",
)
ACTORS_WAITING = define(
    "time/actors_waiting", Reduction.MEAN, "share", "Share of the time the actors waited for credit."
)
ACTOR_POLICY, ACTOR_WORLD, ACTOR_REWARD = (
    define(
        f"time/actor_{model}",
        Reduction.MEAN,
        "share",
        f"Share of the actors' time in which their device was busy with {what}.",
    )
    for model, what in (
        ("policy", "the policy"),
        ("world", "the world model"),
        ("reward", "the reward model"),
    )
)
ACTOR_HOST = define(
    "time/actor_host",
    Reduction.MEAN,
    "share",
    "Share of the actors' time in which their thread worked: refilled, launched, recorded, handed over. On a "
    "GPU a launch also waits while CUDA's queue is full, which counts here.",
)
ACTOR_PARKING = define(
    "time/actor_parking",
    Reduction.MEAN,
    "share",
    "Share of the actors' time spent moving models to host memory and back; with --actor.offload.",
)
LEARNER_PARKING = define(
    "time/learner_parking",
    Reduction.SUM,
    "s",
    "Time rank 0 spent moving its tensors to host memory and back; with --learner.offload.",
)
UPDATE_SECONDS = define("time/update", Reduction.MEAN, "s", "Duration of one update without the waiting.")
DECISIONS_PER_SECOND = define(
    "time/decisions_per_second",
    Reduction.MEAN,
    "1/s",
    "Decisions with a gradient, of all ranks and epochs, per second of the update.",
)
MFU = define(
    "time/mfu",
    Reduction.MEAN,
    "share",
    "Model FLOPs of those decisions per second, of the GPUs' peak; absent where that is not known.",
)
RESPAWNS = define(
    "time/respawns",
    Reduction.LAST,
    "processes",
    "Actors and replays that died and were started again, since torchrun last started the ranks.",
)
PEAK_MEMORY = define(
    "time/peak_memory", Reduction.SUM, "bytes", "Peak resident memory of the learner process."
)
ACTOR_MEMORY = define(
    "actor/peak_memory",
    Reduction.MAX,
    "bytes",
    "Most memory that an actor's tensors took on a GPU (on the CPU: its process), the largest of all actors.",
)
ACTOR_PARKED = define(
    "actor/parked_bytes",
    Reduction.MAX,
    "bytes",
    "Device memory that an actor gave back when it last reported; with --actor.offload.",
)
LEARNER_MEMORY = define(
    "learner/peak_memory",
    Reduction.MAX,
    "bytes",
    "Most memory that rank 0's tensors took on its GPU; absent on the CPU.",
)
LEARNER_PARKED = define(
    "learner/parked_bytes",
    Reduction.MAX,
    "bytes",
    "Device memory that rank 0 gave back while it waited for this batch; with --learner.offload.",
)

WIRE_BYTES = define("wire/bytes", Reduction.LAST, "bytes", "Episode bytes received by the replay.")
SHARED_BYTES = define("wire/shared_bytes", Reduction.LAST, "bytes", "Those that came through shared memory.")
UNSHARED = define(
    "wire/unshared",
    Reduction.LAST,
    "episodes",
    "Large ones that used the socket though their actor has a ring.",
)
WIRE_ERRORS = define(
    "wire/errors", Reduction.LAST, "messages", "Messages refused because they broke the wire format."
)

EVAL_SUCCESS = define("eval/success_once", Reduction.MEAN, "share", "Success rate in the true simulator.")

Readings = Mapping[Metric, float]

_FOLD = {
    Reduction.MEAN: lambda values: math.fsum(values) / len(values),
    Reduction.SUM: math.fsum,
    Reduction.MAX: max,
    Reduction.MIN: min,
    Reduction.LAST: lambda values: values[-1],
}


def reduce(rows: Iterable[Readings]) -> dict[Metric, float]:
    """Fold several rows of readings into one, each metric by its own rule. Absent readings are left out."""
    collected: dict[Metric, list[float]] = {}
    for row in rows:
        for metric, value in row.items():
            collected.setdefault(metric, []).append(float(value))
    return {metric: float(_FOLD[metric.over](values)) for metric, values in collected.items()}
