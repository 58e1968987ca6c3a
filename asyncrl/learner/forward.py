"""Forward passes over rows of a batch, by the policy or its reference, in step with all ranks.

D decisions of the batch, B its episodes, M rows of a micro-batch, R rows evaluated, C steps per decision,
A numbers per step, K values of a decision (1, or C), V cameras after the first, Q numbers of state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import moved
from asyncrl.errors import ConfigError
from asyncrl.learner.batches import Batch
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.observability import process_status
from asyncrl.policies.interface import EvaluateResult, Policy, PolicyInputs, SamplingParams
from asyncrl.policies.lora import adapters_disabled, has_lora
from asyncrl.records import Float32, Uint8

PADDING_ROW: Final = torch.zeros(1, dtype=torch.int64)


def longest_first(lengths: Tensor) -> Tensor:
    """Return indices ``[M]`` int64 by falling prompt length (stable), for little padding in a pass."""
    return torch.argsort(lengths, descending=True, stable=True)


class PolicyForward:
    """Forward passes of the policy, of at most `micro_batch` decisions."""

    def __init__(
        self, policy: Policy, ranks: LearnerRanks, device: torch.device, *, micro_batch: int
    ) -> None:
        self.policy, self.ranks, self.device, self.micro_batch = policy, ranks, device, micro_batch
        self.small_size = 0  # 0: sizes vary. Else passes are padded to `micro_batch`, small ones to this size

    def evaluate(self, batch: Batch, rows_M: Tensor, *, small: bool = False) -> EvaluateResult:
        """Compute log-probs and entropies ``[M, C, A]`` in nats and values ``[M, K]``, all float32."""
        number, arguments = len(rows_M), self._arguments(batch, self._padded(rows_M, small=small))
        result = self.policy.evaluate(*arguments)
        return EvaluateResult(
            logprob=result.logprob[:number].float(),
            entropy=result.entropy[:number].float(),
            value=None if result.value is None else result.value[:number].float(),
        )

    def reference(self, reference: Reference, batch: Batch, rows_M: Tensor) -> Tensor:
        """Compute the reference policy's log-probs of rows ``[M]`` int64: ``[M, C, A]`` float32, in nats."""
        return reference.logprob(*self._arguments(batch, self._padded(rows_M)))[: len(rows_M)].float()

    @torch.no_grad()
    def evaluate_rows(self, batch: Batch, rows_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs ``[D, C, A]`` and values ``[D, K]`` of some rows, 0 elsewhere; collective."""
        rows_R = rows_R[longest_first(self.prompt_lengths(batch.tasks)[rows_R])]
        logprob_DCA = torch.zeros(batch.mask.shape, device=self.device)
        value_DK: Tensor | None = None
        for rows_M, own in self._micro_batches(rows_R):
            result = self.evaluate(batch, rows_M)
            if not own:
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
        """Compute the critic's value ``[B]`` of truncated episodes' last observations, else 0; collective."""
        tasks = dict(zip(batch.episode.tolist(), batch.tasks, strict=True))
        final = (batch.final_frames, batch.final_more_frames, batch.final_states)
        truncated_R = torch.nonzero(~batch.terminated).flatten()
        lengths = self.prompt_lengths([tasks[row] for row in truncated_R.tolist()])
        value_B = torch.zeros(len(batch.returns), device=self.device)
        for rows_M, own in self._micro_batches(truncated_R[longest_first(lengths)]):
            padded = self._padded(rows_M)
            inputs = self._inputs(*final, [tasks[row] for row in padded.tolist()], padded.numpy())
            value_M = self.policy.values(inputs)[: len(rows_M), 0].float()
            if own:
                value_B[moved(rows_M, self.device)] = value_M
        return value_B

    def _micro_batches(self, rows_R: Tensor) -> Iterator[tuple[Tensor, bool]]:
        for part in self.split(len(rows_R)):
            yield (PADDING_ROW, False) if part is None else (rows_R[part], True)
            process_status.progress()

    def split(self, rows: int) -> list[slice | None]:
        """Split `rows` into micro-batches; None for every pass that only other ranks need; collective.

        A single leftover row would need other compiled graphs: the last two passes share their rows.
        """
        own = -(-rows // self.micro_batch)
        needed = int(self.ranks.max(torch.tensor([float(own)]))[0])
        ends = [min((number + 1) * self.micro_batch, rows) for number in range(own)]
        if own > 1 and rows - ends[-2] == 1 and self.micro_batch > 2:
            ends[-2] -= 1
        parts: list[slice | None] = [slice(start, end) for start, end in pairwise([0, *ends])]
        return parts + [None] * (needed - own)

    def prompt_lengths(self, tasks: Sequence[str]) -> Tensor:
        """Count the tokens of each instruction's prompt: int64, on the CPU; 0 if unknown."""
        if not hasattr(self.policy, "prompt_tokens"):
            return torch.zeros(len(tasks), dtype=torch.int64)
        lengths = {task: self.policy.prompt_tokens(task) for task in set(tasks)}
        return torch.tensor([lengths[task] for task in tasks], dtype=torch.int64)

    def _padded(self, rows_M: Tensor, *, small: bool = False) -> Tensor:
        if not self.small_size:
            return rows_M
        size = self.small_size if small else self.micro_batch
        return torch.cat([rows_M, rows_M[-1:].expand(max(0, size - len(rows_M)))])

    def _arguments(self, batch: Batch, rows_M: Tensor) -> tuple[Any, dict[str, Tensor], SamplingParams]:
        tasks = [batch.tasks[row] for row in rows_M.tolist()]
        inputs = self._inputs(batch.frames, batch.more_frames, batch.states, tasks, rows_M.numpy())
        sample = {name: moved(values[rows_M], self.device) for name, values in batch.sample.items()}
        return inputs, sample, batch.sampling

    def _inputs(
        self,
        frames: Uint8,
        more_frames: Uint8 | None,
        states: Float32 | None,
        tasks: list[str],
        rows: NDArray[np.int64],
    ) -> Any:
        pictures = frames[rows]
        if more_frames is not None:
            pictures = np.concatenate([pictures[:, None], more_frames[rows]], axis=1)
        if states is None:
            return self.policy.preprocess(pictures, tasks)
        return self.policy.preprocess(pictures, tasks, states[rows])


class Reference:
    """The frozen policy of the KL penalty: a second one, or the policy without its adapters."""

    def __init__(self, policy: Any, *, without_adapters: bool = False) -> None:
        if without_adapters and not has_lora(policy):
            raise ConfigError(
                "The policy has no adapters, so the policy without adapters is the one that learns and the "
                "KL penalty would be zero. Set --lora.rank, or load the reference as a second policy."
            )
        if not without_adapters and isinstance(policy, nn.Module):
            policy.requires_grad_(False).eval()
        self.policy: Any = policy
        self.without_adapters = without_adapters

    @torch.no_grad()
    def logprob(self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams) -> Tensor:
        """Compute log-probs of a sample, ``[B, C, A]`` float32 in nats, without gradient."""
        with adapters_disabled(self.policy) if self.without_adapters else nullcontext():
            return self.policy.evaluate(inputs, sample, sampling).logprob
