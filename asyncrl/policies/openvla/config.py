"""Describe an OpenVLA(-OFT) policy: its sizes, and what its tokens mean. Checks what `config.json` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import BINS, Bounds, Gripper, NormStats
from asyncrl.policies.openvla.vision import TowerConfig
from asyncrl.records import CHUNK
from asyncrl.storage.bounded_json import check_sizes


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTConfig:
    """Everything that shapes the policy and gives its tokens a meaning. Stored as `config.json`."""

    image_size: int
    """Side of the picture the towers see, in pixels."""
    patch_size: int
    """Side of a patch, in pixels."""
    dino: TowerConfig
    """DINOv2 with registers."""
    siglip: TowerConfig
    """SigLIP."""
    llm_width: int
    """Width of the Llama model."""
    llm_layers: int
    """Its layers."""
    llm_heads: int
    """Its attention heads."""
    llm_mlp: int
    """Hidden features of its MLPs."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    token_count: int
    """Tokens without padding. The last 256 of them are the action bins; `token_count` is the padding id."""
    value_hidden: tuple[int, int]
    """Hidden features of the value head."""
    value_head: Literal["none", "chunk", "action"] = "none"
    """chunk: a critic gives one value per decision. action: one per step."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """parallel: all tokens of a decision from one pass that attends in both directions (OpenVLA-OFT).
    autoregressive: one token after the other, each sees those before it (OpenVLA)."""
    chunk: int = 8
    """Steps per decision. OpenVLA as published makes 1."""
    action_dim: int = 7
    """Numbers per step; the last one is the gripper."""
    stop_token: bool = False
    """Append `</s>` behind the slots, as supervised OFT training does and RLinf does not."""
    images: int = 1
    """Pictures per decision, one after another in the sequence (main camera, wrist camera, ...)."""
    image_pipeline: Literal["rlinf", "oft"] = "rlinf"
    """rlinf: frames of another size are resized (bicubic), nothing else. oft: what `pictures` does."""
    proprio_dim: int = 0
    """Numbers of the robot's own state, as one token behind the patches; 0: the policy does not see it."""
    gripper: Gripper = "none"
    """libero: the gripper leaves as ``-sign(2 g - 1)``, from the data's 0 = closed to LIBERO's -1 = open.
    maniskill: as ``2 (g > 0.5) - 1``, ManiSkill's 1 = open."""
    norm_key: str = ""
    """Entry of `norm_stats` that actions are scaled with; empty: actions stay in [-1, 1], and proprioception
    is taken as it comes."""
    norm_stats: Mapping[str, NormStats] = field(default_factory=dict)
    """Ranges of actions (and proprioception) by data set."""
    rms_eps: float = 1e-6
    """Epsilon of the Llama norms."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the policy computes in. Logits, log-probs and values are float32 always."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def tiny(cls, **changes: Any) -> OpenVLAOFTConfig:
        """Return a size of about two million parameters: the same path on a laptop."""
        tower = TowerConfig(width=96, depth=5, heads=3, mlp=192)
        sizes: dict[str, Any] = {"image_size": 64, "patch_size": 8, "dino": tower, "siglip": tower}
        sizes |= {"llm_width": 128, "llm_layers": 4, "llm_heads": 4, "llm_mlp": 384}
        sizes |= {"vocab_size": 512, "token_count": 448, "value_hidden": (64, 32)}
        return cls(**(sizes | changes))

    @classmethod
    def small(cls, **changes: Any) -> OpenVLAOFTConfig:
        """Return a size of about eleven million parameters, for pictures of 128 pixels."""
        tower = TowerConfig(width=192, depth=6, heads=6, mlp=384)
        sizes: dict[str, Any] = {"image_size": 128, "patch_size": 16, "dino": tower, "siglip": tower}
        sizes |= {"llm_width": 256, "llm_layers": 6, "llm_heads": 8, "llm_mlp": 1024}
        sizes |= {"vocab_size": 512, "token_count": 448, "value_hidden": (128, 64)}
        return cls(**(sizes | changes))

    @classmethod
    def full(cls, **changes: Any) -> OpenVLAOFTConfig:
        """Return the size of the published 7B model."""
        dino = TowerConfig(width=1024, depth=24, heads=16, mlp=4096)
        siglip = TowerConfig(width=1152, depth=27, heads=16, mlp=4304)
        sizes: dict[str, Any] = {"image_size": 224, "patch_size": 14, "dino": dino, "siglip": siglip}
        sizes |= {"llm_width": 4096, "llm_layers": 32, "llm_heads": 32, "llm_mlp": 11008}
        sizes |= {"vocab_size": 32064, "token_count": 32000, "value_hidden": (512, 128), "dtype": "bfloat16"}
        return cls(**(sizes | changes))

    @property
    def first_action_id(self) -> int:
        """Vocabulary id of bin 0."""
        return self.token_count - BINS

    @property
    def patches(self) -> int:
        """Patches of one picture."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def prefix(self) -> int:
        """Places between the first and the second prompt token: all pictures' patches and proprioception."""
        return self.images * self.patches + (self.proprio_dim > 0)

    @property
    def causal(self) -> bool:
        """Whether a place sees only those before it."""
        return self.decoding == "autoregressive"

    @property
    def proprio_bounds(self) -> Bounds | None:
        """What proprioception is scaled with; None: nothing."""
        return self.norm_stats[self.norm_key].proprio if self.proprio_dim and self.norm_key else None

    @property
    def slots(self) -> int:
        """Action tokens of one decision."""
        return self.chunk * self.action_dim

    @property
    def values(self) -> int:
        """Values per decision that the critic gives; 0 without a critic."""
        return {"none": 0, "chunk": 1, "action": self.chunk}[self.value_head]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch names it."""
        return getattr(torch, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Write plain dictionaries, lists and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> OpenVLAOFTConfig:
        """Inverse of `to_json`.

        Raises:
            ConfigError: a field is missing, unknown or of the wrong kind.
        """
        values = dict(fields)
        try:
            for sizes in (values, values["dino"], values["siglip"]):
                check_sizes(sizes)
            values["dino"], values["siglip"] = TowerConfig(**values["dino"]), TowerConfig(**values["siglip"])
            values["value_hidden"] = tuple(values["value_hidden"])
            values["norm_stats"] = {k: NormStats.from_json(v) for k, v in values["norm_stats"].items()}
            return cls(**values)
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"The policy's config.json does not describe an OpenVLA-OFT policy ({error}). "
                "Copy it again, or save the policy with this version of asyncrl."
            ) from error


def require_trainable(config: OpenVLAOFTConfig) -> None:
    """Refuse a policy that cannot be trained in a world model, which draws one picture for each of 8 steps.

    Such a policy can be evaluated and trained in simulators.

    Raises:
        ConfigError: The policy makes other than 8 steps per decision, or needs several pictures or
            proprioception.
    """
    has = ""
    if config.chunk != CHUNK:
        has = f"makes {config.chunk} steps per decision (chunk), but world models draw {CHUNK}"
    elif config.images > 1:
        has = f"looks at {config.images} pictures per decision, but a world model draws one"
    elif config.proprio_dim:
        has = f"needs proprioception of {config.proprio_dim} numbers, but a world model draws pictures only"
    if has:
        raise ConfigError(
            f"--policy cannot be trained in a world model: it {has}. It can be evaluated and trained in "
            "simulators (--world libero_spatial); for a world model choose a policy that was fine-tuned with "
            f"one picture, without proprioception and with chunk {CHUNK}."
        )


def _check(config: OpenVLAOFTConfig) -> None:
    problem = _size_problem(config) or _meaning_problem(config) or _proprio_problem(config)
    if problem:
        raise ConfigError(f"The policy's configuration cannot work: {problem}. Correct config.json.")


def _size_problem(config: OpenVLAOFTConfig) -> str:
    problem = ""
    if config.image_size % config.patch_size:
        problem = f"patches of {config.patch_size} pixels do not tile a picture of {config.image_size}"
    elif config.llm_width % config.llm_heads:
        problem = f"{config.llm_heads} attention heads do not divide the width {config.llm_width}"
    elif not BINS < config.token_count < config.vocab_size:
        problem = f"{config.token_count} tokens need {BINS} action bins below and a padding row above them, "
        problem += f"but the embedding has {config.vocab_size} rows"
    elif min(config.chunk, config.action_dim, config.images) < 1 or config.proprio_dim < 0:
        problem = "chunk, action_dim and images must be at least 1 and proprio_dim at least 0, but they are "
        problem += f"{config.chunk}, {config.action_dim}, {config.images} and {config.proprio_dim}"
    return problem


_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "value_head": ("none", "chunk", "action"),
    "decoding": ("parallel", "autoregressive"),
    "image_pipeline": ("rlinf", "oft"),
    "gripper": ("none", "libero", "maniskill"),
    "dtype": ("float32", "bfloat16"),
}


def _meaning_problem(config: OpenVLAOFTConfig) -> str:
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            return f"{name} is {getattr(config, name)!r} ({', '.join(choices)})"
    if config.causal and config.stop_token:
        return "decoding is autoregressive, which has no slots to put a stop token behind (stop_token)"
    if config.norm_key and config.norm_key not in config.norm_stats:
        return f"norm_key {config.norm_key!r} is not among its statistics: {sorted(config.norm_stats)}"
    if config.norm_key and len(config.norm_stats[config.norm_key].q01) != config.action_dim:
        return f"the statistics of {config.norm_key!r} do not have {config.action_dim} numbers"
    return ""


def _proprio_problem(config: OpenVLAOFTConfig) -> str:
    if not (config.proprio_dim and config.norm_key):
        return ""
    bounds = config.proprio_bounds
    found = "none" if bounds is None else f"{len(bounds.q01)}"
    if found == str(config.proprio_dim):
        return ""
    return (
        f"proprio_dim is {config.proprio_dim}, but the statistics of {config.norm_key!r} have {found} "
        "numbers of proprioception"
    )
