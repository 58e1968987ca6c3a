"""Seeds of an episode, derived from its own numbers only. Runs are reproduced by them: keep the formulas."""

import numpy as np

_POLICY_STREAM = 0x5EED


def _hash(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 2)


def episode_seed(run_seed: int, group: int, member: int) -> int:
    """Return the seed of one imagined episode, in ``[0, 2**62)``."""
    return _hash(run_seed, group, member)


def noise_seed(episode: int, decision: int) -> int:
    """Return the seed of the world model's noise at one decision, in ``[0, 2**62)``."""
    return _hash(episode, decision)


def sampling_seed(noise: int) -> int:
    """Return the seed of the policy's sampling at the decision with this `noise`, in ``[0, 2**62)``."""
    return _hash(noise, _POLICY_STREAM)


def simulated_sampling_seed(simulator: int, decision: int) -> int:
    """Return the seed of the policy's sampling in a simulator that was reset with the seed `simulator`."""
    return (simulator * 1_000_003 + decision * 7919 + 17) % (2**62)


def recorded_noise_seed(fit_seed: int, episode: int, decision: int) -> int:
    """Return the seed of the world's noise while a recorded episode is imagined again, in ``[0, 2**32)``."""
    return int(np.random.SeedSequence([fit_seed, episode, decision]).generate_state(1)[0])
