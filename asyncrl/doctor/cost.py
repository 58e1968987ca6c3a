"""Predict how long decisions and updates take, from sizes, settings and a device's rates. Pure.

    seconds = FLOPs / (burst rate of the device * share of it that the network reaches)

`work` says what is computed (`policies/openvla/work.py`, `worlds/work.py`), `rates` how fast. Episodes are of
full length, every decision has a gradient, and nobody waits for anything else: neither the host nor the
replay, the network or simulators, unless said. docs/doctor.md says how far that holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from asyncrl.actors.pipeline import split_slots
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.gpus import rank_needs
from asyncrl.doctor.rates import (
    FLOAT8,
    FLOAT32,
    PASS_SECONDS,
    SHARED,
    SHARES,
    STEP_SECONDS,
    TWO_STAGES,
    DeviceRate,
)
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import Placement
from asyncrl.learner.recipe import Recipe, build_recipe
from asyncrl.learner.update_metrics import reads_movement_in_passes, rows_of_movement
from asyncrl.worlds.work import Stage, WorldWork

DEVICES_PER_HOST: Final = 8
_OPTIMIZER_BYTES: Final = 32
"""Read and written of every trained number: weight, gradient and two moments, and the gradient's norm."""


@dataclass(frozen=True, kw_only=True)
class ActorCost:
    """Seconds of one slot's decision, while all slots of an actor decide together."""

    policy: float
    world: float
    """0 in a simulator."""
    opening: float
    """Of the episode's beginning, spread over its decisions."""

    @property
    def decision(self) -> float:
        """All of it, one after the other."""
        return self.policy + self.world + self.opening


@dataclass(frozen=True, kw_only=True)
class LearnerCost:
    """Seconds of one update, on every learner rank."""

    before: float
    """Passes over the batch before the first step."""
    passes: float
    """Forward and backward, with what gradient checkpointing computes again, and the reference's passes."""
    after: float
    """Reading how far the policy moved."""
    steps: float
    """Optimizer steps, and what else each of them takes."""
    flops: float
    """Of the model's passes that count in `time/mfu`, of all ranks."""

    @property
    def update(self) -> float:
        """All of it."""
        return self.before + self.passes + self.after + self.steps


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a run goes with a placement on devices of one kind."""

    decisions: int
    """Of an update."""
    chunk: int
    """Steps of a decision."""
    groups: int
    """Of an update."""
    actor: ActorCost
    learner: LearnerCost
    batch: float
    """Seconds in which the actors imagine an update's groups, were they alone on their devices."""
    seconds: float
    """From one update to the next."""
    bottleneck: Literal["learner", "actors", "both, on one device", "both, in turns"]
    learner_bytes: int
    """Most memory of a device with a learner rank, of whatever else it has too."""
    actor_bytes: int
    """Most memory of another device; 0: there is none."""

    @property
    def steps_per_hour(self) -> float:
        """Steps that are learned from."""
        return self.decisions * self.chunk * 3600 / self.seconds

    @property
    def groups_per_minute(self) -> float:
        """As in `time/groups_per_minute`."""
        return 60 * self.groups / self.seconds

    def fits(self, device: DeviceRate) -> bool:
        """Whether a tenth of the device is left for contexts, libraries and memory in pieces."""
        return max(self.learner_bytes, self.actor_bytes) < 0.9 * device.memory


def actor_cost(config: TrainConfig, work: RunWork, device: DeviceRate) -> ActorCost:
    """Predict the seconds of a decision of an actor with a device for itself."""
    compiled = config.imagination.compile
    rows = max(map(len, split_slots(config.actor.slots, config.actor.pipeline_stages)))
    share = SHARES["policy with adapters" if config.lora.rank else "policy"].of(compiled)
    least = PASS_SECONDS.of(compiled) / rows
    tokens = work.token_passes * least
    return ActorCost(
        policy=max(work.policy / (device.products * share), least) + tokens,
        world=_seconds(work.world, work.world.decision, device, compiled=compiled),
        opening=_seconds(work.world, work.world.opening, device, compiled=False) / work.decisions,
    )


def _seconds(world: WorldWork, stages: tuple[Stage, ...], device: DeviceRate, *, compiled: bool) -> float:
    times = FLOAT32 if world.float32 else 1.0
    return sum(_stage_seconds(stage, times, device, compiled=compiled) for stage in stages)


def _stage_seconds(stage: Stage, times: float, device: DeviceRate, *, compiled: bool) -> float:
    """Predict the seconds of a stage, some of whose products are of 8-bit numbers.

    Args:
        stage: What is computed.
        times: What its other products take, in those of bfloat16 numbers.
        device: Where.
        compiled: Whether the network is.
    """
    counted = times * (stage.flops - stage.float8) + stage.float8 / FLOAT8.of(compiled)
    return stage.calls * counted / (device.products * SHARES[stage.name].of(compiled))


def learner_cost(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, learners: int
) -> LearnerCost:
    """Predict the seconds of an update.

    Ranks divide weights inside a host, and gather them and send gradients while other blocks compute; what
    that takes alone is added, because both use the same multiprocessors and memory. Several hosts add up
    their gradients once in each step.

    Args:
        config: Of the run.
        work: Of the run.
        sizes: Of the models.
        device: Of every learner rank.
        learners: Their number.
    """
    chosen = config.algorithm
    recipe = build_recipe(chosen, config.correction, config.critic)
    rows = decisions_per_update(config, work) / learners
    episodes = chosen.groups_per_update * chosen.group_size / learners
    steps = chosen.epochs * chosen.minibatches
    counted = 2 if config.lora.rank else 3
    passes = counted + config.learner.recomputed + (chosen.kl_coef > 0)
    # What passes with a gradient add are products with the same weights, of 8-bit numbers too.
    compiled = config.learner.compile
    products = work.policy - work.frozen + work.frozen / FLOAT8.of(compiled)
    share = SHARES["learning" if config.lora.rank else "learning all weights"]
    forward = products / (device.products * share.of(compiled))
    gather = _gather_seconds(sizes, device, learners)
    micro = min(chosen.micro_batch, rows / chosen.minibatches)
    seen = forward + gather / micro
    # Of each pass: float32 gradients go out, twice the bytes of the weights.
    once = config.learner.reshard_after == "step"
    exchanged = rows * chosen.epochs / micro * (2 if once else 4) * gather + steps * once * gather
    before = rows * recipe.needs_old_policy_pass + episodes * _final_values(config)
    return LearnerCost(
        before=before * seen,
        passes=rows * chosen.epochs * passes * forward + exchanged,
        after=_read_again(recipe, int(rows)) * seen,
        steps=steps * (STEP_SECONDS + _step_seconds(sizes, device, learners)),
        flops=counted * work.policy * rows * learners * chosen.epochs,
    )


def _gather_seconds(sizes: Sizes, device: DeviceRate, learners: int) -> float:
    """Predict what gathering all bfloat16 weights that are divided over the ranks of a host takes."""
    if learners == 1 or sizes.unsharded:
        return 0.0
    per_host = min(learners, DEVICES_PER_HOST)
    return sizes.policy * (per_host - 1) / per_host / device.links


def _read_again(recipe: Recipe, rows: int) -> int:
    """Count the decisions that are evaluated after the only step, to read how far the policy moved."""
    if reads_movement_in_passes(recipe):
        return 0
    return rows_of_movement(rows, recipe.algorithm.micro_batch)


def _final_values(config: TrainConfig) -> bool:
    return config.algorithm.kind == "ppo" and config.critic.truncation == "bootstrap"


def _step_seconds(sizes: Sizes, device: DeviceRate, learners: int) -> float:
    """Predict what grows with the weights: AdamW, and the sum of gradients over hosts."""
    per_host, hosts = min(learners, DEVICES_PER_HOST), -(-learners // DEVICES_PER_HOST)
    own = sizes.trained / per_host
    summed = 2 * 4 * own * (hosts - 1) / hosts / device.network
    return _OPTIMIZER_BYTES * own / device.bandwidth + summed


def decisions_per_update(config: TrainConfig, work: RunWork) -> int:
    """Count the decisions of an update, of episodes of full length."""
    return config.algorithm.groups_per_update * config.algorithm.group_size * work.decisions


def predict(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement
) -> Prediction:
    """Predict how a run goes.

    Args:
        config: Of the run; its --placement is not looked at.
        work: What it computes.
        sizes: Of its models.
        device: Every rank has one of its own.
        placement: Who does what; at least one actor.
    """
    actor = actor_cost(config, work, device)
    learner = learner_cost(config, work, sizes, device, len(placement.learners))
    decisions = decisions_per_update(config, work)
    each = decisions / len(placement.actors)
    world = actor.world + actor.opening
    busy = dict.fromkeys(placement.actors, each * actor.decision)
    for policy, other in placement.worlds:
        busy[policy], busy[other] = each * actor.policy, each * world
    pipelined = placement.worlds and config.actor.pipeline_stages > 1
    batch = TWO_STAGES * max(busy.values()) if pipelined else each * actor.decision
    shared = [on for rank, on in busy.items() if rank in placement.learners]
    both = max((max(learner.update, on) + SHARED * min(learner.update, on) for on in shared), default=0.0)
    if config.synchronous:
        seconds, bottleneck = learner.update + batch, "both, in turns"
    elif both >= max(learner.update, batch):
        seconds, bottleneck = both, "both, on one device"
    else:
        seconds = max(learner.update, batch)
        bottleneck = "learner" if learner.update >= batch else "actors"
    needs = {rank: rank_needs(config, sizes, placement, rank) for rank in placement.ranks}
    others = [nbytes for rank, nbytes in needs.items() if rank not in placement.learners]
    return Prediction(
        decisions=decisions,
        chunk=work.chunk,
        groups=config.algorithm.groups_per_update,
        actor=actor,
        learner=learner,
        batch=batch,
        seconds=seconds,
        bottleneck=bottleneck,
        learner_bytes=max(needs[rank] for rank in placement.learners),
        actor_bytes=max(others, default=0),
    )
