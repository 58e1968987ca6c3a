"""OpenVLA-OFT with discrete actions, on transformers: all 8 x 7 action tokens in one pass.

The language model reads ``[<s>][patches][proprioception?][rest of the prompt][56 empty slots][</s>?]`` once
and attends in both directions. The output at a position speaks for the slot after it: token 0 is read at the
last prompt token, and the last slot is not read.

Dimension letters: B rows, L prompt tokens, P patches of all pictures (+ 1 with proprioception), D width,
C = 8 steps per decision, A = 7 action dimensions, K = C * A slots, S = L + P + K (+ 1 with a stop token)
positions, N = 256 action bins, V values per decision (1 or C), H/W frame size in pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.episode_layout import TOKENS
from asyncrl.policies import acceleration, action_tokens
from asyncrl.policies.action_tokens import SampledTokens, action_distribution, entropy_of, logprob_of
from asyncrl.policies.interface import ActResult, EvaluateResult, Policy, PolicyInputs, SamplingParams
from asyncrl.policies.lora import is_adapter, merged_tensors
from asyncrl.policies.openvla import networks, preprocess
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, Passes, require_trainable
from asyncrl.policies.openvla.files import PolicyFolder, PublishedOptions, open_folder, write_policy
from asyncrl.policies.openvla.networks import ValueHead, run_trunk, stable_name
from asyncrl.policies.openvla.preprocess import PromptTokenizer
from asyncrl.records import ActionSpec
from asyncrl.storage.tensor_files import SHARD_BYTES, Spec

Dtype = torch.dtype | Literal["config"]
LEVELS: Final = {"none": "none", "chunk": "decision", "action": "action"}
"""A critic's level in config.json -> in `interface.Policy`."""


class OpenVLAOFTPolicy(Policy):
    """OpenVLA-OFT, with all optional capabilities."""

    sample_arrays = TOKENS
    forget_graphs: Callable[[], None] | None = None  # Set when acting was captured as a CUDA graph.

    def __init__(self, config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> None:
        super().__init__()
        self.config = config
        self.pictures, self.proprio_numbers = config.images, config.proprio_dim
        self.slots, self.causal = config.slots, config.causal
        words = preprocess.build_word_tokenizer
        self.tokenizer = tokenizer or PromptTokenizer(words(), pad_id=config.token_count)
        parts = networks.build_networks(config)
        self.vision: networks.FusedVision = parts["vision"]
        self.projector: networks.Projector = parts["projector"]
        self.proprio_projector: networks.ProprioProjector | None = parts["proprio_projector"]
        self.llm: LlamaModel = parts["llm"]
        self.lm_head: networks.ActionHead = parts["lm_head"]
        self.value_head: ValueHead | None = None
        self.to(config.torch_dtype)
        if config.value_head != "none":
            self.add_critic(self.critic)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.restore_buffers()
        return self

    def restore_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds: rotary frequencies (always float32) and indices."""
        with self.device:
            self.llm.rotary_emb = LlamaRotaryEmbedding(self.llm.config)
            indices = torch.arange(self.config.patches)[None]
            self.vision.siglip.embeddings.register_buffer("position_ids", indices, persistent=False)

    @classmethod
    def load(cls, folder: Path, device: torch.device, **settings: Any) -> Self:
        """Read a policy folder: published, or written by asyncrl."""
        return cls.from_folder(open_folder(folder, PublishedOptions.of(settings)), device)

    @classmethod
    def from_folder(cls, opened: PolicyFolder, device: str | torch.device, dtype: Dtype = "config") -> Self:
        """Read the weights tensor by tensor; the policy is in evaluation mode, all of it trainable."""
        with torch.device("meta"):
            policy = cls(opened.config, opened.tokenizer)
        wanted = policy.config.torch_dtype if dtype == "config" else dtype
        own_names = {stable_name(name): name for name, _ in policy.named_parameters()}
        state: dict[str, Tensor] = {}
        for name, tensor in opened.natives():
            placed = tensor.to(device=device, dtype=wanted)
            if placed.untyped_storage().nbytes() != placed.nbytes:
                placed = placed.clone()  # A part of a larger tensor would keep all of it.
            state[own_names[name]] = placed.contiguous()
        policy.load_state_dict(state, strict=True, assign=True)
        policy.restore_buffers()
        return policy.requires_grad_(True).eval()

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        dtype: Dtype = "config",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a policy folder; `tensors`: all whole weights by stable name (None: the policy's own)."""
        kept = self.config.torch_dtype if dtype == "config" else dtype
        own = {stable_name(name): p for name, p in self.named_parameters() if not is_adapter(name)}
        specs = {name: Spec(kept, tuple(p.shape)) for name, p in (tensors or own).items()}
        stream: Iterable[tuple[str, Tensor]] = merged_tensors(self) if tensors is None else tensors.items()
        write_policy(folder, self.config, self.tokenizer, specs, stream, shard_bytes=shard_bytes)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by stable name, adapters merged, in `config.dtype`."""
        yield from ((name, tensor.to(self.config.torch_dtype)) for name, tensor in merged_tensors(self))

    @property
    def action_spec(self) -> ActionSpec:
        """Return the steps per decision and the numbers per step."""
        return ActionSpec(chunk=self.config.chunk, dim=self.config.action_dim)

    @property
    def image_size(self) -> int:
        """Return height and width of the towers' picture, in pixels."""
        return self.config.image_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype; weights in training may have another."""
        return self.config.torch_dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.lm_head.weight.device

    @property
    def critic(self) -> str:
        """Return the unit of one value: none, decision or action."""
        return LEVELS[self.config.value_head]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by stable name."""
        return {stable_name(name): p for name, p in self.named_parameters() if p.requires_grad}

    def blocks(self) -> Iterator[nn.Module]:
        """Yield vision blocks and Llama layers in the order in which they run."""
        yield from self.vision.dino.encoder.layer
        yield from self.vision.siglip.encoder.layers
        yield from self.llm.layers

    def lora_layers(self, targets: str) -> list[str]:
        """Return the linear layers of the towers, projector and Llama, or those of Llama alone."""
        # The output layer gets no adapter: only its 256 action rows are ever multiplied.
        parts = ("llm.layers.",) if targets == "language" else ("llm.layers.", "projector.", "vision.")
        linears = (name for name, module in self.named_modules() if isinstance(module, nn.Linear))
        return [name for name in linears if name.startswith(parts)]

    def activation_bytes(self, rows: int, passes: Passes, itemsize: int) -> int:
        """Estimate the memory of passes over `rows` decisions."""
        return self.config.activation_bytes(rows, passes, itemsize)

    def check_trainable(self) -> None:
        """Refuse several pictures, proprioception and other decisions than a world's."""
        require_trainable(self.config)

    def add_critic(self, level: str = "decision") -> None:
        """Add a critic with fresh random weights, or replace the present one."""
        stored: Any = next(name for name, ours in LEVELS.items() if ours == level)
        self.config = dataclasses.replace(self.config, value_head=stored)
        head = ValueHead(self.config.llm_width, self.config.value_hidden, self.config.values)
        self.value_head = head.to(self.device, self.lm_head.weight.dtype)

    def drop_critic(self) -> None:
        """Remove the critic."""
        self.config = dataclasses.replace(self.config, value_head="none")
        self.value_head = None

    def compile_acting(self, rows: int, tasks: Sequence[str]) -> None:
        """Compile and capture acting at one shape."""
        self.forget_graphs = acceleration.compile(self, rows, tasks)

    def weights_moved(self) -> None:
        """Drop the graphs that hold addresses of the weights."""
        if self.forget_graphs is not None:
            self.forget_graphs()

    def fix_prompts(self, tasks: Sequence[str]) -> None:
        """Pad all prompts to one length."""
        self.tokenizer.fix_shape(tasks)

    def prompt_tokens(self, task: str) -> int:
        """Count the tokens of an instruction's prompt."""
        return len(self.tokenizer.ids(task))

    def preprocess(
        self, frames: NDArray[np.uint8], tasks: Sequence[str], proprio: NDArray[np.floating] | None = None
    ) -> PolicyInputs:
        """Move frames ``[B, H, W, 3]`` uint8, prompts and proprioception to the device."""
        return preprocess.build_inputs(self.config, self.tokenizer, self.device, frames, tasks, proprio)

    def place_pictures(self, frames: NDArray[np.uint8]) -> Tensor:
        """Turn frames ``[..., H, W, 3]`` uint8 into `PolicyInputs.pixels`, as `preprocess` does."""
        return preprocess.place_pictures(self.config, frames, self.device)

    def embed_prompt(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor | None]:
        """Embed the positions before the action tokens, with their mask (None: no padding)."""
        text_BLD = self.llm.embed_tokens(inputs.input_ids)
        features = self.vision(inputs.pixels.flatten(0, -4))
        patches_BPD = self.projector(features.reshape(len(text_BLD), -1, features.shape[-1]))
        parts = [text_BLD[:, :1], patches_BPD.to(text_BLD.dtype), text_BLD[:, 1:]]
        if self.proprio_projector is not None:
            assert inputs.proprio is not None
            parts.insert(2, self.proprio_projector(inputs.proprio).to(text_BLD.dtype))
        embeddings = torch.cat(parts, dim=1)
        if not inputs.padded:
            return embeddings, None
        mask_BL = inputs.attention_mask
        between = mask_BL.new_ones(len(mask_BL), self.config.prefix)
        return embeddings, torch.cat([mask_BL[:, :1], between, mask_BL[:, 1:]], dim=1)

    def embed(
        self, inputs: PolicyInputs, tokens_BK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Embed the sequence: ``[B, S, D]``, mask ``[B, S]`` (or None), the last prompt token's index."""
        prompt, mask = self.embed_prompt(inputs)
        parts = [prompt, prompt.new_zeros(len(prompt), self.slots, self.config.llm_width)]
        if self.config.stop_token:
            stop_B1 = inputs.input_ids.new_full((len(prompt), 1), self.tokenizer.end_id)
            parts.append(self.llm.embed_tokens(stop_B1))
        embeddings_BSD = torch.cat(parts, dim=1)
        if mask is not None:
            mask = nn.functional.pad(mask, (0, embeddings_BSD.shape[1] - mask.shape[1]), value=1)
        return embeddings_BSD, mask, prompt.shape[1] - 1

    def readout(self, inputs: PolicyInputs, tokens_BK: Tensor | None = None) -> Tensor:
        """Compute action tokens' final hidden states ``[B, K, D]``; OFT ignores `tokens_BK`."""
        embeddings_BSD, mask_BS, last_prompt = self.embed(inputs, tokens_BK)
        hidden_BSD = run_trunk(self.llm, embeddings_BSD, mask_BS, causal=self.causal)
        return hidden_BSD[:, last_prompt : last_prompt + self.slots]

    def choose(
        self, inputs: PolicyInputs, sampling: SamplingParams, uniforms_BK: Tensor | None
    ) -> SampledTokens:
        """Choose the tokens of a decision, all on the device; for `uniforms_BK` see `take_tokens`."""
        hidden_BKD = self.readout(inputs)
        logprobs_BKN = action_distribution(self.lm_head(hidden_BKD), sampling)
        return SampledTokens(action_tokens.take_tokens(logprobs_BKN, uniforms_BK), logprobs_BKN, hidden_BKD)

    def value_of(self, hidden_BKD: Tensor) -> Tensor | None:
        """Compute the critic's values ``[B, V]`` float32 from `readout`; None without a critic."""
        return None if self.value_head is None else self.value_head(hidden_BKD[:, 0].detach())

    def values(self, inputs: PolicyInputs) -> Tensor:
        """Compute only the values ``[B, V]`` float32 of a policy with a critic."""
        with torch.no_grad():
            hidden_BKD = self.readout(inputs)
        values = self.value_of(hidden_BKD)
        assert values is not None
        return values

    def as_chunk(self, per_token_BK: Tensor) -> Tensor:
        """Fold ``[B, K]`` of any dtype into ``[B, C, A]``."""
        return per_token_BK.unflatten(1, (self.config.chunk, self.config.action_dim))

    @torch.no_grad()
    def act(self, inputs: PolicyInputs, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        """Sample a decision per row, each by its own seed."""
        assert len(seeds) == len(inputs.pixels), f"{len(seeds)} seeds for {len(inputs.pixels)} rows"
        uniforms_BK = action_tokens.uniforms_for(sampling, seeds, self.slots, self.device)
        chosen = self.choose(inputs, sampling, uniforms_BK)
        tokens = self.as_chunk(chosen.tokens).int()
        return ActResult(
            actions=self.decode(tokens),
            sample={"tokens": tokens},
            logprob=self.as_chunk(logprob_of(chosen.logprobs, chosen.tokens)),
            value=self.value_of(chosen.hidden),
            entropy=self.as_chunk(entropy_of(chosen.logprobs)),
        )

    def evaluate(
        self, inputs: PolicyInputs, sample: Mapping[str, Tensor], sampling: SamplingParams
    ) -> EvaluateResult:
        """Compute ``[B, C, A]`` float32 log-probs of given tokens, with gradient."""
        tokens_BK = sample["tokens"].flatten(1)
        hidden_BKD = self.readout(inputs, tokens_BK)
        logprobs_BKN = action_distribution(self.lm_head(hidden_BKD), sampling, tokens_BK)
        return EvaluateResult(
            logprob=self.as_chunk(logprob_of(logprobs_BKN, tokens_BK)),
            entropy=self.as_chunk(entropy_of(logprobs_BKN)),
            value=self.value_of(hidden_BKD),
        )

    def forward(self, *args: Any, **settings: Any) -> EvaluateResult:
        """Call `evaluate`: sharding hooks into `forward`."""
        return self.evaluate(*args, **settings)

    def decode(self, tokens: Tensor) -> Tensor:
        """Turn integer bins ``[..., A]`` into float32 actions in the environment's units and conventions."""
        actions = action_tokens.decode(tokens)
        if self.config.norm_key:
            actions = action_tokens.unnormalise(actions, self.config.norm_stats[self.config.norm_key])
        return action_tokens.with_gripper(actions, self.config.gripper)


class OpenVLAPolicy(OpenVLAOFTPolicy):
    """OpenVLA, which writes its action like text: C x 7 tokens, one after another (published: C = 1).

    The language model reads ``[<s>][patches][proprioception?][rest of the prompt]``, attending to the past
    only. Modules, names and interface are those of OpenVLA-OFT.
    """

    def embed(
        self, inputs: PolicyInputs, tokens_BK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Embed the prompt and all tokens but the last, which predicts nothing; None: the prompt alone."""
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
        for k in range(self.slots):
            if k:
                if mask is not None:
                    mask = nn.functional.pad(mask, (0, 1), value=1)
                hidden = self._read(self._embed_bins(tokens[-1]), mask, cache)
            logprobs.append(action_distribution(self.lm_head(hidden), sampling))
            uniform_B1 = None if uniforms_BK is None else uniforms_BK[:, k : k + 1]
            tokens.append(action_tokens.take_tokens(logprobs[-1], uniform_B1))
        return SampledTokens(torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), prompt_B1D)

    def _read(self, embeddings: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        return run_trunk(self.llm, embeddings, mask, causal=True, cache=cache)[:, -1:]

    def _embed_bins(self, tokens: Tensor) -> Tensor:
        return self.llm.embed_tokens(tokens.long() + self.config.first_action_id)


def new_policy(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> OpenVLAOFTPolicy:
    """Build the class that `config.decoding` selects, with random weights."""
    return (OpenVLAPolicy if config.causal else OpenVLAOFTPolicy)(config, tokenizer)


def load_policy(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: Dtype = "config",
    options: PublishedOptions | None = None,
) -> OpenVLAOFTPolicy:
    """Read a policy folder as the class that its decoding selects, in evaluation mode, all trainable."""
    opened = open_folder(Path(folder), options)
    kind = OpenVLAPolicy if opened.config.causal else OpenVLAOFTPolicy
    return kind.from_folder(opened, device, dtype)
