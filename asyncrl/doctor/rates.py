"""What devices can do, and how much of it each network was seen to use. No torch.

Every share is one of docs/measurements/policy_speed.md or world_speed.md, of an H200: of the rate of bfloat16
matrix products that the device reaches for a hundredth of a second (*burst*). Networks without a share of
their own have that of the one they resemble, and the comment beside them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class DeviceRate:
    """One kind of GPU."""

    name: str
    memory: float
    """Bytes."""
    products: float
    """FLOP/s of bfloat16 matrix products (8192 x 8192) in a burst."""
    bandwidth: float
    """Bytes per second of its memory, by data sheet."""
    links: float
    """Bytes per second that a broadcast inside a host reaches."""
    network: float = 50e9
    """Bytes per second of the device's own share of the network between hosts: 400 Gbit/s by data sheet."""


H200: Final = DeviceRate(name="H200", memory=141e9, products=796e12, bandwidth=4.8e12, links=364e9)
"""Burst: the mean of 793 and 799 measured. Links: 15.0 GB to three others in 41.2 ms."""
H100: Final = DeviceRate(name="H100", memory=80e9, products=796e12, bandwidth=3.35e12, links=364e9)
"""The same chip with less and slower memory, and the same burst: 788, 793 and 796 measured."""
KNOWN: Final[Mapping[str, DeviceRate]] = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
"""By the names that CUDA gives them."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of a device's burst rate."""

    eager: float
    compiled: float

    def of(self, compiled: bool) -> float:
        """Return the one that holds."""
        return self.compiled if compiled else self.eager


FLOAT8: Final = Share(eager=0.71, compiled=1.38)
"""Linear layers with 8-bit products in the time of one with bfloat16 ones, rounding included. Compiled,
between Wan's denoiser, 257.6 ms instead of 337.5 (1.31), and a learner's passes, 658.4 instead of 949.2
(1.44, H100). Eager: the passes 2133.3 instead of 1503.5; a denoiser was not timed."""
FLOAT32: Final = 4.7
"""Times that a world takes in float32 what it takes in bfloat16: the second to the last decision of a run's
first batch, OpenSora at the published size, 251 s instead of 53 (H100). Other worlds were not timed."""
SHARES: Final[Mapping[str, Share]] = {
    "policy": Share(eager=0.60, compiled=0.768),
    # Float32 adapters beside every layer; runs in bfloat16 have bfloat16 ones, which were not timed. Eager:
    # slower by the same factor.
    "policy with adapters": Share(eager=0.40, compiled=0.517),
    "wan encode": Share(eager=0.243, compiled=0.541),
    "wan denoise": Share(eager=0.468, compiled=0.682),
    "wan decode": Share(eager=0.398, compiled=0.760),
    # Not timed alone: as the encoder. It takes 1 % of a decision.
    "wan tiny decode": Share(eager=0.243, compiled=0.541),
    # Of the sustained rate 28 and 57 %, 26 and 62, 34 and 47; that is 0.85 of the burst.
    "opensora denoise": Share(eager=0.24, compiled=0.48),
    "frame decode": Share(eager=0.22, compiled=0.52),
    "evac denoise": Share(eager=0.29, compiled=0.40),
    # Not timed alone: as the decoder and the UNet beside them, at most a fiftieth of a decision.
    "frame encode": Share(eager=0.22, compiled=0.52),
    "evac conditions": Share(eager=0.29, compiled=0.29),
    # Checkpointed passes with adapters, what is computed again counted. Compiled: 192 passes of a decision in
    # 1.94 s alone, 2.00 s in an update (H100). Eager: 96 in 1.55 s.
    "learning": Share(eager=0.39, compiled=0.62),
    # Of two ranks, 416 passes of a decision each in 3.76 s and 936 in 8.19 s, less what their exchanges are
    # reckoned with. Eager: not timed, as with adapters.
    "learning all weights": Share(eager=0.39, compiled=0.73),
}
PASS_SECONDS: Final = Share(eager=0.0385, compiled=0.0115)
"""Seconds (no shares) that a pass of the policy takes at least: those of a single row."""
STEP_SECONDS: Final = 0.23
"""Of an optimizer step, however many decisions it has: 2.27 s of an update of 64 decisions, compiled, less
2.00 s for its passes and the 0.04 s that the reading of how far the policy moved is reckoned with (H100)."""
TWO_STAGES: Final = 1.14
"""Times that two stages on two devices take what the busier device does alone: 483,627 steps an hour of 16
slots with the policy on the learner's device (H200) where 549,577 would follow from the world's time."""
SHARED: Final = 0.87
"""What the shorter of a learner's and an actor's times on one device adds to the longer one: 7.4 s where they
take 4.0 and 3.9 alone."""
