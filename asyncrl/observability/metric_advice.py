"""What a healthy reading looks like, and what to do about another: one or two sentences per metric.

Every metric of the registry has an entry; a test keeps the names and the flags true. Numbers appear only
where they follow from a definition. Names that RLinf uses too say how its number differs.
"""

from __future__ import annotations

from typing import Final

from asyncrl.observability import metrics as m
from asyncrl.observability.metrics import Metric
from asyncrl.observability.waits import WAITS

_ENV: Final = {
    m.SUCCESS_ONCE: "Rises over updates. When it rises and `asyncrl evaluate` does not, the policy "
    "exploits the world or reward model: stop earlier or refit them. With --algorithm.filter-groups it is "
    "that of the groups that were kept: read `replay/success` instead.",
    m.RETURN: "Equals `env/success_once`, because the only reward is 1 at the first success.",
    m.REWARD: "Rises when episodes succeed more often or sooner. Runs of different --actor.max-decisions "
    "cannot be compared by it.",
    m.EPISODE_LEN: "Falls as the policy gets faster. Near 8 times --actor.max-decisions hardly anything "
    "succeeds; when even successes need nearly that much, raise it.",
}

_ROLLOUT: Final = {
    m.REWARDS: "The same number as `env/return`.",
    m.ADVANTAGES_MEAN: "Near 0. Not exactly: grpo centres over episodes, and where failures are longer "
    "they have more tokens, so the mean is below 0. With ppo it is far from 0 only without "
    "--critic.normalize-advantages.",
    m.ADVANTAGES_MAX: "grpo: largest when one sibling of many succeeds; always 0 means that no group "
    "differs (`replay/signal_groups`). ppo: very large means that the critic is far off for a few decisions.",
    m.ADVANTAGES_MIN: "The mirror image: lowest when one sibling of many fails.",
    m.RETURNS_MEAN: "What `rollout/values_mean` should follow. Unlike `env/return` it is discounted "
    "(--critic.gamma) and taken at every decision, not only the first.",
    m.VALUES_MEAN: "Follows `rollout/returns_mean` within a few updates. When it stays behind, raise "
    "--critic.learning-rate or --critic.warmup-updates.",
}

_ACTOR: Final = {
    m.POLICY_LOSS: "Has no target and need not fall: its size follows advantages and lag. Look at "
    "`env/success_once` and `train/actor/approx_kl`.",
    m.APPROX_KL: "Small, positive and steady. A rise from update to update means steps that are too large: "
    "lower --optimizer.learning-rate or --algorithm.epochs; 0 means that nothing is learned. RLinf's is k1, "
    "-mean(log ratio), which can be negative, and at token level it is divided by a mask that is too narrow "
    "(up to 7-fold too large); ours is k3 over valid tokens, never negative, and compares before with after "
    "the update.",
    m.CLIP_FRACTION: "0 with one epoch and one minibatch (at the only step the ratio is 1), unless "
    "--correction.kind is naive or --correction.proximal log_linear. Otherwise small; when much is clipped, "
    "lower --optimizer.learning-rate, --algorithm.epochs or --replay.max-lag. RLinf's is up to 7-fold too "
    "large at token level, for the reason given at approx_kl; ours is a share of valid units "
    "(--algorithm.level).",
    m.DUAL_CLIPPED: "0, or small: only with --algorithm.dual-clip. A large share means that bad actions "
    "became far more likely: lower --optimizer.learning-rate or --replay.max-lag.",
    m.CLIPPED_RATIO: "Near 1; between 1 - --algorithm.clip-low and 1 + --algorithm.clip-high by "
    "construction.",
    m.RATIO: "Near 1, and 1 wherever `train/actor/clip_fraction` must be 0. A drift says the same as a "
    "large `train/actor/approx_kl`; with --correction.kind naive it holds the lag as well.",
    m.GRAD_NORM: "Steady; of several steps the largest counts. Always above --optimizer.clip-grad is no "
    "harm: AdamW hardly depends on the scale. 0 means that no group differs (`replay/signal_groups`). "
    "Spikes: lower --optimizer.learning-rate or --replay.max-lag. Absent when every step was skipped "
    "(`train/bad_updates`).",
    m.LEARNING_RATE: "Follows --optimizer.learning-rate, --optimizer.warmup-updates and "
    "--optimizer.schedule.",
    m.MISMATCH_KL: "About 0 at lag 0, and grows slowly with the lag. Large at lag 0: actor and learner "
    "compute differently (precision, adapters, another device). Large otherwise: lower --replay.max-lag or "
    "--optimizer.learning-rate.",
    m.IMPORTANCE_MEAN: "Near 1, below it by what the limits cut. Far below 1: much of the batch counts "
    "little, lower --replay.max-lag. Only with --correction.kind tis, mis or decoupled.",
    m.IMPORTANCE_MAX: "Close to 1 at lag 0. Large values are what --correction.cap is for; on chunk and "
    "episode level they multiply over tokens, so try --correction.geometric there.",
    m.IMPORTANCE_CAPPED: "A few percent. More: the lag is too large for the pace, lower --replay.max-lag "
    "or --optimizer.learning-rate; raising --correction.cap trades the bias for variance.",
    m.ESS: "Near 1: all samples count about the same. Far below: a few samples dominate, lower "
    "--replay.max-lag, or use a finer --correction.level. The truest sign of harmful staleness, whatever "
    "the correction cuts.",
    m.IMPORTANCE_ESS: "With tis usually above `train/actor/effective_sample_size`, because the cap evens "
    "the weights out; with mis and decoupled dropped units lower it. Far below 1: lower --replay.max-lag.",
    m.VETOED: "0, or small: only with --correction.veto. Whole episodes are lost to it: lower the "
    "threshold, --replay.max-lag or --optimizer.learning-rate when it grows.",
    m.KL_REFERENCE: "Grows slowly from 0; with kl-estimator k1 it can be negative. When it grows without "
    "gain in true success, raise --algorithm.kl-coef. Only with a coefficient above 0.",
}

_CRITIC: Final = {
    m.VALUE_LOSS: "Falls first, then follows how varied the returns are. Growing: lower "
    "--critic.learning-rate.",
    m.VALUE_CLIP_RATIO: "0 without --critic.value-clip. With it, a large share means that the clip brakes "
    "the critic: raise or drop it. RLinf's is always 0, whatever its clip does; ours is real.",
    m.EXPLAINED_VARIANCE: "Rises from about 0 (no better than the mean) towards 1. Below 0 the critic does "
    "harm: train it alone first with --critic.warmup-updates, or change --critic.learning-rate. Absent when "
    "all targets agree.",
    m.CRITIC_GRAD_NORM: "Steady; clipped at --optimizer.clip-grad apart from the policy's. Spikes: lower "
    "--critic.learning-rate or --critic.huber.",
    m.CRITIC_LEARNING_RATE: "Follows --critic.learning-rate with the warm-up and schedule of the policy's.",
}

_TRAIN: Final = {
    m.LOSS: "Policy loss, --critic.coef times the value loss, and what entropy and KL add. Has no target: "
    "look at its parts.",
    m.ENTROPY_LOSS: "Not a loss but the entropy itself, at most log 256 = 5.55. Falls slowly. When it "
    "collapses, siblings become equal: raise --algorithm.entropy-coef or --algorithm.clip-high, or lower "
    "--optimizer.learning-rate. When it climbs, lower --algorithm.entropy-coef.",
    m.BAD_UPDATES: "0. Growing: lower --optimizer.learning-rate; the run stops after "
    "--optimizer.max-bad-updates in a row.",
}

_LAG_BAR: Final = (
    "The bars add up to 1, and none is beyond --replay.max-lag. Most of it on the right: finished groups "
    "wait for a slow learner, so a lower --replay.max-lag costs little."
)

_POISONED: Final = (
    "0. The actor's log names the start state. In one: replace it (--start-states). In many: the model is "
    "broken, or its precision too low."
)

_REPLAY: Final = {
    m.LAG_MEAN: "Below --replay.max-lag, 0 with --synchronous. Near the bound all the time: the actors are "
    "ahead and wait (`time/actors_waiting`), so a lower bound costs little.",
    m.LAG_MAX: "At most --replay.max-lag, always: the replay guarantees it.",
    **{metric: _LAG_BAR for metric, _, _ in m.LAG_HISTOGRAM},
    m.GROUPS_READY: "At most --algorithm.groups-per-update times (--replay.max-lag + 1). Always near that: "
    "the learner is the bottleneck (`time/actors_waiting`). 0 while the learner waits: more actors "
    "(--placement).",
    m.GROUPS_IN_FLIGHT: "Enough to keep all --actor.slots busy. It falls to 0 only when the actors wait "
    "for credit, or are gone: read their logs.",
    m.FILTERED_GROUPS: "Grows. When it outgrows the groups that are used, most start states are too easy "
    "or too hard: choose others with --start-states, or raise --algorithm.group-size.",
    m.REPLAY_SUCCESS: "As `env/success_once`, but of everything that was imagined: the success to watch "
    "with --algorithm.filter-groups. Absent when no group was completed in the version before.",
    m.SIGNAL_GROUPS: "As near to 1 as possible; exactly 1 with --algorithm.filter-groups. Low: grpo learns "
    "from few groups. Use the filter, a larger --algorithm.group-size, other start states, or a higher "
    "--algorithm.temperature.",
    m.EPISODES: "Grows by --algorithm.group-size times --algorithm.groups-per-update per update, plus what "
    "is filtered.",
    m.DROPPED_LAG: "Constant. Growing: episodes take longer than the bound allows. Fewer --actor.slots, or "
    "a larger --replay.max-lag.",
    m.DROPPED_DEADLINE: "Constant. Growing: an actor is stuck or restarts (its log says why); raise "
    "--replay.group-deadline when imagining is only slow.",
    m.DROPPED_RESUME: "Changes only when a run is resumed; those groups are imagined again.",
    m.DROPPED_INVALID: "0. Otherwise an actor runs other settings or other code than the learner, or a "
    "file is damaged: `asyncrl replay verify`.",
    m.DROPPED_POISONED: "0. Otherwise see `replay/poisoned_*`.",
    m.POISONED_POLICY: _POISONED,
    m.POISONED_WORLD: _POISONED,
    m.POISONED_REWARD: _POISONED,
    m.POISONED_RAISED: "0. The actor's log has the traceback, once per start state.",
    m.POISONED_QUARANTINED: "0. Grows by one whenever the turn of a quarantined start state comes.",
    m.QUARANTINED: "0. The actors' logs name them; when it reaches their number the run ends.",
    m.DUPLICATES: "0, or a few after a broken connection: an episode was sent again and recognised.",
    m.DROPPED_LAG_DECISIONS: "As the episodes.",
    m.DROPPED_DEADLINE_DECISIONS: "As the episodes.",
    m.DROPPED_RESUME_DECISIONS: "As the episodes.",
    m.DROPPED_INVALID_DECISIONS: "As the episodes.",
    m.DROPPED_POISONED_DECISIONS: "As the episodes.",
    m.DISK_WAITING: "0. Growing: the disk is full. Nothing is lost and nothing is granted; free space, "
    "or lower --replay.max-gigabytes.",
    m.REPLAY_BYTES: "Levels off near --replay.max-gigabytes. Above it: only used groups are deleted, and "
    "those that wait need more. Fewer videos: --replay.keep-video-every.",
}

_WEIGHTS: Final = {
    m.WEIGHTS_VERSION: "Equals the update's number.",
    m.WEIGHTS_BYTES: "Constant: what actors need of all that is trained. Large: train adapters "
    "(--lora.rank).",
    m.WEIGHTS_SECONDS: "Below `time/update`; the learner does not wait for it, but actors act on older "
    "weights meanwhile. Near --weights.deadline: actors drop out; look at --weights.transport.",
    m.WEIGHTS_MEMBERS: "The number of actors. Fewer: one is restarting or was left behind "
    "(--weights.deadline).",
    m.WEIGHTS_JOINED: "The number of actors that joined (`asyncrl actor`); docs/joining.md.",
    m.WEIGHTS_PULL_SECONDS: "Above the time between two updates: actors skip versions and their lag grows. A "
    "slow network: train adapters (--lora.rank), or raise --replay.max-lag.",
    m.WEIGHTS_PULLED_BYTES: "Grows by `weights/bytes` for each version and joined actor.",
}

_TIME: Final = {
    m.GROUPS_PER_MINUTE: "The pace of the whole run, waiting included. Compare it between --placement "
    "choices.",
    m.LEARNER_WAITING: "Low. High: imagining is the bottleneck; add actors (--placement), or raise "
    "--actor.slots.",
    m.CHECKPOINT_WAITING: "0. Otherwise a checkpoint takes longer to write than the updates between two: "
    "raise --checkpoint-every.",
    m.ACTORS_WAITING: "Low. High: the learner is the bottleneck. Raise --algorithm.micro-batch, add "
    "learner ranks (--placement), or use --learner.precision bf16; a larger --replay.max-lag does not help "
    "for long.",
    m.ACTOR_POLICY: "With world and reward near 1 on one device: the GPU is always busy. The larger of two "
    "devices' shares is the bottleneck (--placement policy=, world=).",
    m.ACTOR_WORLD: "Usually the largest. Far below 1 together with policy and reward although the actors do "
    "not wait: the host is the bottleneck, use --actor.stages 2 or more --actor.slots.",
    m.ACTOR_REWARD: "Small beside the world's.",
    m.ACTOR_HOST: "Hidden behind the devices with --actor.stages 2; with 1 it adds to their time. On the CPU "
    "the models' own time is not in it.",
    m.ACTOR_PARKING: "Well below `time/actors_waiting`, within which most of it happens. Otherwise the waits "
    "are too short to pay: leave --actor.offload out.",
    m.LEARNER_PARKING: "Well below the time that the learner waits. Otherwise leave --learner.offload out.",
    m.UPDATE_SECONDS: "Steady. It is the compute of an update (batch, passes, optimizer step), without "
    "publishing and checkpoints.",
    m.DECISIONS_PER_SECOND: "Steady. Low: raise --algorithm.micro-batch as far as memory allows, or use "
    "--learner.precision bf16. Decisions that can have no gradient, such as those of groups that scored all "
    "the same, are not evaluated and do not count.",
    m.MFU: "Compare it between settings of one machine. Low: passes are too small, raise "
    "--algorithm.micro-batch. Passes without gradient (critic, several steps per batch, KL reference) and "
    "the recomputation of --learner.gradient-checkpointing are not counted, so both lower it.",
    m.RESPAWNS: "0. Otherwise read the first traceback in the log of the process that the console names.",
    m.PEAK_MEMORY: "Levels off after the first checkpoints. It is host memory, of rank 0 and without its "
    "children; steady growth is a leak.",
}

_MEMORY: Final = {
    m.ACTOR_MEMORY: "Levels off within the first episodes. Near the device's size: fewer --actor.slots, "
    "--actor.stages 2, or policy and world on two devices (--placement).",
    m.ACTOR_PARKED: "0 while the actor imagines; else about the weights of policy, world and reward.",
    m.LEARNER_MEMORY: "Levels off after the first update. Near the device's size: a smaller "
    "--algorithm.micro-batch, --learner.gradient-checkpointing, --lora.rank, or more learner ranks.",
    m.LEARNER_PARKED: "About weights, gradient and both moments. 0: the batch was there at once.",
}

_WIRE: Final = {
    m.WIRE_BYTES: "Grows steadily; 0 with --inline.",
    m.SHARED_BYTES: "Most of `wire/bytes`, if arrays of 64 KiB or more are sent. 0: the replay's log says "
    "why; actors on other hosts use the socket.",
    m.UNSHARED: "0, or few: an episode that is sent again counts too. Otherwise the rings are full: raise "
    "--replay.shared-megabytes.",
    m.WIRE_ERRORS: "0. Otherwise something else talks to the replay's port, or processes run different "
    "versions.",
}

_EVAL: Final = {
    m.EVAL_SUCCESS: "The number that counts. Training does not write it, `asyncrl evaluate` measures it; "
    "compare it with `env/success_once` to see what the world model promises too much.",
}

_WAIT: Final = {
    wait.metric: f"At most {wait.deadline}. Ended by {wait.ended_by}. At the deadline: {wait.then}."
    for wait in WAITS.values()
    if wait.metric.name.startswith("wait/")
}

ADVICE: Final[dict[Metric, str]] = {
    **_ENV,
    **_ROLLOUT,
    **_ACTOR,
    **_CRITIC,
    **_TRAIN,
    **_REPLAY,
    **_WEIGHTS,
    **_TIME,
    **_MEMORY,
    **_WIRE,
    **_EVAL,
    **_WAIT,
}
"""Metric -> what is healthy, and what to do otherwise. Flags are written with their dashes."""
