"""What is examined: the settings of a run, and what earlier checks found out for later ones. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.run import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the models of a run. Bytes, unless a field says otherwise."""

    policy: int
    """Policy as its file and an actor hold it."""
    parameters: int
    """Numbers in the policy, also those that are not trained."""
    trained: int
    """Numbers that an update changes."""
    masters: int
    """Policy as the learner holds it: float32 where --learner.precision wants it."""
    whole: int
    """Part of `masters` that is not spread over learner ranks: frozen weights beside adapters."""
    version: int
    """What actors get after an update."""
    dreams: int
    """World and reward model."""
    frame: int
    """One picture."""

    @property
    def training(self) -> int:
        """Gradient and AdamW's two moments, float32."""
        return 12 * self.trained

    @property
    def checkpoint(self) -> int:
        """The policy, and float32 weights and moments of what is trained."""
        return self.policy + 12 * self.trained


@dataclass(kw_only=True)
class Subject:
    """One examination."""

    config: TrainConfig
    where: str = "the defaults"
    """Where the settings come from, for people."""
    sizes: Sizes | None = None
    """Known once the models were loaded."""
