"""Settings of --weights: how new weights reach the actors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import SECONDS, AtLeast, Bounded


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Bounded):
    """How new weights reach the actors."""

    SECTION: ClassVar[str] = "weights."

    transport: str = "auto"
    """Carrier of the weights. auto: nccl when every actor has a GPU of its own, cuda_ipc when some are on the
    first learner's GPU, else shared_memory. Or package.module:Class."""
    between_hosts: Literal["tcp", "nccl"] = "tcp"
    """How weights travel to the other hosts of a run, once to each. tcp: encrypted, fetched in pieces. nccl:
    broadcast together with those of the first host, NOT encrypted: only on a private network. It takes one
    GPU of each host. Actors that join always fetch by tcp."""
    timeout: Annotated[float, AtLeast(1, "a broadcast takes time.", "Use 60.", highest=SECONDS)] = 60.0
    """Seconds after which an actor that does not take part in a broadcast is left behind, and one that joined
    and cannot reach the learner ends."""
    listen: str = ""
    """Address where actors on other hosts fetch the weights, like tcp://10.0.0.5:5556. Empty: the address of
    --replay.listen with a port that the system chooses. It takes the same --replay.keys."""
