"""Define what a run reports of its episodes, of the update and of the policy's true success."""

from __future__ import annotations

from asyncrl.observability.metrics import LAG_RANGES, Reduction, define

SUCCESS_ONCE = define(
    "env/success_once",
    Reduction.MEAN,
    "share",
    "Imagined episodes that succeeded, by the reward model.",
    "Rises over updates. When it rises and `asyncrl evaluate` does not, the policy exploits the world or "
    "reward model: stop earlier or refit them. With --algorithm.filter-groups it is that of the groups that "
    "were kept: read `replay/success` instead.",
)
RETURN = define(
    "env/return",
    Reduction.MEAN,
    "1",
    "Sum of rewards of an episode.",
    "Equals `env/success_once` where the only reward is 1 at the success.",
)
REWARD = define(
    "env/reward",
    Reduction.MEAN,
    "1/step",
    "Return divided by the episode's length.",
    "Rises when episodes succeed more often or sooner. Runs of different --actor.max-decisions cannot be "
    "compared by it.",
)
STEP_REWARD = define(
    "env/step_reward",
    Reduction.MEAN,
    "1/step",
    "Rewards of all steps of the batch divided by their number.",
    "Rises as `env/reward` does. There every episode counts alike, here every step, so long failures count "
    "more.",
)
TERMINATION_RATE = define(
    "env/termination_rate",
    Reduction.MEAN,
    "share",
    "Episodes that ended by themselves: by success, or because the simulator said so.",
    "Equals `env/success_once` where only success ends an episode. Above it episodes fail for good, such as "
    "by a fall; 1 less it is the share that ran out of time (--actor.max-decisions, --simulator.horizon).",
)
EPISODE_LEN = define(
    "env/episode_len",
    Reduction.MEAN,
    "steps",
    "Steps until success or truncation.",
    "Falls as the policy gets faster. Near 8 times --actor.max-decisions hardly anything succeeds; when even "
    "successes need nearly that much, raise it.",
)
REWARDS = define(
    "rollout/rewards",
    Reduction.MEAN,
    "1",
    "Mean return of the episodes in the batch.",
    "The same number as `env/return`.",
)
REWARD_STD = define(
    "rollout/reward_std",
    Reduction.MEAN,
    "1",
    "Standard deviation of the returns of the batch's episodes, over all of them.",
    "0.5 at a success of one half where the only reward is 1 at the success, 0 when all episodes score the "
    "same. It mixes groups: whether siblings differ, which is what grpo learns from, says "
    "`replay/signal_groups`.",
)
ADVANTAGES_MEAN = define(
    "rollout/advantages_mean",
    Reduction.MEAN,
    "1",
    "Mean advantage over valid tokens.",
    "Near 0. Not exactly: grpo centres over episodes, and where failures are longer they have more tokens, "
    "so the mean is below 0. With ppo it is far from 0 only without --critic.normalize-advantages.",
)
ADVANTAGES_MAX = define(
    "rollout/advantages_max",
    Reduction.MAX,
    "1",
    "Largest advantage.",
    "grpo: largest when one sibling of many succeeds; always 0 means that no group differs "
    "(`replay/signal_groups`). ppo: very large means that the critic is far off for a few decisions.",
)
ADVANTAGES_MIN = define(
    "rollout/advantages_min",
    Reduction.MIN,
    "1",
    "Smallest advantage.",
    "The mirror image: lowest when one sibling of many fails.",
)
LOSS = define(
    "train/loss",
    Reduction.MEAN,
    "1",
    "What was minimised.",
    "Policy loss, --critic.coef times the value loss, and what entropy and KL add. Has no target: look at "
    "its parts.",
)
POLICY_LOSS = define(
    "train/actor/policy_loss",
    Reduction.MEAN,
    "1",
    "Clipped policy objective, negated.",
    "Has no target and need not fall: its size follows advantages and lag. Look at `env/success_once` and "
    "`train/actor/approx_kl`.",
)
ENTROPY_LOSS = define(
    "train/entropy_loss",
    Reduction.MEAN,
    "nats",
    "Entropy of the action-token distribution, per token.",
    "Not a loss but the entropy itself, at most log 256 = 5.55. Falls slowly. When it collapses, siblings "
    "become equal: raise --algorithm.entropy-coef or --algorithm.clip-high, or lower "
    "--optimizer.learning-rate. When it climbs, lower --algorithm.entropy-coef.",
)
APPROX_KL = define(
    "train/actor/approx_kl",
    Reduction.MEAN,
    "nats",
    "KL(before || after) the update per token, k3.",
    "Small, positive and steady. A rise from update to update means steps that are too large: lower "
    "--optimizer.learning-rate or --algorithm.epochs; 0 means that nothing is learned. RLinf's is k1, "
    "-mean(log ratio), which can be negative, and at token level it is divided by a mask that is too narrow "
    "(up to 7-fold too large); ours is k3 over valid tokens, never negative. With one step per update it "
    "compares before with after it, on one decision in 32. With n steps it is read in the passes of the last "
    "one, so this step is not in it: about (1 - 1/n)^2 of the whole if all are alike.",
)
CLIP_FRACTION = define(
    "train/actor/clip_fraction",
    Reduction.MEAN,
    "share",
    "Valid units whose gradient the clip removed.",
    "0 with one epoch and one minibatch (at the only step the ratio is 1), unless --correction.kind is naive "
    "or --correction.proximal log_linear. Otherwise small; when much is clipped, lower "
    "--optimizer.learning-rate, --algorithm.epochs or --replay.max-lag. RLinf's is up to 7-fold too large at "
    "token level, for the reason given at approx_kl; ours is a share of valid units (--algorithm.level).",
)
CLIPPED_RATIO = define(
    "train/actor/clipped_ratio",
    Reduction.MEAN,
    "1",
    "Mean probability ratio after clipping.",
    "Near 1; between 1 - --algorithm.clip-low and 1 + --algorithm.clip-high by construction.",
)
GRAD_NORM = define(
    "train/actor/grad_norm",
    Reduction.MAX,
    "1",
    "Gradient norm before clipping.",
    "Steady; of several steps the largest counts. Always above --optimizer.max-grad-norm is no harm: AdamW "
    "hardly depends on the scale. 0 means that no group differs (`replay/signal_groups`). Spikes: lower "
    "--optimizer.learning-rate or --replay.max-lag. Absent when every step was skipped "
    "(`train/bad_updates`).",
)
LEARNING_RATE = define(
    "train/actor/lr",
    Reduction.LAST,
    "1",
    "Learning rate of this update.",
    "Follows --optimizer.learning-rate, --optimizer.warmup-updates and --optimizer.schedule.",
)
MISMATCH_KL = define(
    "train/actor/mismatch_kl",
    Reduction.MEAN,
    "nats",
    "KL(behaviour || learner's) per token, before the update, k3.",
    "About 0 at lag 0, and grows slowly with the lag. Large at lag 0: actor and learner compute differently "
    "(precision, adapters, another device). Large otherwise: lower --replay.max-lag or "
    "--optimizer.learning-rate.",
)
IMPORTANCE_MEAN = define(
    "train/actor/importance_mean",
    Reduction.MEAN,
    "1",
    "Mean importance weight after truncation.",
    "Near 1, below it by what the limits cut. Far below 1: much of the batch counts little, lower "
    "--replay.max-lag. Only with --correction.kind tis, mis or decoupled.",
)
IMPORTANCE_MAX = define(
    "train/actor/importance_max",
    Reduction.MAX,
    "1",
    "Largest importance weight before truncation.",
    "Close to 1 at lag 0. Large values are what --correction.max-weight is for; on decision and episode "
    "level they multiply over tokens, so try --correction.geometric there.",
)
OUTSIDE_TRUST_REGION = define(
    "train/actor/outside_trust_region",
    Reduction.MEAN,
    "share",
    "Valid units left out because the policy moved too far from the one that sampled them.",
    "A few percent at most, and 0 at lag 0 with one step per batch. More: lower --replay.max-lag or "
    "--optimizer.learning-rate, or widen --correction.trust-region.",
)
MISMATCH_KL_AT_LAG, RATIO_AT_LAG, CLIPPED_AT_LAG = (
    [
        define(f"train/actor/{name}_lag_{lags.name}", Reduction.MEAN, unit, f"{what} {lags.text}.", advice)
        for lags in LAG_RANGES
    ]
    for name, unit, what, advice in (
        (
            "mismatch_kl",
            "nat",
            "As `train/actor/mismatch_kl`, of decisions with a lag of",
            "Rises with the lag; how fast tells how far back samples are still of use.",
        ),
        (
            "importance_ratio",
            "1",
            "Mean ratio of a unit's probability to that with which it was sampled, with a lag of",
            "Near 1: its expectation is 1. Far away: a few samples decide.",
        ),
        (
            "clipped",
            "share",
            "Units that the clip or the trust region left without gradient, with a lag of",
            "Rises with the lag. Where most is clipped, these samples teach little: lower --replay.max-lag.",
        ),
    )
)
"""One metric for each of `LAG_RANGES`."""
IMPORTANCE_CAPPED = define(
    "train/actor/importance_capped",
    Reduction.MEAN,
    "share",
    "Valid units whose weight a limit changed.",
    "A few percent. More: the lag is too large for the pace, lower --replay.max-lag or "
    "--optimizer.learning-rate; raising --correction.max-weight trades the bias for variance.",
)
ESS = define(
    "train/actor/effective_sample_size",
    Reduction.MEAN,
    "share",
    "(sum r)^2 / (n sum r^2) of the ratios learner's / behaviour, at the correction's level, untruncated.",
    "Near 1: all samples count about the same. Far below: a few samples dominate, lower --replay.max-lag, or "
    "use a finer --correction.level. The truest sign of harmful staleness, whatever the correction cuts.",
)
IMPORTANCE_ESS = define(
    "train/actor/importance_ess",
    Reduction.MEAN,
    "share",
    "The same of the importance weights in use.",
    "With tis usually above `train/actor/effective_sample_size`, because the cap evens the weights out; with "
    "mis and decoupled dropped units lower it. Far below 1: lower --replay.max-lag.",
)
VETOED = define(
    "train/actor/vetoed",
    Reduction.MEAN,
    "share",
    "Units whose episode was vetoed.",
    "0, or small: only with --correction.veto. Whole episodes are lost to it: lower the threshold, "
    "--replay.max-lag or --optimizer.learning-rate when it grows.",
)
DUAL_CLIPPED = define(
    "train/actor/dual_clip_fraction",
    Reduction.MEAN,
    "share",
    "Valid units whose gradient the dual clip removed.",
    "0, or small: only with --algorithm.dual-clip. A large share means that bad actions became far more "
    "likely: lower --optimizer.learning-rate or --replay.max-lag.",
)
RATIO = define(
    "train/actor/ratio",
    Reduction.MEAN,
    "1",
    "Mean probability ratio current / proximal.",
    "Near 1, and 1 wherever `train/actor/clip_fraction` must be 0. A drift says the same as a large "
    "`train/actor/approx_kl`; with --correction.kind naive it holds the lag as well.",
)
KL_REFERENCE = define(
    "train/actor/kl_reference",
    Reduction.MEAN,
    "nats",
    "KL(current || reference) per token by --algorithm.kl-estimator.",
    "Grows slowly from 0; with kl-estimator k1 it can be negative. When it grows without gain in true "
    "success, raise --algorithm.kl-coef. Only with a coefficient above 0.",
)
VALUE_LOSS = define(
    "train/critic/value_loss",
    Reduction.MEAN,
    "1",
    "Value loss; only with a critic.",
    "Falls first, then follows how varied the returns are. Growing: lower --critic.learning-rate.",
)
VALUE_CLIP_RATIO = define(
    "train/critic/value_clip_ratio",
    Reduction.MEAN,
    "share",
    "Values the clip cut; only with a critic.",
    "0 without --critic.value-clip. With it, a large share means that the clip brakes the critic: raise or "
    "drop it. RLinf's is always 0, whatever its clip does; ours is real.",
)
EXPLAINED_VARIANCE = define(
    "train/critic/explained_variance",
    Reduction.MEAN,
    "share",
    "1 - Var(return - value) / Var(return); only with a critic.",
    "Rises from about 0 (no better than the mean) towards 1. Below 0 the critic does harm: train it alone "
    "first with --critic.warmup-updates, or change --critic.learning-rate. Absent when all targets agree.",
)
CRITIC_GRAD_NORM = define(
    "train/critic/grad_norm",
    Reduction.MAX,
    "1",
    "Gradient norm of the value head before clipping.",
    "Steady; clipped at --optimizer.max-grad-norm apart from the policy's. Spikes: lower "
    "--critic.learning-rate or --critic.huber.",
)
CRITIC_LEARNING_RATE = define(
    "train/critic/lr",
    Reduction.LAST,
    "1",
    "Learning rate of the value head.",
    "Follows --critic.learning-rate with the warm-up and schedule of the policy's.",
)
RETURNS_MEAN = define(
    "rollout/returns_mean",
    Reduction.MEAN,
    "1",
    "Mean value target; only with a critic.",
    "What `rollout/values_mean` should follow. Unlike `env/return` it is discounted (--critic.gamma) and "
    "taken at every decision, not only the first.",
)
VALUES_MEAN = define(
    "rollout/values_mean",
    Reduction.MEAN,
    "1",
    "Mean value before the update; only with a critic.",
    "Follows `rollout/returns_mean` within a few updates. When it stays behind, raise --critic.learning-rate "
    "or --critic.warmup-updates.",
)
BAD_UPDATES = define(
    "train/bad_updates",
    Reduction.LAST,
    "updates",
    "Updates skipped because the gradient was not finite.",
    "0. Growing: lower --optimizer.learning-rate; the run stops after --optimizer.max-bad-updates in a row.",
)
EVAL_SUCCESS = define(
    "eval/success_once",
    Reduction.MEAN,
    "share",
    "Success rate in the true simulator.",
    "The number that counts: compare it with `env/success_once` to see what the world model promises too "
    "much. Training writes it with --evaluate-every, at the update that was measured; else "
    "`asyncrl evaluate` does.",
)
EVAL_LOW, EVAL_HIGH = (
    define(
        f"eval/success_{end}",
        Reduction.LAST,
        "share",
        f"{what} end of the 95 % interval (Wilson) of `eval/success_once`.",
        "Two rates whose intervals lie apart differ; more episodes make them narrower.",
    )
    for end, what in (("low", "Lower"), ("high", "Upper"))
)
EVAL_VERSION = define(
    "eval/version",
    Reduction.LAST,
    "updates",
    "Policy version that the console's true success is of.",
    "Only in the console's row: curves and metrics.jsonl have what was measured at that update.",
)
EVAL_EPISODES = define(
    "eval/episodes",
    Reduction.LAST,
    "episodes",
    "Episodes of the evaluation.",
    "As many as were asked for: an episode whose worker is lost is played again.",
)
EVAL_STEPS = define(
    "eval/steps",
    Reduction.LAST,
    "steps",
    "Mean steps to success, over the episodes that succeeded.",
    "Falls as the policy hesitates less. Not comparable between policies that solve different episodes.",
)
