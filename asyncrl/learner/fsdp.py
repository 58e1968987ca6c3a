"""Spreads a policy, or any network of blocks, over the learner ranks: FSDP2.

    all weights are trained    blocks (Llama layers, vision blocks) are units, gathered when they run and
                               freed after it, or behind the last pass of a step; neighbours in a list share
                               a unit until it is as large as the largest block, because the host needs as
                               long for a small one; the rest (embeddings, norms, heads) is the root
    adapters are               one unit, the root, which stays gathered in all passes of a step. Frozen
                               weights are never sharded: nothing of them changes, and gathering them in each
                               pass would cost more than their room

What is spread becomes DTensors, so the optimizer must be built afterwards. Works on one rank as well: there
it only separates the float32 weights from the bfloat16 passes.

With several copies (hybrid sharding) the ranks are so many rows: a policy is spread over the ranks of a row,
and every row has all of it. Gradients are added up within rows in each pass, between them behind the last
pass of a step.

The loss of every rank is averaged by FSDP2: multiply it by the number of ranks where a sum is meant.

Linear layers that keep float32 weights and compute in the type of what they are given.

FSDP can round what is trained for its passes too, but then it turns the gradient of every weight back into
float32 itself, one by one and in each pass: of a thousand adapters the host is not done with one pass when
the device is. Here that is part of the passes: the compiler sees it, and gradients are added up where they
arise. Numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from asyncrl.policies.interface import EvaluateResult


class RoundedLinear(nn.Linear):
    """Rounds weight and bias to the type of its input, in every pass; their gradients keep their own type."""

    def forward(self, input: Tensor) -> Tensor:
        """Turn ``[..., I]`` of any float dtype into ``[..., O]`` of the same one."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


def round_trained_layers(network: nn.Module) -> bool:
    """Let what is trained of a network be rounded in its layers, in place.

    Returns:
        Whether it could be done: all that is trained belongs to plain linear layers, as adapters do. If not,
        nothing was changed.
    """
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
UNITS: Final = "asyncrl_units"
"""Attribute of a network that was spread: its `Units`."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """What FSDP2 gathers and frees piece by piece, and when."""

    modules: tuple[FSDPModule, ...]
    """Of each unit its first module; the root comes last."""
    only_adapters: bool
    """The root alone is spread: gradients of several passes can be added up before ranks exchange them."""
    stay: bool
    """Gathered weights stay until the last pass of a step."""
    copies: int
    """Rows of ranks; see the module's text."""


def shard(
    policy: Any,
    device: torch.device,
    precision: Precision,
    *,
    copies: int = 1,
    reshard_after: ReshardAfter = "pass",
) -> Any:
    """Spread a policy over the ranks of the default process group, in place. See `spread`."""
    spread(policy, policy.blocks(), device, precision, copies=copies, reshard_after=reshard_after)
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
    """Spread a network over the ranks of the default process group, in place.

    Args:
        device: This rank's; the process group must serve its type.
        precision: bf16: passes in bfloat16, gradients added up in float32, weights kept in float32.
        cast_inputs: Whether passes in bfloat16 round what `network` and `blocks` are given, too.
        reshard_after: When ranks free the weights that they gathered, inside `summed_gradient`; elsewhere and
            by default after each pass of a unit. Adapters stay in any case.
    """
    make_float32_masters(network, precision)
    mesh = mesh_of_ranks(device, copies)
    unsharded = _frozen_and_ready(network, precision)
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
    """Join neighbours that are children of one module until they are as large as the largest block.

    Only these: a unit is gathered for its backward pass when that of its last block begins, so that blocks
    which do not run one after the other, as those of two towers, must not share one; and it is freed once all
    of its blocks ran.

    Returns:
        All of them in their order, in lists with at least one.
    """
    found = list(blocks)
    parents = {child: parent for parent in network.modules() for child in parent.children()}
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in found]
    largest = max(sizes, default=0)
    units, room = list[list[nn.Module]](), 0
    for block, size in zip(found, sizes, strict=True):
        if units and parents[units[-1][-1]] is parents[block] and size <= room:
            units[-1].append(block)
        else:
            units.append([block])
            room = largest
        room -= size
    return units


@contextmanager
def summed_gradient(policy: object) -> Iterator[Callable[[], None]]:
    """Add up the gradients of several passes for one optimizer step, without work in between where it pays.

    Adapters, one small unit, are gathered once and stay whole; their gradients are added up over the ranks
    behind the last pass only. So a pass costs no more than on one rank. Of a policy of several units ranks
    add up gradients in each pass, because whole ones would not fit, and gather weights in each, or once
    (`spread`'s `reshard_after`). Rows of ranks that have a copy each add theirs up behind the last pass.

    Yields:
        To be called before the last of the passes, by all ranks.
    """
    units: Units | None = getattr(policy, UNITS, None)
    if units is None:
        yield lambda: None
        return

    def pass_is_last(last: bool = True) -> None:
        for module in units.modules:  # Each alone: to look for others takes milliseconds.
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
    """Arrange the ranks of the default process group in `copies` rows of equal length; collective."""
    ranks = torch.distributed.get_world_size()
    if copies == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("learner",))
    return init_device_mesh(device.type, (copies, ranks // copies), mesh_dim_names=("copy", "learner"))


def _copied(network: nn.Module, inputs: Any, output: Any) -> Any:
    """Return no view: FSDP's own hook, which comes next, is lost when somebody writes into a view."""
    return output.clone() if isinstance(output, Tensor) else output


def make_float32_masters(network: nn.Module, precision: Precision) -> None:
    """Make what is trained float32, and in fp32 all the rest too; in bf16 frozen weights stay as they are."""
    for parameter in network.parameters():
        if precision == "fp32" or parameter.requires_grad:
            parameter.data = parameter.data.float()


def _frozen_and_ready(network: nn.Module, precision: Precision) -> set[nn.Parameter]:
    """Return the frozen parameters if all have the type that passes compute in; none if one has not."""
    frozen = {parameter for parameter in network.parameters() if not parameter.requires_grad}
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    return frozen if all(parameter.dtype == wanted for parameter in frozen) else set()


def _hook_passes(policy: Any) -> None:
    """Let FSDP gather the root's parameters around `evaluate` and `values`, as it does around `passes`."""
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
