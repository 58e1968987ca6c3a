"""Define what a run reports of its refits (--pace.every)."""

from __future__ import annotations

from asyncrl.observability.metrics import define

ROUND_VERSION = define("""pace/version, last, updates: Policy version that the newest round was about; what
    the other metrics of rounds say is of it. Rises by --pace.every. When it stands still, a round takes
    longer than its updates.""")
TRUE_SUCCESS = define("""pace/true_success, last, share: Success of the round's policy version in true
    episodes, with the run's own sampling. Rises over rounds, with `env/success_once`. When it falls while
    that rises, the world is exploited.""")
TRUE_LOW, TRUE_HIGH = (
    define(f"""pace/true_success_{end}, last, share: {what} end of the 95 % interval (Wilson) of
        `pace/true_success`. Two rates whose intervals lie apart differ; --pace.episodes makes them
        narrower.""")
    for end, what in (("low", "Lower"), ("high", "Upper"))
)
TRUE_EPISODES = define("""pace/true_episodes, last, episodes: True episodes of the run so far. Grows by
    --pace.episodes a round until --pace.budget.""")
GAP = define("""pace/gap, last, share: Successes that the world sees in the same actions, minus the true ones,
    of the episodes held out. Near 0. Growing: the world promises too much; more --pace.world-steps,
    --pace.reward-steps or rounds.""")
VERDICT_WRONG = define("""pace/verdict_wrong, last, share: Held-out episodes that the world before the refit
    judges unlike the truth. Falls or stays. Above a third, training on it teaches mostly errors.""")
VERDICT_WRONG_AFTER = define("""pace/verdict_wrong_after, last, share: The same of the refitted world, on the
    same episodes with the same noise. Below `pace/verdict_wrong`, or the refit is not accepted.""")
FALSE_SUCCESS = define("""pace/false_success, last, share: Of the held-out episodes that the world before the
    refit makes a success, those that are none. Falls or stays. Absent when there is no such success.""")
ACCEPTED = define("""pace/accepted, last, 1: 1: the refitted world judged better, and the actors go on with
    it. 0: it was thrown away. 1 in most rounds. Always 0: fewer steps, a lower --pace.learning-rate and
    --pace.base overfit less.""")
KEYFRAMES = define("""pace/keyframes, last, start states: Key frames that the newest version of the world came
    with: --keyframe-share of the groups begin there. Near --pace.keyframes. Few: outcomes are open at few
    places; more --pace.episodes or --pace.siblings.""")
WORLD_VERSION = define("""world/version, last, version: Newest world that was given to the actors. Rises with
    every accepted refit, and with new key frames.""")
