"""OpenVLA, which writes its action like text: C x 7 tokens, one after another.

The language model reads ``[<s>][patches][proprioception?][rest of the prompt]`` and attends to the past only.
The last prompt token speaks for token 0; every chosen token is read in turn and speaks for the next one.

Dimension letters:
    B  rows      L  prompt tokens      P  patches (+ 1 with proprioception)      D  width of the Llama model
    C  steps per decision (published: 1)      K = 7 C tokens      N = 256 action bins
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.language import run_trunk
from asyncrl.policies.openvla.parallel import OpenVLAOFT, SampledTokens
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.policies.sampling import action_distribution, take_tokens


class OpenVLA(OpenVLAOFT):
    """The autoregressive policy: the same modules, names and interface as OpenVLA-OFT."""

    def embed(
        self, inputs: PolicyInputs, tokens_BK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Lay out the prompt, and behind it the tokens but the last, which speaks for nothing.

        Args:
            inputs: What `preprocess` gives.
            tokens_BK: ``[B, K]`` bins of any integer dtype; None: the prompt alone.

        Returns:
            Embeddings ``[B, S, D]`` in the weights' dtype, S = P + L (+ K - 1), mask ``[B, S]`` int64 (None:
            no padding), index of the last prompt token.
        """
        embeddings, mask = self.embed_prompt(inputs)
        last_prompt = embeddings.shape[1] - 1
        if tokens_BK is None:
            return embeddings, mask, last_prompt
        spoken = self._embed_bins(tokens_BK[:, :-1])
        if mask is not None:
            mask = nn.functional.pad(mask, (0, spoken.shape[1]), value=1)
        return torch.cat([embeddings, spoken], dim=1), mask, last_prompt

    def choose(
        self, inputs: PolicyInputs, sampling: SamplingParams, uniforms_BK: Tensor | None
    ) -> SampledTokens:
        """Choose one token after the other; token k takes uniform k.

        Shapes and dtypes are those of `OpenVLAOFT.choose`: ``[B, K]`` uniforms float64, tokens int64.

        The cache of keys and values grows by one position per token: no shape depends on numbers, so the
        whole call can be captured as one CUDA graph.
        """
        embeddings, mask, _ = self.embed(inputs)
        cache = DynamicCache(config=self.llm.config)
        hidden = self._read(embeddings, mask, cache)
        prompt_B1D, tokens, logprobs = hidden, [], []
        for k in range(self.config.slots):
            if k:
                if mask is not None:
                    mask = nn.functional.pad(mask, (0, 1), value=1)
                hidden = self._read(self._embed_bins(tokens[-1]), mask, cache)
            logprobs.append(action_distribution(self.lm_head(hidden), sampling))
            tokens.append(
                take_tokens(logprobs[-1], None if uniforms_BK is None else uniforms_BK[:, k : k + 1])
            )
        return SampledTokens(torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), prompt_B1D)

    def _read(self, embeddings: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        """Read some more positions; return the final hidden state ``[B, 1, D]`` of the last one."""
        return run_trunk(self.llm, embeddings, mask, causal=True, cache=cache)[:, -1:]

    def _embed_bins(self, tokens: Tensor) -> Tensor:
        return self.llm.embed_tokens(tokens.long() + self.config.first_action_id)


def build_policy_model(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> OpenVLAOFT:
    """Build the class that `config.decoding` asks for, with random weights."""
    return (OpenVLA if config.causal else OpenVLAOFT)(config, tokenizer)
