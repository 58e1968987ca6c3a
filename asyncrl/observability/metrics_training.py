"""Metrics of episodes, of the update, of the policy's true success and of audits."""

from __future__ import annotations

from asyncrl.observability.metrics import LAG_RANGES, define

# --- episodes of the batch ---

SUCCESS_ONCE = define("""env/success_once, mean, share: Imagined episodes that succeeded, by the reward model.
    Rises. If `asyncrl evaluate` does not, the policy exploits the models: stop earlier or refit them. With
    --algorithm.filter-groups read `replay/success`.""")
RETURN = define("""env/return, mean, 1: Sum of rewards of an episode. Equals `env/success_once` if the only
    reward is 1 at success.""")
REWARD = define("""env/reward, mean, 1/step: Return divided by the episode's length. Rises when episodes
    succeed more often or sooner. Depends on --actor.max-decisions.""")
STEP_REWARD = define("""env/step_reward, mean, 1/step: Mean reward of all steps of the batch. As `env/reward`;
    long failures count more.""")
TERMINATION_RATE = define("""env/termination_rate, mean, share: Episodes ended by success or by the simulator.
    The rest ran out of time (--actor.max-decisions, --simulator.horizon).""")
EPISODE_LEN = define("""env/episode_len, mean, steps: Steps until success or truncation. Falls as the policy
    gets faster. Near 8 times --actor.max-decisions hardly anything succeeds; raise it if successes need that
    long.""")
REWARDS = define("""rollout/rewards, mean, 1: Mean return of the episodes in the batch. Equals
    `env/return`.""")
REWARD_STD = define("""rollout/reward_std, mean, 1: Standard deviation of all returns of the batch. 0.5 at a
    success of one half, 0 when all returns are equal.""")
ADVANTAGES_MEAN = define("""rollout/advantages_mean, mean, 1: Mean advantage over valid tokens. Near 0. grpo:
    slightly below where failures are longer; ppo: far from 0 only without --critic.normalize-advantages.""")
ADVANTAGES_MAX = define("""rollout/advantages_max, max, 1: Largest advantage. grpo: largest when one sibling
    of many succeeds, 0 if no group differs (`replay/signal_groups`). ppo: very large if the critic is far off
    for a few decisions.""")
ADVANTAGES_MIN = define("""rollout/advantages_min, min, 1: Smallest advantage. Lowest when one sibling of many
    fails.""")
RETURNS_MEAN = define("""rollout/returns_mean, mean, 1: Mean value target; only with a critic. Unlike
    `env/return` discounted (--critic.gamma) and per decision.""")
VALUES_MEAN = define("""rollout/values_mean, mean, 1: Mean value before the update; only with a critic.
    Follows `rollout/returns_mean`; else raise --critic.learning-rate or --critic.warmup-updates.""")

# --- the update ---

LOSS = define("""train/loss, mean, 1: Minimised loss. Policy loss, half of the value loss, entropy and KL
    terms; it has no target.""")
POLICY_LOSS = define("""train/actor/policy_loss, mean, 1: Clipped policy objective, negated. Need not fall: it
    depends on advantages and lag.""")
ENTROPY_LOSS = define("""train/entropy_loss, mean, nats: Entropy of the action-token distribution, per token.
    At most log 256 = 5.55; falls slowly. Collapsing: raise --algorithm.entropy-coef or --algorithm.clip-high,
    or lower --optimizer.learning-rate. Climbing: lower --algorithm.entropy-coef.""")
APPROX_KL = define("""train/actor/approx_kl, mean, nats: KL(before || after) the update per token, k3. Small,
    positive and steady. Rising: lower --optimizer.learning-rate or --algorithm.epochs; 0: nothing is learned.
    RLinf's is k1, can be negative and is up to 7-fold too large at token level. With one step per update it
    is computed on one decision in 32; with n steps it omits the last, so it is about (1 - 1/n)^2 of the
    whole.""")
CLIP_FRACTION = define("""train/actor/clip_fraction, mean, share: Valid units whose gradient the clip removed.
    Small; 0 with one epoch and one minibatch, unless --correction.kind is naive. Large: lower
    --optimizer.learning-rate, --algorithm.epochs or --replay.max-lag. RLinf's is up to 7-fold too large at
    token level.""")
CLIPPED_RATIO = define("""train/actor/clipped_ratio, mean, 1: Mean probability ratio after clipping. Near 1,
    between 1 - --algorithm.clip-low and 1 + --algorithm.clip-high.""")
GRAD_NORM = define("""train/actor/grad_norm, max, 1: Gradient norm before clipping. Steady; with AdamW it may
    exceed --optimizer.max-grad-norm. 0: no group differs (`replay/signal_groups`). Spikes: lower
    --optimizer.learning-rate or --replay.max-lag. Absent if every step was skipped.""")
LEARNING_RATE = define("""train/actor/lr, last, 1: Learning rate of this update. Set by
    --optimizer.learning-rate, --optimizer.warmup-updates and --optimizer.schedule.""")
MISMATCH_KL = define("""train/actor/mismatch_kl, mean, nats: KL(behaviour || learner's) per token, before the
    update, k3. About 0 at lag 0, and grows slowly with the lag. Large at lag 0: actor and learner compute
    differently (precision, adapters, device); otherwise lower --replay.max-lag or --optimizer.learning-rate.
    A jump is often one token: x nats off, at most 20, it adds e^x to the sum.""")
IMPORTANCE_MEAN = define("""train/actor/importance_mean, mean, 1: Mean importance weight after truncation;
    only with --correction.kind tis, mis or decoupled. Slightly below 1. Far below: lower
    --replay.max-lag.""")
IMPORTANCE_MAX = define("""train/actor/importance_max, max, 1: Largest importance weight before truncation.
    Close to 1 at lag 0. --correction.max-weight bounds it; on decision and episode level try
    --correction.geometric.""")
OUTSIDE_TRUST_REGION = define("""train/actor/outside_trust_region, mean, share: Valid units outside the trust
    region. A few percent at most; 0 at lag 0 with one step per batch. More: lower --replay.max-lag or
    --optimizer.learning-rate, or widen --correction.trust-region.""")
MISMATCH_KL_AT_LAG, RATIO_AT_LAG, CLIPPED_AT_LAG = (
    [
        define(f"train/actor/{name}_lag_{lags.name}, mean, {unit}: {meaning} {lags.text}. {advice}")
        for lags in LAG_RANGES
    ]
    for name, unit, meaning, advice in (
        (
            "mismatch_kl",
            "nat",
            "As `train/actor/mismatch_kl`, of decisions with a lag of",
            "Rises with the lag; its slope shows up to which lag samples are of use.",
        ),
        (
            "importance_ratio",
            "1",
            "Mean ratio of a unit's probability to that with which it was sampled, with a lag of",
            "Near 1: its expectation is 1. Far away: a few samples dominate.",
        ),
        (
            "clipped",
            "share",
            "Units that the clip or the trust region limits, with a lag of",
            "Rises with the lag. Where most is clipped, these samples teach little: lower --replay.max-lag.",
        ),
    )
)
"""One metric for each of `LAG_RANGES`."""
IMPORTANCE_CAPPED = define("""train/actor/importance_capped, mean, share: Valid units whose weight a limit
    changed. A few percent. More: lower --replay.max-lag or --optimizer.learning-rate; a higher
    --correction.max-weight trades bias for variance.""")
ESS = define("""train/actor/effective_sample_size, mean, share: (sum r)^2 / (n sum r^2) of the untruncated
    ratios learner's / behaviour, at the correction's level. Near 1. Far below: lower --replay.max-lag, or use
    a finer --correction.level. The best sign of harmful staleness.""")
IMPORTANCE_ESS = define("""train/actor/importance_ess, mean, share: Effective sample size of the weights used.
    With tis usually above `train/actor/effective_sample_size`; mis and decoupled drop units. Far below 1:
    lower --replay.max-lag.""")
DUAL_CLIPPED = define("""train/actor/dual_clip_fraction, mean, share: Valid units whose gradient the dual clip
    removed. Small. Large: bad actions became likelier; lower --optimizer.learning-rate or
    --replay.max-lag.""")
RATIO = define("""train/actor/ratio, mean, 1: Mean probability ratio current / proximal. Near 1; a drift means
    a large `train/actor/approx_kl`. With --correction.kind naive it contains the lag.""")
KL_REFERENCE = define("""train/actor/kl_reference, mean, nats: KL(current || reference) per token, k2 (beyond
    20 nats its tangent); only with --algorithm.kl-coef above 0. Grows slowly from 0. Growing without gain in
    true success: raise --algorithm.kl-coef.""")
VALUE_LOSS = define("""train/critic/value_loss, mean, 1: Value loss. Falls, then follows the spread of the
    returns. Growing: lower --critic.learning-rate.""")
VALUE_CLIP_RATIO = define("""train/critic/value_clip_ratio, mean, share: Values that the clip cut. 0 without
    --critic.value-clip. Large: the clip slows the critic; raise or drop it. RLinf's is always 0.""")
EXPLAINED_VARIANCE = define("""train/critic/explained_variance, mean, share: 1 - Var(return - value) /
    Var(return). Rises from about 0 towards 1. Below 0: change --critic.warmup-updates or
    --critic.learning-rate. Absent if all targets are equal.""")
CRITIC_GRAD_NORM = define("""train/critic/grad_norm, max, 1: Gradient norm of the value head before clipping
    (--optimizer.max-grad-norm). Steady. Spikes: lower --critic.learning-rate or --critic.huber.""")
CRITIC_LEARNING_RATE = define("""train/critic/lr, last, 1: Learning rate of the value head.
    --critic.learning-rate with the policy's warm-up and schedule.""")
BAD_UPDATES = define("""train/bad_updates, last, updates: Updates skipped because the gradient was not finite.
    0. Growing: lower --optimizer.learning-rate; three in a row end the run.""")

# --- the truth ---

EVAL_SUCCESS = define("""eval/success_once, mean, share: Success rate in the true simulator. Far below
    `env/success_once`: the world model promises too much. Written by --evaluate-every, at the measured
    update.""")
EVAL_LOW = define("""eval/success_low, last, share: Lower end of the 95 % interval (Wilson) of
    `eval/success_once`. Two rates whose intervals lie apart differ.""")
EVAL_HIGH = define("""eval/success_high, last, share: Upper end of the interval. As `eval/success_low`.""")
EVAL_VERSION = define("""eval/version, last, updates: Policy version of the console's true success. Only on
    the console.""")
EVAL_EPISODES = define("""eval/episodes, last, episodes: Episodes of the evaluation. As requested.""")
EVAL_STEPS = define("""eval/steps, last, steps: Mean steps to success of the successful episodes. Falls as the
    policy gets faster.""")
