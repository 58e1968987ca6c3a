"""A learner among in-memory ports."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, OptimizerSettings
from asyncrl.errors import SampleTimeout, WeightSyncError
from asyncrl.launch.build import build_update
from asyncrl.learner.learner import Learner, LoopSettings
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.update_metrics import Throughput
from asyncrl.observability import metrics_system as s
from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.interface import BatchDescription
from asyncrl.storage.checkpoint import Checkpoints
from asyncrl.weights.packing import WeightSource, WholeTensors
from support.replay import Clock
from support.table_policy import TablePolicy, groups_of


class SlowPolicy(TablePolicy):
    """Every call takes a second of the clock, and may do something on the way."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.on_evaluate: Callable[[], None] = lambda: None

    def evaluate(self, inputs: Any, sample: Any, sampling: Any, **through: Any) -> Any:
        self.clock.now += 1
        self.on_evaluate()
        return super().evaluate(inputs, sample, sampling, **through)


class MemoryLog:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.rows: dict[int, dict[Metric, float]] = {}

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        self.events.append(f"log {step}")
        self.rows[step] = dict(values)


class MemoryReplay:
    """Group batches decided by the version alone; `seconds_to_fill` of waiting for each of them."""

    def __init__(self, events: list[str], clock: Clock, *, seconds_to_fill: float = 0.0) -> None:
        self.events, self.clock, self.seconds_to_fill = events, clock, seconds_to_fill
        self.timeouts: list[float] = []
        self.still = seconds_to_fill
        self.interrupt = False
        self.fails: Exception | None = None
        self.status_fails: Exception | None = None
        self.filling: Callable[[float], dict[str, int]] = lambda seconds: {}
        """How far the batch is after so many seconds of waiting."""

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        self.timeouts.append(timeout)
        if self.interrupt:
            raise KeyboardInterrupt
        if self.fails is not None:
            raise self.fails
        if self.still > timeout:
            self.clock.now += timeout
            self.still -= timeout
            raise SampleTimeout(
                "The replay holds 1 complete group; 7 were dropped for their lag.",
                **self.filling(self.seconds_to_fill - self.still),
            )
        self.clock.now += self.still
        self.still = self.seconds_to_fill
        self.events.append(f"sample at {version}")
        return BatchDescription(request=str(version), numbers=tuple(range(groups)))

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object]
    ) -> list[list[Episode]]:
        while_waiting()
        version = int(wanted.request)
        batch = groups_of([[3, -1], [-1, 12]], seed=version, versions=(version, version))
        return [batch[number] for number in wanted.numbers]

    def report_version(self, version: int) -> None:
        self.events.append(f"report {version}")

    def status(self) -> dict[Metric, float]:
        if self.status_fails is not None:
            raise self.status_fails
        return {s.GROUPS_READY: 5.0}

    def stop(self) -> None:
        self.events.append("stop")

    def close(self) -> None:
        raise AssertionError("whoever opened the port closes it")


class MemoryPublisher:
    """Keeps a copy of every version."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.published: dict[int, Tensor] = {}
        self.broken = False

    def publish(self, weights: WeightSource, version: int) -> None:
        self.events.append(f"publish {version}")
        (shape,) = (entry.shape for entry in weights.manifest.entries if entry.name == "logits")
        self.published[version] = torch.empty(shape)
        weights.write({"logits": self.published[version]})

    def wait_for_first(
        self, version: int, timeout: float, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        self.events.append(f"first {version} within {timeout:g} s")
        if self.broken:
            raise WeightSyncError("actor-1 did not take version 0")

    def status(self) -> dict[Metric, float]:
        return {s.WEIGHTS_VERSION: float(max(self.published))}

    def close(self) -> None:
        raise AssertionError("whoever opened the publisher closes it")


class Run:
    """A learner with everything around it."""

    def __init__(
        self,
        folder: Path,
        *,
        updates: int = 3,
        every: int = 100,
        batch_timeout: float = 60.0,
        seconds_to_fill: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
        micro_batch: int = 32,
        ranks: LearnerRanks | None = None,
    ) -> None:
        self.events: list[str] = []
        self.clock = Clock()
        self.policy = SlowPolicy(self.clock)
        self.replay = MemoryReplay(self.events, self.clock, seconds_to_fill=seconds_to_fill)
        self.publisher = MemoryPublisher(self.events)
        self.log = MemoryLog(self.events)
        link: Any = dist.new_group(backend="gloo") if ranks is not None else None
        self.learner = Learner(
            build_update(
                TrainConfig(
                    actor=ActorSettings(max_decisions=6),
                    algorithm=AlgorithmSettings(group_size=2, groups_per_update=2, micro_batch=micro_batch),
                    optimizer=OptimizerSettings(learning_rate=0.05),
                ),
                self.policy,
                ranks=ranks,
            ),
            self.replay,
            self.publisher,
            lambda version, values: self.log.write(version, values),
            Checkpoints(folder, keep=10, link=link),
            LoopSettings(
                updates=updates,
                checkpoint_every=every,
                batch_timeout=batch_timeout,
                first_weights_deadline=30.0,
            ),
            throughput=Throughput(self.policy, ranks or LearnerRanks(), micro_batch=32),
            copy_policy=self.copy_policy,
            acting_tensors=lambda: WholeTensors(self.policy.acting_tensors()),
            stop_requested=stop,
            clock=self.clock,
        )

    def copy_policy(self) -> Callable[[Path], None]:
        self.events.append(f"save {self.learner.version}")
        copies = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        return lambda folder: save_file(copies, folder / "model.safetensors")
