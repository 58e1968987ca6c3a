"""OpenVLA, which writes its action like text: C x 7 tokens, one after another; and the choice of the class.

The language model reads ``[<s>][patches][proprioception?][rest of the prompt]``, attending to the past only.
Dimension letters: B rows, L prompt tokens, P patches (+ 1 with proprioception), D width of the Llama model,
C steps per decision (published: 1), K = 7 C tokens, N = 256 action bins.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from asyncrl.policies.action_tokens import SampledTokens, action_distribution, take_tokens
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import PublishedOptions, open_folder
from asyncrl.policies.openvla.networks import run_trunk
from asyncrl.policies.openvla.policy import Dtype, OpenVLAOFTPolicy
from asyncrl.policies.openvla.preprocess import PromptTokenizer


class OpenVLAPolicy(OpenVLAOFTPolicy):
    """The autoregressive policy: the same modules, names and interface as OpenVLA-OFT."""

    def embed(
        self, inputs: PolicyInputs, tokens_BK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Embed the prompt and all tokens but the last, which speaks for nothing; None: the prompt alone."""
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
        """Choose one token after the other; token k takes uniform k."""
        # The cache grows by one position per token: no shape depends on numbers, so this can be a CUDA graph.
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
            uniform_B1 = None if uniforms_BK is None else uniforms_BK[:, k : k + 1]
            tokens.append(take_tokens(logprobs[-1], uniform_B1))
        return SampledTokens(torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), prompt_B1D)

    def _read(self, embeddings: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        return run_trunk(self.llm, embeddings, mask, causal=True, cache=cache)[:, -1:]

    def _embed_bins(self, tokens: Tensor) -> Tensor:
        return self.llm.embed_tokens(tokens.long() + self.config.first_action_id)


def new_policy(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> OpenVLAOFTPolicy:
    """Build the class that `config.decoding` asks for, with random weights."""
    return (OpenVLAPolicy if config.causal else OpenVLAOFTPolicy)(config, tokenizer)


def load_policy(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
    options: PublishedOptions | None = None,
) -> OpenVLAOFTPolicy:
    """Read a policy folder with the class that its decoding asks for; in evaluation mode, all trainable."""
    opened = open_folder(Path(folder), options)
    kind = OpenVLAPolicy if opened.config.causal else OpenVLAOFTPolicy
    return kind.from_folder(opened, device, dtype)
