"""Runs the policy over rows of a batch, in micro-batches and in step with the other ranks.

The policy is the learner's, or for the KL penalty the one the run began with (`Reference`).

Dimension letters used in this file:
    D  decisions of the batch      B  its episodes      M  rows of a micro-batch
    C  steps per decision          A  numbers per step      K  values of a decision: 1, or C
    V  cameras beside the first    Q  numbers of state
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import moved
from asyncrl.errors import ConfigError
from asyncrl.learner.batches import Batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability import process_status
from asyncrl.policies.interface import (
    CountsPromptTokens,
    EvaluateResult,
    HasCritic,
    Policy,
    PolicyInputs,
    SamplingParams,
)
from asyncrl.policies.lora import adapters_disabled, has_lora
from asyncrl.records import Float32, Uint8

ROW_IN_STEP: Final = torch.zeros(1, dtype=torch.int64)
"""What a rank evaluates in a pass that only other ranks need: its first row, which then counts nothing."""


def longest_first(lengths: Tensor) -> Tensor:
    """Order rows so that a pass has little padding, and the first one takes the most memory.

    Args:
        lengths: ``[M]`` int64, tokens of each row's prompt.

    Returns:
        ``[M]`` int64 indices. Rows of equal length keep their order.
    """
    return torch.argsort(lengths, descending=True, stable=True)


class PolicyForward:
    """Forward passes of the policy."""

    def __init__(
        self, policy: Policy, ranks: LearnerRanks, device: torch.device, *, micro_batch: int
    ) -> None:
        """Keep the parts; `micro_batch` is the largest number of decisions of a pass."""
        self.policy, self.ranks, self.device, self.micro_batch = policy, ranks, device, micro_batch
        self.few = 0
        """Decisions of a small pass, where passes are of fixed sizes; 0: they are not. See `fix_sizes`."""

    @property
    def fixed(self) -> bool:
        """Whether passes are of fixed sizes."""
        return self.few > 0

    def fix_sizes(self, size: int, few: int) -> None:
        """From now on fill every pass up to `size` decisions, a small one up to `few`.

        What fills it up is the last decision again, whose results are thrown away: results and gradients are
        those of the pass as it was. So compiled code is needed for one size, or two.
        """
        self.micro_batch, self.few = size, few

    def filled(self, rows_M: Tensor, *, small: bool = False) -> Tensor:
        """Repeat the last of rows ``[M]`` where passes are of fixed sizes; else they are returned."""
        if not self.fixed:
            return rows_M
        size = self.few if small else self.micro_batch
        return torch.cat([rows_M, rows_M[-1:].expand(max(0, size - len(rows_M)))])

    def evaluate(
        self, batch: Batch, rows_M: Tensor, *, through: bool = False, small: bool = False
    ) -> EvaluateResult:
        """Compute log-probs, entropies and values under the distribution that was sampled.

        Args:
            rows_M: ``[M]`` int64, which.

        Returns:
            Log-probs and entropies ``[M, C, A]`` in nats and values ``[M, K]``, all float32.
        """
        number, arguments = len(rows_M), self._arguments(batch, self.filled(rows_M, small=small))
        result = self.policy.evaluate(*arguments, critic_through_policy=through)
        return EvaluateResult(
            logprob=result.logprob[:number].float(),
            entropy=result.entropy[:number].float(),
            value=None if result.value is None else result.value[:number].float(),
        )

    def reference(self, reference: Reference, batch: Batch, rows_M: Tensor) -> Tensor:
        """Compute the reference policy's log-probs of rows ``[M]`` int64: ``[M, C, A]`` float32, in nats."""
        return reference.logprob(*self._arguments(batch, self.filled(rows_M)))[: len(rows_M)].float()

    @torch.no_grad()
    def evaluate_rows(self, batch: Batch, rows_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the log-probs of some decisions and, with a critic, their values; collective.

        Args:
            rows_R: ``[R]`` int64 on the CPU, which; a rank may have none.

        Returns:
            ``[D, C, A]`` float32 log-probs, and ``[D, K]`` float32 values or None; both 0 in other rows.
        """
        rows_R = rows_R[longest_first(self.prompt_lengths(batch.tasks)[rows_R])]
        logprob_DCA = torch.zeros(batch.mask.shape, device=self.device)
        value_DK: Tensor | None = None
        for rows in self.micro_batches(len(rows_R)):
            rows_M = ROW_IN_STEP if rows is None else rows_R[rows]
            result = self.evaluate(batch, rows_M)
            if rows is None:
                continue
            here_M = moved(rows_M, self.device)
            logprob_DCA[here_M] = result.logprob
            if result.value is not None:
                if value_DK is None:
                    value_DK = result.value.new_zeros(len(batch.tasks), result.value.shape[1])
                value_DK[here_M] = result.value
        return logprob_DCA, value_DK

    @torch.no_grad()
    def final_values(self, batch: Batch) -> Tensor:
        """Compute what episodes that ran out of time could still get: ``[B]`` float32, 0 for all others.

        That is the critic's value of their final observations.
        """
        tasks = dict(zip(batch.episode.tolist(), batch.tasks, strict=True))
        cut_T = torch.nonzero(~batch.terminated).flatten()
        cut_T = cut_T[longest_first(self.prompt_lengths([tasks[row] for row in cut_T.tolist()]))]
        value_B = torch.zeros(len(batch.returns), device=self.device)
        for rows in self.micro_batches(len(cut_T)):
            rows_M = ROW_IN_STEP if rows is None else cut_T[rows]
            value_M = self.values_at_end(batch, tasks.__getitem__, rows_M)
            if rows is not None:
                value_B[moved(rows_M, self.device)] = value_M
        return value_B

    def values_at_end(self, batch: Batch, task_of: Callable[[int], str], rows_M: Tensor) -> Tensor:
        """Compute the critic's value of the final observations of episodes ``[M]``: ``[M]`` float32."""
        filled = self.filled(rows_M)
        final = (batch.final_frames, batch.final_more_frames, batch.final_states)
        inputs = self.inputs(*final, [task_of(row) for row in filled.tolist()], filled.numpy())
        return cast("HasCritic", self.policy).values(inputs)[: len(rows_M), 0].float()

    def micro_batches(self, rows: int) -> Iterator[slice | None]:
        """Yield the slices of `cut`. Each is a sign of progress: --hang-timeout counts from the last one."""
        for part in self.cut(rows):
            yield part
            process_status.progress()

    def cut(self, rows: int) -> list[slice | None]:
        """Cut `rows` rows into slices of a pass; None for every pass that only other ranks need; collective.

        Learner ranks have different numbers of decisions but make the same number of passes. One row is never
        left over for a pass by itself, which a compiler would make other graphs for: the last two passes then
        share out their rows.
        """
        own = -(-rows // self.micro_batch)
        needed = int(self.ranks.max(torch.tensor([float(own)]))[0])
        ends = [min((number + 1) * self.micro_batch, rows) for number in range(own)]
        if own > 1 and rows - ends[-2] == 1 and self.micro_batch > 2:
            ends[-2] -= 1
        parts: list[slice | None] = [slice(start, end) for start, end in pairwise([0, *ends])]
        return parts + [None] * (needed - own)

    def prompt_lengths(self, tasks: Sequence[str]) -> Tensor:
        """Count the tokens of each instruction's prompt: int64, on the CPU; 0 if the policy does not say."""
        policy: object = self.policy
        if not isinstance(policy, CountsPromptTokens):
            return torch.zeros(len(tasks), dtype=torch.int64)
        lengths = {task: policy.prompt_tokens(task) for task in set(tasks)}
        return torch.tensor([lengths[task] for task in tasks], dtype=torch.int64)

    def _arguments(self, batch: Batch, rows_M: Tensor) -> tuple[Any, dict[str, Tensor], SamplingParams]:
        tasks = [batch.tasks[row] for row in rows_M.tolist()]
        inputs = self.inputs(batch.frames, batch.more_frames, batch.states, tasks, rows_M.numpy())
        sampling = SamplingParams(temperature=batch.temperature, top_k=batch.top_k)
        return (
            inputs,
            {name: moved(values[rows_M], self.device) for name, values in batch.sample.items()},
            sampling,
        )

    def inputs(
        self,
        frames: Uint8,
        more_frames: Uint8 | None,
        states: Float32 | None,
        tasks: list[str],
        rows: NDArray[np.int64],
    ) -> Any:
        """Show the policy rows ``[M]`` of what was seen: frames, and cameras and states where there are any.

        Frames are ``[B, H, W, 3]``, those of the other cameras ``[B, V, H, W, 3]``, states ``[B, Q]``.
        """
        shown = frames[rows]
        if more_frames is not None:
            shown = np.concatenate([shown[:, None], more_frames[rows]], axis=1)
        if states is None:
            return self.policy.preprocess(shown, tasks)
        return self.policy.preprocess(shown, tasks, states[rows])


class Reference(Protocol):
    """Does not change while the policy learns."""

    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute the log-probs of a sample, without gradient.

        Args:
            inputs: Of ``B`` rows; what the policy's `preprocess` gives.
            sample: See `Policy.evaluate`; each ``[B, ...]``.

        Returns:
            ``[B, C, A]`` float32, nats.
        """
        ...


class FrozenReference:
    """A second policy object, for full fine-tuning."""

    def __init__(self, policy: Policy) -> None:
        """Freeze the policy; it must not share weights with the one that learns."""
        self.policy = policy
        if isinstance(policy, nn.Module):
            policy.requires_grad_(False).eval()

    @torch.no_grad()
    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute log-probs by the second policy. See `Reference.logprob`."""
        return self.policy.evaluate(inputs, sample, sampling).logprob


class AdapterFreeReference:
    """The policy that learns, with its adapters disabled: no second copy of the weights."""

    def __init__(self, policy: Any) -> None:
        """Take the learning policy.

        Raises:
            ConfigError: it has no adapters, so that it would be compared with itself.
        """
        if not has_lora(policy):
            raise ConfigError(
                "The policy has no adapters, so the policy without adapters is the one that learns and the "
                "KL penalty would be zero. Set --lora.rank, or load the reference as a second policy."
            )
        self.policy = policy

    @torch.no_grad()
    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute log-probs with the adapters disabled. See `Reference.logprob`."""
        with adapters_disabled(self.policy):
            return self.policy.evaluate(inputs, sample, sampling).logprob
