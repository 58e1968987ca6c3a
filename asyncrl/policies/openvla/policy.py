"""The OpenVLA policies that a run names: the networks with their files, adapters and compiled acting.

A folder of ours and a published OpenVLA or OpenVLA-OFT folder are read alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.policies import acceleration
from asyncrl.policies.checkpoints.conventions import PublishedOptions
from asyncrl.policies.checkpoints.convert import open_source
from asyncrl.policies.checkpoints.folder import Dtype, fill_policy, read_config, read_policy, save_policy
from asyncrl.policies.checkpoints.published_policy import CRITIC, MODEL_TYPE
from asyncrl.policies.lora import Targets, merged_tensors, target_layers
from asyncrl.policies.openvla import memory
from asyncrl.policies.openvla.autoregressive import OpenVLA
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, require_trainable
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.tokenizer import PromptTokenizer
from asyncrl.storage.atomic import read_json


class OpenVLAOFTPolicy(OpenVLAOFT):
    """OpenVLA-OFT: all tokens of a decision from one pass. Has all capabilities of `interface`."""

    forget_graphs: Callable[[], None] | None = None
    """Set when acting was captured as a CUDA graph."""

    @classmethod
    def load(cls, folder: Path, device: torch.device, **settings: Any) -> Self:
        """Read a folder of ours, or a published one. See `interface.Policy.load`.

        Args:
            folder: Holds config.json and weights.
            device: Where the weights go.
            settings: Of a published folder: what it does not say about itself (`PublishedOptions`).

        Raises:
            CheckpointError: A file is missing, truncated, or does not fit.
            ConfigError: A setting is not known, or the folder is one of ours, which needs none.
        """
        if read_json(folder / "config.json").get("model_type") == MODEL_TYPE:
            return cls._load_published(folder, device, settings)
        if settings:
            raise ConfigError(
                f"--policy-settings has {', '.join(settings)}, but {folder} says all about itself: settings "
                "are for published folders. Leave them out."
            )
        return read_policy(folder, cls, device=device)

    @classmethod
    def _load_published(cls, folder: Path, device: torch.device, settings: Mapping[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(PublishedOptions)}
        if unknown := sorted(settings.keys() - known):
            raise ConfigError(
                f"--policy-settings has {unknown[0]!r}, but a published folder takes: "
                f"{', '.join(sorted(known))}."
            )
        source = open_source(folder, PublishedOptions(**settings))
        with torch.device("meta"):
            policy = cls(source.config, source.tokenizer)
        critic = any(name.startswith(CRITIC) for name in source.specs)
        return fill_policy(policy, source.natives(), device, "config", critic=critic)

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder of ours, in the dtype `config.dtype`. See `interface.Policy.save`."""
        save_policy(self, folder, tensors=tensors)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by stable name, adapters merged, any shape, in the dtype `config.dtype`.

        See `interface.Policy.saved_tensors`.
        """
        yield from ((name, tensor.to(self.config.torch_dtype)) for name, tensor in merged_tensors(self))

    def lora_layers(self, targets: str) -> list[str]:
        """List the linear layers that get adapters. See `capabilities.LoraTargets`."""
        chosen: Targets = "language" if targets == "language" else "all"
        return list(target_layers(self, chosen))

    def activation_bytes(
        self, rows: int, passes: Literal["acting", "checkpointed", "kept"], itemsize: int
    ) -> int:
        """Estimate the memory of passes. See `capabilities.CountsActivations`."""
        return memory.activation_bytes(self.config, rows, passes, itemsize)

    @property
    def pictures(self) -> int:
        """Return the pictures per decision. See `capabilities.SaysInputs`."""
        return self.config.images

    @property
    def proprio_numbers(self) -> int:
        """Return the numbers of proprioception. See `capabilities.SaysInputs`."""
        return self.config.proprio_dim

    def check_trainable(self) -> None:
        """Refuse several pictures, proprioception and other decisions than a world's."""
        require_trainable(self.config)

    def compile_acting(self, rows: int, tasks: Sequence[str]) -> None:
        """Compile and capture acting at one shape. See `capabilities.FixedShapeActing`."""
        self.forget_graphs = acceleration.compile(self, rows, tasks)

    def prompt_tokens(self, task: str) -> int:
        """Count the tokens of an instruction's prompt. See `capabilities.CountsPromptTokens`."""
        return len(self.tokenizer.ids(task))

    def fix_prompts(self, tasks: Sequence[str]) -> None:
        """Pad all prompts alike. See `capabilities.FixesPrompts`."""
        self.tokenizer.fix_shape(tasks)

    def weights_moved(self) -> None:
        """Forget the graphs that know addresses of the weights: these will be elsewhere when they return."""
        if self.forget_graphs is not None:
            self.forget_graphs()


class OpenVLAPolicy(OpenVLAOFTPolicy, OpenVLA):
    """OpenVLA: one token after the other."""


def new_policy(config: OpenVLAOFTConfig, tokenizer: PromptTokenizer | None = None) -> OpenVLAOFTPolicy:
    """Build the class that `config.decoding` asks for, with random weights."""
    return (OpenVLAPolicy if config.causal else OpenVLAOFTPolicy)(config, tokenizer)


def load_policy(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: Dtype = "config"
) -> OpenVLAOFTPolicy:
    """Read a folder of ours, of the class that its decoding asks for; in evaluation mode, all trainable.

    Raises:
        CheckpointError: a file is missing, truncated, or does not fit the configuration.
    """
    kind = OpenVLAPolicy if read_config(Path(folder)).causal else OpenVLAOFTPolicy
    return read_policy(folder, kind, device=device, dtype=dtype)
