"""Faster acting, smaller learning: compilation, CUDA graphs, gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import islice
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncrl.devices.tensors import CudaGraphed
from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import SampledTokens
from asyncrl.policies.interface import Policy, PolicyInputs, SamplingParams

GRAPHS: Final = 64
"""Graphs per code object; beyond the limit (by default 8) the compiler silently runs code uncompiled."""
Choose = Callable[[PolicyInputs, SamplingParams, Tensor | None], SampledTokens]


def compile_blocks(policy: Policy, *, dynamic: bool | None = None) -> None:
    """Compile vision blocks and Llama layers at their first calls; `dynamic` as in `torch.compile`."""
    from torch._dynamo import config  # takes a second to import

    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    for block in policy.blocks():
        block.compile(dynamic=dynamic)


def compile(policy: Any, rows: int, tasks: Sequence[str]) -> Callable[[], None] | None:
    """Compile acting in place; if it is a CUDA graph, return a function to call after weights moved."""
    policy.tokenizer.fix_shape(tasks)
    compile_blocks(policy, dynamic=False)
    choose: Choose = policy.choose
    if policy.device.type == "cuda":
        choose = GraphedChoice(policy.choose)
    policy.choose = FixedShape(choose, rows)
    return choose.forget if isinstance(choose, GraphedChoice) else None


class FixedShape:
    """Calls `choose` at one shape only."""

    def __init__(self, choose: Choose, rows: int) -> None:
        self.choose, self.rows = choose, rows

    def __call__(
        self, inputs: PolicyInputs, sampling: SamplingParams, uniforms_BK: Tensor | None
    ) -> SampledTokens:
        """Call `choose` on the batch padded to `rows`; returns the results of the batch's own rows."""
        live = len(inputs.input_ids)
        if live > self.rows:
            raise ConfigError(
                f"{live} rows are to be decided, but the policy was compiled for {self.rows}. Raise "
                "--actor.slots, or leave --imagination.compile out."
            )

        def filled(tensor: Tensor) -> Tensor:
            if live == self.rows:
                return tensor
            return torch.cat([tensor, tensor[-1:].expand(self.rows - live, *tensor.shape[1:])])

        full = {name: filled(tensor) for name, tensor in _tensors(inputs).items()}
        chosen = self.choose(
            replace(inputs, **full), sampling, None if uniforms_BK is None else filled(uniforms_BK)
        )
        return SampledTokens(*(tensor[:live] for tensor in chosen))


class GraphedChoice:
    """`choose` as a CUDA graph, captured at the first call."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._captured: CudaGraphed | None = None

    def __call__(
        self, inputs: PolicyInputs, sampling: SamplingParams, uniforms_BK: Tensor | None
    ) -> SampledTokens:
        """Choose; the result is overwritten by the next call."""
        given = _tensors(inputs)
        if self._captured is None:
            self._given, self._kind = tuple(given), (sampling, uniforms_BK is None)
            self._captured = CudaGraphed(self._with_tensors(inputs, sampling))
        # Another sampling would be another graph, and so would be choosing without numbers.
        assert (tuple(given), (sampling, uniforms_BK is None)) == (self._given, self._kind)
        return self._captured(*given.values(), *([] if uniforms_BK is None else [uniforms_BK]))

    def forget(self) -> None:
        """Capture again at the next call, because the weights moved; changes in place need no capture."""
        self._captured = None

    def _with_tensors(self, like: PolicyInputs, sampling: SamplingParams) -> Callable[..., SampledTokens]:
        def choose(*tensors: Tensor) -> SampledTokens:
            named = dict(zip(self._given, tensors, strict=False))
            uniforms = tensors[len(named)] if len(tensors) > len(named) else None
            return self._choose(replace(like, **named), sampling, uniforms)

        return choose


def _tensors(inputs: PolicyInputs) -> dict[str, Tensor]:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def enable_gradient_checkpointing(policy: Policy, *, every: int = 1) -> None:
    """Make Llama layers and vision blocks keep only their input, in eval mode too; names and hooks stay."""
    recompute(islice(policy.blocks(), 0, None, every))


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make blocks keep only their input, in place; see `enable_gradient_checkpointing`."""
    for block in blocks:
        block.forward = MethodType(_recomputed, block)  # bound, so that a deep copy runs its own block


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    # No block draws random numbers, so there is no generator state to keep.
    return checkpoint(forward, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
