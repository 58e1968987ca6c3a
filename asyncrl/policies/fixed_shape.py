"""Acting at one fixed shape, compiled: batches of any size up to it in, the same decisions out, faster.

A compiled graph knows its shapes. The rows of a batch are filled up with copies of the last one; prompts are
padded to the longest of the run's tasks, and where these differ in length there is always a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.policies.openvla_oft import Choice, OpenVLAOFT
from asyncrl.policies.protocol import PolicyInputs, SamplingParams

Choose = Callable[[PolicyInputs, SamplingParams, Tensor | None], Choice]


def speed_up(policy: OpenVLAOFT, rows: int, tasks: Sequence[str]) -> None:
    """Compile `policy.choose` for `rows` rows, in place; the first decision then takes up to a minute.

    Args:
        policy: Finished: adapters and value head are there or gone.
        rows: Largest batch from now on; smaller ones cost as much.
        tasks: All instructions that will come.

    Raises:
        ConfigError: A decision has more rows than that.
    """
    lengths = {len(policy.tokenizer.ids(task)) for task in tasks}
    policy.tokenizer.shortest = max(lengths)
    policy.choose = FixedShape(  # type: ignore[method-assign]
        torch.compile(policy.choose, dynamic=False), rows, masked=len(lengths) > 1
    )


class FixedShape:
    """Calls `choose` at one shape only."""

    def __init__(self, choose: Choose, rows: int, *, masked: bool) -> None:
        self.choose, self.rows, self.masked = choose, rows, masked

    def __call__(self, inputs: PolicyInputs, sampling: SamplingParams, uniforms_BK: Tensor | None) -> Choice:
        """Fill the batch up, choose, cut what was filled up."""
        live = len(inputs.input_ids)
        if live > self.rows:
            raise ConfigError(
                f"{live} rows are to be decided, but the policy was compiled for {self.rows}. Raise "
                "--actor.slots, or leave --imagination.compile out."
            )

        def filled(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or live == self.rows:
                return tensor
            return torch.cat([tensor, tensor[-1:].expand(self.rows - live, *tensor.shape[1:])])

        full = replace(
            inputs,
            pixels=filled(inputs.pixels),
            input_ids=filled(inputs.input_ids),
            attention_mask=filled(inputs.attention_mask),
            padded=inputs.padded or self.masked,
            proprio=filled(inputs.proprio),
        )
        chosen = self.choose(full, sampling, filled(uniforms_BK))
        return Choice(*(tensor[:live] for tensor in chosen))
