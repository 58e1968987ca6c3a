"""Shards a policy, or any network of blocks, over the learner ranks: FSDP2.

    all weights are trained    blocks (Llama layers, vision blocks) are units, gathered when they run and
                               freed after it, or after the last pass of a step; small neighbours in a list
                               share a unit, because a small one costs the host as much; the rest
                               (embeddings, norms, heads) is the root
    adapters are               one unit, the root, gathered once per step. Frozen weights are never sharded:
                               gathering them in each pass would cost more than it saves

With several copies (hybrid sharding), every row of ranks has all of the policy: gradients are summed within
rows in each pass, between rows after the last of a step. FSDP2 averages the loss: multiply it by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from asyncrl.policies.interface import EvaluateResult


class RoundedLinear(nn.Linear):
    """Keeps float32 weights, computes in its input's dtype; FSDP would convert gradients back one by one."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]`` in the dtype of the input."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


def round_trained_layers(network: nn.Module) -> bool:
    """Turn the trained layers into `RoundedLinear`; False, without a change, unless all are plain linear."""
    trained = [
        module
        for module in network.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if not all(type(module) is nn.Linear for module in trained):
        return False
    for module in trained:
        module.__class__ = RoundedLinear  # Its parameters stay the same objects, under the same names.
    for module in network.modules():
        layer: Any = module
        if hasattr(layer, "cast_input_dtype_enabled"):  # peft: the input would become float32 instead.
            layer.cast_input_dtype_enabled = False
    return True


Precision = Literal["fp32", "bf16"]
ReshardAfter = Literal["pass", "step"]
UNITS: Final = "asyncrl_units"  # Attribute of a sharded network: its Units


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units that FSDP2 gathers and frees."""

    modules: tuple[FSDPModule, ...]  # The first module of each unit; the root is last
    only_adapters: bool  # the root alone is sharded: ranks exchange the summed gradients of several passes
    stay: bool  # True if gathered weights stay until the last pass of a step
    copies: int  # Rows of ranks


def shard(
    policy: Any,
    device: torch.device,
    precision: Precision,
    *,
    copies: int = 1,
    reshard_after: ReshardAfter = "pass",
) -> Any:
    """Shard a policy over the ranks of the default process group, in place, and return it; see `spread`."""
    spread(policy, policy.blocks(), device, precision, copies=copies, reshard_after=reshard_after)
    if dist.is_initialized():
        _hook_passes(policy)
    return policy


def spread(
    network: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    precision: Precision,
    *,
    cast_inputs: bool = True,
    copies: int = 1,
    reshard_after: ReshardAfter = "pass",
) -> None:
    """Shard a network over the ranks of the default process group, in place; without one it stays whole.

    Args:
        precision: bf16: passes in bfloat16, gradients summed in float32, weights kept in float32.
        reshard_after: When ranks free gathered weights inside `summed_gradient`; adapters stay gathered.
    """
    make_float32_masters(network, precision)
    if not dist.is_initialized():
        return
    mesh = mesh_of_ranks(device, copies)
    frozen = {parameter for parameter in network.parameters() if not parameter.requires_grad}
    compute_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    unsharded = frozen if all(parameter.dtype == compute_dtype for parameter in frozen) else set()
    passes = MixedPrecisionPolicy()
    if precision == "bf16" and not (unsharded and round_trained_layers(network)):
        passes = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
        )
    units = [] if unsharded else join_small(network, blocks)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=passes)
    network.register_forward_hook(_copied)
    # The root is freed after each forward pass too. Otherwise a pass without gradient would leave gathered
    # parameters in the module, where publishing and checkpoints expect the sharded ones.
    fully_shard(network, mesh=mesh, mp_policy=passes, reshard_after_forward=True, ignored_params=unsharded)
    modules: list[Any] = [*(unit[0] for unit in units), network]
    stay = bool(unsharded) or reshard_after == "step"
    kept = Units(modules=tuple(modules), only_adapters=bool(unsharded), stay=stay, copies=copies)
    setattr(network, UNITS, kept)
    if device.type == "cpu":
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot average.


def join_small(network: nn.Module, blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Join neighbours that are children of one module into units as large as the largest block.

    Blocks that do not run one after the other, as those of two towers, must not share a unit.
    """
    blocks = list(blocks)
    parents = {child: parent for parent in network.modules() for child in parent.children()}
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    largest = max(sizes, default=0)
    units, room = list[list[nn.Module]](), 0
    for block, size in zip(blocks, sizes, strict=True):
        if units and parents[units[-1][-1]] is parents[block] and size <= room:
            units[-1].append(block)
        else:
            units.append([block])
            room = largest
        room -= size
    return units


@contextmanager
def summed_gradient(policy: object) -> Iterator[Callable[[], None]]:
    """Sum the gradients of several passes for one step; yields a function to call before the last pass.

    Adapters are gathered once, and their gradients summed over the ranks after the last pass. With several
    units, gradients are summed in each pass: unsharded, they would not fit.
    """
    units: Units | None = getattr(policy, UNITS, None)
    if units is None:
        yield lambda: None
        return

    def pass_is_last(last: bool = True) -> None:
        for module in units.modules:  # Each without recursion, which takes milliseconds.
            if units.only_adapters:
                module.set_requires_gradient_sync(last, recurse=False)
            elif units.copies > 1:
                module.set_requires_all_reduce(last, recurse=False)
            if units.stay:
                module.set_reshard_after_backward(last, recurse=False)

    def free_after_forward(free: bool) -> None:
        for module in units.modules if units.stay else ():
            module.set_reshard_after_forward(free, recurse=False)

    pass_is_last(False)
    free_after_forward(False)
    try:
        yield pass_is_last
    finally:
        pass_is_last()
        free_after_forward(True)
        for module in units.modules if units.stay else ():
            module.reshard()  # After a failure between two passes, too: publishing and checkpoints expect it.


def mesh_of_ranks(device: torch.device, copies: int = 1) -> DeviceMesh:
    """Build the mesh of the default process group's ranks, in `copies` rows; collective."""
    ranks = torch.distributed.get_world_size()
    if copies == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("learner",))
    return init_device_mesh(device.type, (copies, ranks // copies), mesh_dim_names=("copy", "learner"))


def _copied(network: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a copy, because a write into a view would drop FSDP's own hook."""
    return output.clone() if isinstance(output, Tensor) else output


def make_float32_masters(network: nn.Module, precision: Precision) -> None:
    """Convert trained parameters to float32; with fp32, frozen ones too."""
    for parameter in network.parameters():
        if precision == "fp32" or parameter.requires_grad:
            parameter.data = parameter.data.float()


def _hook_passes(policy: Any) -> None:
    evaluate, values = policy.evaluate, policy.values

    def evaluated_fields(self: Any, *args: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        result = evaluate(*args, **more)
        value = None if result.value is None else result.value.clone()
        return result.logprob.clone(), result.entropy.clone(), value

    def evaluate_sharded(self: Any, *args: Any, **more: Any) -> EvaluateResult:
        logprob, entropy, value = self.evaluated_fields(*args, **more)  # type: ignore[operator]
        return EvaluateResult(logprob=logprob, entropy=entropy, value=value)

    _add_forward(policy, "evaluated_fields", evaluated_fields)
    policy.evaluate = MethodType(evaluate_sharded, policy)  # type: ignore[method-assign]
    _add_forward(policy, "values", lambda self, *args, **more: values(*args, **more).clone())


def _add_forward(policy: Any, name: str, method: Callable[..., Any]) -> None:
    setattr(policy, name, MethodType(method, policy))
    register_fsdp_forward_method(policy, name)
