"""Sizes and conventions of an OpenVLA(-OFT) policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.action_tokens import BINS, Gripper, NormStats
from asyncrl.records import CHUNK, Bounds
from asyncrl.storage.untrusted import Typed

Passes = Literal["acting", "checkpointed", "kept"]
PROMPT: Final = 35  # Tokens of a prompt of LIBERO.
_REGISTERS: Final = 5  # Class and register tokens of DINOv2.
_ACTING, _KEPT, _WORKING = (8, 3), (7, 3), (14, 6)
"""Numbers per token, in widths of a block and of its MLP; measured in docs/measurements/run_speed.md."""


@dataclass(frozen=True, kw_only=True)
class TowerConfig(Typed):
    """Size of one vision transformer."""

    width: int  # Features per patch.
    depth: int  # Blocks of the published tower; depth - 1 are built.
    heads: int  # Attention heads; divides `width`.
    mlp: int  # Hidden features of a block's MLP; in DINOv2 a multiple of `width`.


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTConfig(Typed):
    """Sizes of the policy and the meaning of its tokens; the entry `asyncrl` of its `config.json`."""

    image_size: int  # Height and width of the towers' picture, in pixels
    patch_size: int  # Height and width of a patch, in pixels
    dino: TowerConfig
    siglip: TowerConfig
    llm_width: int
    llm_layers: int
    llm_heads: int
    llm_mlp: int  # Hidden features of the language model's MLPs
    vocab_size: int  # Rows of the embedding, padding included
    token_count: int  # Without padding, whose id it is. The last 256 tokens are the action bins
    value_hidden: tuple[int, int]  # Hidden features of the value head
    value_head: Literal["none", "chunk", "action"] = "none"
    """chunk: a critic gives one value per decision. action: one per step."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """parallel: one pass that attends both ways (OpenVLA-OFT). autoregressive: token by token (OpenVLA)."""
    chunk: int = 8  # Steps per decision. OpenVLA as published makes 1.
    action_dim: int = 7  # Numbers per step; the last one is the gripper
    stop_token: bool = False  # `</s>` behind the slots, as in supervised OFT training, not in RLinf's
    images: int = 1  # Pictures per decision, in the sequence's order (main camera, wrist camera, ...)
    image_pipeline: Literal["rlinf", "oft"] = "rlinf"
    """rlinf: frames of another size are resized (bicubic), nothing else. oft: `preprocess.prepare_oft`."""
    proprio_dim: int = 0  # Numbers of the robot's state, one token behind the patches; 0: not seen
    gripper: Gripper = "none"
    """libero: ``-sign(2 g - 1)``, LIBERO's -1 = open. maniskill: ``2 (g > 0.5) - 1``, where 1 = open."""
    norm_key: str = ""  # Entry of `norm_stats` to scale with; empty: nothing is scaled
    norm_stats: Mapping[str, NormStats] = field(default_factory=dict)  # Ranges by data set
    rms_eps: float = 1e-6  # Epsilon of the Llama norms
    dtype: Literal["float32", "bfloat16"] = "float32"  # Of computing; logits and values are float32

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
            problem = next(_problems(self), "")
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"The policy's configuration cannot work: {problem}. Correct config.json.")

    @classmethod
    def tiny(cls, **changes: Any) -> OpenVLAOFTConfig:
        """Return a size of about two million parameters."""
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
        return cls.tiny(**({"value_hidden": (128, 64)} | sizes | changes))

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
        """Positions between the first two prompt tokens: patches of all pictures, proprioception."""
        return self.images * self.patches + (self.proprio_dim > 0)

    @property
    def causal(self) -> bool:
        """True if a position sees only those before it."""
        return self.decoding == "autoregressive"

    @property
    def proprio_bounds(self) -> Bounds | None:
        """Statistics that proprioception is scaled with; None: it is not scaled."""
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

    def activation_bytes(self, rows: int, passes: Passes, itemsize: int) -> int:
        """Estimate the memory of passes over `rows` decisions, without the weights, in bytes."""
        patches = self.images * self.patches
        stacks = (  # tokens, width, MLP, blocks
            (patches + self.images * _REGISTERS, self.dino.width, self.dino.mlp, self.dino.depth),
            (patches, self.siglip.width, self.siglip.mlp, self.siglip.depth),
            (self.prefix + PROMPT + self.slots, self.llm_width, self.llm_mlp, self.llm_layers),
        )
        one, more = _ACTING if passes == "acting" else _WORKING
        kept = {"acting": (0, 0), "checkpointed": (1, 0), "kept": _KEPT}[passes]
        working = max(tokens * (one * width + more * mlp) for tokens, width, mlp, _ in stacks)
        for tokens, width, mlp, blocks in stacks:
            working += blocks * tokens * (kept[0] * width + kept[1] * mlp)
        return rows * working * itemsize

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> OpenVLAOFTConfig:
        """Inverse of `to_json`."""
        values = dict(fields)
        try:
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
    """Raise ConfigError if a world model, which draws one picture for each of 8 steps, cannot train it."""
    needs = {
        f"makes {config.chunk} steps per decision (chunk)": config.chunk != CHUNK,
        f"looks at {config.images} pictures per decision": config.images > 1,
        f"needs proprioception of {config.proprio_dim} numbers": config.proprio_dim,
    }
    if has := [need for need, wrong in needs.items() if wrong]:
        raise ConfigError(
            f"--policy cannot be trained in a world model, which draws one picture and {CHUNK} steps: it "
            f"{' and '.join(has)}. It can be evaluated and trained in simulators (--world libero_spatial)."
        )


def _problems(config: OpenVLAOFTConfig) -> Iterator[str]:
    if min(config.chunk, config.action_dim, config.images) < 1 or config.proprio_dim < 0:
        yield (
            "chunk, action_dim and images must be at least 1 and proprio_dim at least 0, but they are "
            f"{config.chunk}, {config.action_dim}, {config.images} and {config.proprio_dim}"
        )
    llm = (config.llm_width, config.llm_heads)
    for width, heads in (llm, *((tower.width, tower.heads) for tower in (config.dino, config.siglip))):
        if not heads or width % heads:
            yield f"{heads} heads do not divide a width of {width}"
    if not BINS < config.token_count < config.vocab_size or not 0 < config.patch_size <= config.image_size:
        yield (
            f"token_count {config.token_count} must be between {BINS} and vocab_size {config.vocab_size}, "
            f"and patch_size {config.patch_size} between 1 and image_size {config.image_size}"
        )
    if not 0 < config.rms_eps < 1:
        yield f"rms_eps is {config.rms_eps}, expected a small number above 0"
    if config.causal and config.stop_token:
        yield "decoding is autoregressive, which has no slots to put a stop token behind (stop_token)"
    if not config.norm_key:
        return
    if config.norm_key not in config.norm_stats:
        yield f"norm_key {config.norm_key!r} is not among its statistics: {sorted(config.norm_stats)}"
    elif problem := config.norm_stats[config.norm_key].problem(config.action_dim):
        yield f"the statistics of {config.norm_key!r} {problem}"
    elif config.proprio_dim:
        bounds = config.proprio_bounds
        problem = "have none" if bounds is None else bounds.problem(config.proprio_dim)
        if problem:
            yield f"proprio_dim is {config.proprio_dim}, but of proprioception the statistics {problem}"
