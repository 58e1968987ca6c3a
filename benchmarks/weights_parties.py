"""The two sides of `weights_publish.py`: shapes in; a learner's weights and an actor's process out.

An actor obeys one order after the other that comes through its pipe, and answers each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.weight_export import GatheredWeights
from asyncrl.weights.receiver import WeightReceiver

Kind = Literal["full", "lora"]
Shapes = dict[str, tuple[int, ...]]
LORA_RANK = 32


def shapes_of(kind: Kind, gigabytes: float) -> tuple[Shapes, torch.dtype]:
    """Names and shapes of what an OpenVLA-OFT policy of the published size sends, and the type it travels in.

    Args:
        kind: All parameters in bfloat16, or adapters of rank 32 in every linear layer in float32.
        gigabytes: With less than the true size every tensor has proportionally fewer rows, at least one.
    """
    from asyncrl.policies.lora import add_lora
    from asyncrl.policies.openvla.config import OpenVLAOFTConfig
    from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

    with torch.device("meta"):
        policy = OpenVLAOFTPolicy(OpenVLAOFTConfig.full())
        if kind == "lora":
            add_lora(policy, LORA_RANK, 0.0)
    tensors = policy.acting_tensors()
    scale = min(1.0, gigabytes * 1e9 / sum(t.nbytes for t in tensors.values()))
    dtype = next(iter(tensors.values())).dtype
    return {n: (max(1, int(t.shape[0] * scale)), *t.shape[1:]) for n, t in tensors.items()}, dtype


class Masters:
    """Float32 weights, whole or by rows over the learner ranks as FSDP2 spreads them. A `WeightSource`."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        mesh = init_device_mesh(device.type, (ranks,)) if ranks > 1 else None
        self.tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            meta = torch.empty(shape, device="meta")
            rows = shape[0] if mesh is None else shard_rows(shape[0], ranks, dist.get_rank())
            local = torch.full((rows, *shape[1:]), 0.01, device=device)
            self.tensors[name] = (
                local
                if mesh is None
                else DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=meta.shape, stride=meta.stride()
                )
            )
        types = dict.fromkeys(shapes, dtype)
        self._gathered = GatheredWeights(lambda: self.tensors, types)
        self.manifest = self._gathered.manifest

    def write(self, targets: Mapping[str, Tensor]) -> None:
        self._gathered.write(targets)


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


@dataclass(frozen=True, kw_only=True)
class Paces:
    """Steps of a loop of matrix products."""

    steps: int
    seconds: float
    longest: float
    swaps: int = 0
    swap_longest: float = 0.0
    """Seconds of the thread in one swap of a new version."""

    @property
    def mean(self) -> float:
        return self.seconds / self.steps


class Work:
    """Matrix products on the current stream, waited for one step at a time: about 10 ms of them on a GPU."""

    def __init__(self, device: torch.device) -> None:
        size, self._times = (8192, 7) if device.type == "cuda" else (256, 4)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = torch.randn(size, size, device=device, dtype=dtype)

    def step(self) -> None:
        for _ in range(self._times):
            _ = self._matrix @ self._matrix
        if self._matrix.is_cuda:
            torch.cuda.current_stream(self._matrix.device).synchronize()

    def run(self, seconds: float, between: Callable[[float], None] = lambda now: None) -> Paces:
        began, last, longest, steps = time.monotonic(), time.monotonic(), 0.0, 0
        while last - began < seconds:
            between(last - began)
            self.step()
            now = time.monotonic()
            longest, last, steps = max(longest, now - last), now, steps + 1
        return Paces(steps=steps, seconds=last - began, longest=longest)


def raw_broadcast(device: torch.device, rank: int, size: int, port: int, count: int, times: int) -> float:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    buffer = torch.zeros(count, dtype=torch.uint8, device=device)
    found = []
    for _ in range(times + 2):  # The first ones connect.
        dist.barrier()
        began = time.monotonic()
        dist.broadcast(buffer, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.monotonic() - began)
    dist.destroy_process_group()
    return sorted(found[2:])[times // 2]


def raw_copy(device: torch.device, count: int, times: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target, found = torch.empty_like(source), []
    for _ in range(times + 2):
        torch.cuda.synchronize(device)
        began = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize(device)
        found.append(time.monotonic() - began)
    return sorted(found[2:])[times // 2]


class ActorSide:
    """One actor: a channel and a policy's tensors, driven by orders."""

    def __init__(self, name: str, device: str, deadline: float) -> None:
        self.name, self.device, self.deadline = name, torch.device(device), deadline
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.work = Work(self.device)

    def raw(self, rank: int, size: int, port: int, count: int, times: int) -> float:
        return raw_broadcast(self.device, rank, size, port, count, times)

    def join(self, transport: str, endpoint: str, shapes: Shapes, dtype: torch.dtype) -> int:
        self.tensors = {n: torch.zeros(s, dtype=dtype, device=self.device) for n, s in shapes.items()}
        self.receiver = WeightReceiver(
            transport, endpoint, self.name, self.tensors, self.device, self.deadline
        )
        return os.getpid()

    def swap(self) -> tuple[int, float]:
        began = time.monotonic()
        version = self.receiver.swap_into(self.tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return version, 1e3 * (time.monotonic() - began)

    def work_for(self, seconds: float) -> Paces:
        swaps, longest, held = 0, 0.0, self.receiver.swap_into(self.tensors)

        def swap(now: float) -> None:
            nonlocal swaps, longest, held
            began = time.monotonic()
            if (newest := self.receiver.swap_into(self.tensors)) != held:
                swaps, held, longest = swaps + 1, newest, max(longest, time.monotonic() - began)

        paces = self.work.run(seconds, swap)
        return Paces(
            steps=paces.steps, seconds=paces.seconds, longest=paces.longest, swaps=swaps, swap_longest=longest
        )

    def leave(self) -> None:
        self.receiver.close()
        del self.receiver, self.tensors
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def act(pipe: Connection, name: str, device: str, deadline: float) -> None:
    side = ActorSide(name, device, deadline)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        pipe.send(getattr(side, method)(*arguments))


def learn(pipe: Connection, device: str, rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    on = torch.device(device)
    join_learners(on, rank, ranks, port)
    masters: Masters | None = None
    while (order := pipe.recv()) is not None:
        if order == "publish":
            assert masters is not None
            masters.write({})
        else:
            del masters
            shapes, dtype = order
            masters = Masters(shapes, dtype, on)
            pipe.send(None)
    dist.destroy_process_group()


def join_learners(device: torch.device, rank: int, ranks: int, port: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
    )
