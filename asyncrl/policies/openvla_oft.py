"""OpenVLA-OFT with discrete actions, on transformers: frames and prompts in, 8 x 7 action tokens out.

The language model reads ``[<s>][patches][rest of the prompt][56 empty slots]`` once and attends in both
directions. The output at a place speaks for the slot after it: token 0 is read at the last prompt token, and
the last slot is not read.

Dimension letters:
    B  rows      H, W  frame size in pixels      L  prompt tokens      P  patches
    D  width of the language model
    C = 8 steps per decision      A = 7 action dimensions      K = C * A slots      N = 256 action bins
    S = L + P + K (+ 1 with a stop token) places      V  values per decision: 1, or C
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.errors import ConfigError
from asyncrl.policies import action_tokens
from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.openvla_config import OpenVLAOFTConfig
from asyncrl.policies.protocol import ActResult, EvaluateResult, PolicyInputs, SamplingParams
from asyncrl.policies.sampling import action_distribution, choose_tokens, entropy_of, logprob_of
from asyncrl.policies.tokenizer import PromptTokenizer, build_word_tokenizer
from asyncrl.policies.value_head import ValueHead
from asyncrl.policies.vision import FusedVision, Projector, stable_name


class ActionHead(nn.Linear):
    """The vocabulary's output layer, of which only the action rows are ever multiplied."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__(config.llm_width, config.vocab_size, bias=False)
        self.first = config.first_action_id

    def forward(self, input: Tensor) -> Tensor:
        """``[B, K, D]`` hidden states to ``[B, K, N]`` float32 logits of the action bins."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight[self.first : self.first + BINS].float())


def build_llm(config: OpenVLAOFTConfig) -> LlamaModel:
    """A Llama model that attends in both directions: otherwise OFT checkpoints lose half their successes."""
    return LlamaModel(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.llm_width,
            intermediate_size=config.llm_mlp,
            num_hidden_layers=config.llm_layers,
            num_attention_heads=config.llm_heads,
            rms_norm_eps=config.rms_eps,
            initializer_range=config.llm_width**-0.5,  # The usual 0.02 keeps a narrow model from learning.
            pad_token_id=config.token_count,
            is_causal=False,  # type: ignore[call-arg]  # an extra field that the mask builder reads
            use_cache=False,
        )
    )


def trim_padding(ids_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drop the columns that are padding in every row.

    Returns:
        The remaining ids, and their mask, or None when nothing is padded (attention is faster without).
    """
    mask_cpu = mask_BL.to("cpu", dtype=torch.bool)
    used_L = mask_cpu.any(dim=0)
    if not used_L.all():
        columns = used_L.nonzero().flatten().to(ids_BL.device)
        ids_BL, mask_BL = ids_BL[:, columns], mask_BL[:, columns]
    return ids_BL, None if mask_cpu[:, used_L].all() else mask_BL


class OpenVLAOFT(nn.Module):
    """The policy. Implements `protocol.Policy`; files are read and written by `checkpoints`."""

    def __init__(self, config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> None:
        """Build with random weights, in `config.dtype`.

        Args:
            config: Sizes and conventions.
            tokenizer: None: the built-in word tokenizer, which only policies trained with it understand.
        """
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer or PromptTokenizer(build_word_tokenizer(), pad_id=config.token_count)
        self.vision = FusedVision(
            config.dino, config.siglip, image_size=config.image_size, patch_size=config.patch_size
        )
        self.projector = Projector(config.dino.width + config.siglip.width, config.llm_width)
        self.llm = build_llm(config)
        self.lm_head = ActionHead(config)
        self.value_head: ValueHead | None = None
        self.to(config.torch_dtype)
        if config.value_head != "none":
            self.add_value_head(config.value_head)

    def _apply(self, fn: Any, recurse: bool = True) -> OpenVLAOFT:
        super()._apply(fn, recurse)
        self.restore_buffers()
        return self

    def restore_buffers(self) -> None:
        """Compute what no checkpoint holds: rotary frequencies (always float32) and indices."""
        device = self.device
        with device:
            self.llm.rotary_emb = LlamaRotaryEmbedding(self.llm.config)
            indices = torch.arange(self.config.patches)[None]
            self.vision.siglip.embeddings.register_buffer("position_ids", indices, persistent=False)

    def add_value_head(self, level: Literal["chunk", "action"] = "chunk") -> None:
        """Give the policy a critic with fresh random weights (for PPO on a policy that never had one).

        Args:
            level: chunk: one value per decision. action: one per step. A critic that is there is replaced.
        """
        self.config = dataclasses.replace(self.config, value_head=level)
        head = ValueHead(self.config.llm_width, self.config.value_hidden, self.config.values)
        self.value_head = head.to(self.device, self.lm_head.weight.dtype)

    def drop_value_head(self) -> None:
        """Take the critic away: actors need none, nor does grpo."""
        self.config = dataclasses.replace(self.config, value_head="none")
        self.value_head = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    def preprocess(self, frames: NDArray[np.uint8], tasks: Sequence[str]) -> PolicyInputs:
        """Move frames and prompts to the device.

        Args:
            frames: ``[B, H, W, 3]`` uint8.
            tasks: B instructions.

        Raises:
            ConfigError: the frames are not uint8 pictures, or do not match the tasks in number.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or len(frames) != len(tasks):
            raise ConfigError(
                f"The policy got frames {frames.dtype}{list(frames.shape)} for {len(tasks)} tasks, but it "
                "reads one uint8 picture [H, W, 3] per task. Check the world's or simulator's observation."
            )
        ids, mask = self.tokenizer.batch(tasks)
        pixels = torch.tensor(frames).to(self.device)
        return PolicyInputs(pixels=pixels, input_ids=ids.to(self.device), attention_mask=mask.to(self.device))

    def embed(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor | None, int]:
        """Lay out the sequence.

        Returns:
            Embeddings ``[B, S, D]``, mask ``[B, S]`` (None: no padding), place of the last prompt token.
        """
        ids_BL, mask_BL = trim_padding(inputs.input_ids, inputs.attention_mask)
        text_BLD = self.llm.embed_tokens(ids_BL)
        patches_BPD = self.projector(self.vision(inputs.pixels))
        rows, width = ids_BL.shape[0], self.config.llm_width
        slots_BKD = text_BLD.new_zeros(rows, self.config.slots, width)
        parts = [text_BLD[:, :1], patches_BPD.to(text_BLD.dtype), text_BLD[:, 1:], slots_BKD]
        if self.config.stop_token:
            stop_B1 = ids_BL.new_full((rows, 1), self.tokenizer.end_id)
            parts.append(self.llm.embed_tokens(stop_B1))
        embeddings_BSD = torch.cat(parts, dim=1)
        last_prompt = patches_BPD.shape[1] + ids_BL.shape[1] - 1
        if mask_BL is None:
            return embeddings_BSD, None, last_prompt
        mask_BS = mask_BL.new_ones(embeddings_BSD.shape[:2])
        mask_BS[:, 1 + patches_BPD.shape[1] : last_prompt + 1] = mask_BL[:, 1:]
        return embeddings_BSD, mask_BS, last_prompt

    def readout(self, inputs: PolicyInputs) -> Tensor:
        """Final hidden states ``[B, K, D]`` of the action tokens; the first is at the last prompt token."""
        embeddings_BSD, mask_BS, last_prompt = self.embed(inputs)
        places: dict[str, Tensor] = {}
        if (
            mask_BS is not None
        ):  # padding takes no place: a padded prompt gets the positions of an unpadded one
            places = {"attention_mask": mask_BS, "position_ids": (mask_BS.cumsum(dim=1) - 1).clamp(min=0)}
        hidden_BSD = self.llm(inputs_embeds=embeddings_BSD, **places).last_hidden_state
        return hidden_BSD[:, last_prompt : last_prompt + self.config.slots]

    def value_of(self, hidden_BKD: Tensor, *, critic_through_policy: bool = False) -> Tensor | None:
        """Critic's values ``[B, V]`` float32, read at the last prompt token."""
        if self.value_head is None:
            return None
        hidden_BD = hidden_BKD[:, 0]
        return self.value_head(hidden_BD if critic_through_policy else hidden_BD.detach())

    def values(self, inputs: PolicyInputs, *, critic_through_policy: bool = False) -> Tensor:
        """Critic's values alone; see `protocol.Policy.values`.

        Raises:
            ConfigError: the policy has no value head.
        """
        with torch.set_grad_enabled(critic_through_policy and torch.is_grad_enabled()):
            hidden_BKD = self.readout(inputs)
        values = self.value_of(hidden_BKD, critic_through_policy=critic_through_policy)
        if values is None:
            raise ConfigError(
                "The policy was asked for values, but it has no value head (value_head is none in its "
                "config.json). Add one with add_value_head, or use --algorithm.kind grpo."
            )
        return values

    def as_chunk(self, per_token_BK: Tensor) -> Tensor:
        """``[B, K]`` to ``[B, C, A]``."""
        return per_token_BK.unflatten(1, (self.config.chunk, self.config.action_dim))

    @torch.no_grad()
    def act(self, inputs: PolicyInputs, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        """Decide; see `protocol.Policy.act`.

        Raises:
            ConfigError: there is not one seed per row.
        """
        if len(seeds) != len(inputs.pixels):
            raise ConfigError(
                f"{len(seeds)} seeds for {len(inputs.pixels)} rows: every row samples from its own stream. "
                "Pass one seed per row."
            )
        hidden_BKD = self.readout(inputs)
        logprobs_BKN = action_distribution(self.lm_head(hidden_BKD), sampling)
        tokens_BK = choose_tokens(logprobs_BKN, sampling, seeds)
        tokens = self.as_chunk(tokens_BK).int()
        return ActResult(
            actions=self.decode(tokens),
            tokens=tokens,
            logprob=self.as_chunk(logprob_of(logprobs_BKN, tokens_BK)),
            value=self.value_of(hidden_BKD),
            entropy=self.as_chunk(entropy_of(logprobs_BKN)),
        )

    def evaluate(
        self,
        inputs: PolicyInputs,
        tokens: Tensor,
        sampling: SamplingParams,
        *,
        critic_through_policy: bool = False,
    ) -> EvaluateResult:
        """Log-probs of given tokens with gradient; see `protocol.Policy.evaluate`."""
        tokens_BK = tokens.flatten(1)
        hidden_BKD = self.readout(inputs)
        logprobs_BKN = action_distribution(self.lm_head(hidden_BKD), sampling, tokens_BK)
        return EvaluateResult(
            logprob=self.as_chunk(logprob_of(logprobs_BKN, tokens_BK)),
            entropy=self.as_chunk(entropy_of(logprobs_BKN)),
            value=self.value_of(hidden_BKD, critic_through_policy=critic_through_policy),
        )

    def forward(
        self,
        inputs: PolicyInputs,
        tokens: Tensor,
        sampling: SamplingParams,
        *,
        critic_through_policy: bool = False,
    ) -> EvaluateResult:
        """Same as `evaluate`: sharding hooks onto `forward`."""
        return self.evaluate(inputs, tokens, sampling, critic_through_policy=critic_through_policy)

    def decode(self, tokens: Tensor) -> Tensor:
        """Bins ``[..., A]`` to float32 actions in the environment's units and gripper convention."""
        actions = action_tokens.decode(tokens)
        if self.config.norm_key:
            actions = action_tokens.unnormalise(actions, self.config.norm_stats[self.config.norm_key])
        if self.config.gripper == "libero":
            gripper = -torch.sign(2 * actions[..., -1:] - 1)
            actions = torch.cat([actions[..., :-1], gripper], dim=-1)
        return actions

    def param_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        """Optimizer groups of everything trainable: `policy` at `lr`, the critic (`value`) at `value_lr`."""
        trainable = self.trainable_parameters()
        value = [p for name, p in trainable.items() if name.startswith("value_head.")]
        policy = [p for name, p in trainable.items() if not name.startswith("value_head.")]
        groups = [
            {"name": "policy", "params": policy, "lr": lr},
            {"name": "value", "params": value, "lr": value_lr},
        ]
        return [group for group in groups if group["params"]]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What an update changes, by stable name."""
        return {stable_name(name): p for name, p in self.named_parameters() if p.requires_grad}

    def trainable_tensors(self) -> dict[str, Tensor]:
        """The same without gradient; the tensors share memory with the parameters."""
        return {name: p.detach() for name, p in self.trainable_parameters().items()}

    def acting_tensors(self) -> dict[str, Tensor]:
        """What actors need after an update: `trainable_tensors` without the value head."""
        tensors = self.trainable_tensors()
        return {name: t for name, t in tensors.items() if not name.startswith("value_head.")}


def count_parameters(module: nn.Module) -> int:
    """Numbers in all parameters of a module."""
    return sum(math.prod(p.shape) for p in module.parameters())
