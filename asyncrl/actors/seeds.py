"""All random numbers of an imagined episode follow from the run's seed, the group, member and decision.

So an episode does not depend on the slot, the actor or the neighbours it was imagined with.
"""

import numpy as np

_POLICY_STREAM = 0x5EED


def _hash(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 2)


def episode_seed(run_seed: int, group: int, member: int) -> int:
    """Seed of one episode, in ``[0, 2**62)``."""
    return _hash(run_seed, group, member)


def noise_seed(episode: int, decision: int) -> int:
    """Seed of the world model's noise at one decision, in ``[0, 2**62)``."""
    return _hash(episode, decision)


def sampling_seed(noise: int) -> int:
    """Seed of the policy's token sampling at the decision whose world noise is `noise`."""
    return _hash(noise, _POLICY_STREAM)
