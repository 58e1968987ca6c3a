"""Define what a run reports of its guard, where successes are imagined again (--guard.kind second)."""

from __future__ import annotations

from asyncrl.observability.metrics import define

WEIGHT_MEAN = define("""guard/weight_mean, mean, 1: How much an episode of the batch counts, from 0 to 1,
    mean; with --guard.kind second only. Near 1. What lacks is imagined and not learned from: the share of
    successes (`env/success_once`) times `guard/disagree`.""")
DISAGREE = define("""guard/disagree, mean, share: Of the successes of the batch, which were imagined again,
    those that were none the second time. Absent when there is no success. Constant or falling. Rising while
    `env/success_once` rises: the policy finds what the world draws by chance; refits (--pace.every), key
    frames (--keyframe-share) or a stop are due. Near 0 the guard finds nothing: errors that every draw makes
    need another network (--guard.world).""")
