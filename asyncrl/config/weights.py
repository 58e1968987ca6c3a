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
    """auto: gloo on CPU, cuda_ipc when learner and actors share one GPU, nccl when each has its own, nccl+ipc
    when some actors are on the first learner's GPU and the others on one each. Or package.module:Class."""
    between_hosts: Literal["tcp", "gloo", "nccl"] = "tcp"
    """How weights travel to the other hosts of a run, once to each. tcp: encrypted, fetched by those who want
    them. gloo, nccl: broadcast to all of them at once, NOT encrypted: only on a network that nobody else is
    on. nccl takes one GPU of each host. Actors that join always fetch by tcp."""
    timeout: Annotated[float, AtLeast(1, "a broadcast takes time.", "Use 60.", highest=SECONDS)] = 60.0
    """Seconds after which an actor that does not take part in a broadcast is left behind, and one that joined
    and cannot reach the learner ends."""
    listen: str = ""
    """Address where actors on other hosts fetch the weights, like tcp://10.0.0.5:5556. Empty: the address of
    --replay.listen with a port that the system chooses. It takes the same --replay.keys."""
