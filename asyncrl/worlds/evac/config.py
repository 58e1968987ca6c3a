"""Sizes and conventions of a whole EVAC world, as its folder says them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from asyncrl.records import CHUNK
from asyncrl.storage.untrusted import check_sizes, shortened
from asyncrl.worlds.evac.autoencoder import AutoencoderConfig
from asyncrl.worlds.evac.ddim import LEVELS
from asyncrl.worlds.evac.image_tokens import ImageEncoderConfig
from asyncrl.worlds.evac.maps import Camera
from asyncrl.worlds.evac.poses import MOTION_DIM, MotionStatistics
from asyncrl.worlds.evac.resampler import ResamplerConfig
from asyncrl.worlds.evac.unet import UNetConfig

_PARTS = {
    "unet": UNetConfig,
    "autoencoder": AutoencoderConfig,
    "image_encoder": ImageEncoderConfig,
    "image_resampler": ResamplerConfig,
    "action_resampler": ResamplerConfig,
    "camera": Camera,
    "motions": MotionStatistics,
}


@dataclass(frozen=True, kw_only=True)
class EvacConfig:
    """Everything about an EVAC world but its weights."""

    image_size: int
    """Height and width of the frames in pixels."""
    unet: UNetConfig
    autoencoder: AutoencoderConfig
    image_encoder: ImageEncoderConfig
    image_resampler: ResamplerConfig
    action_resampler: ResamplerConfig
    camera: Camera = field(default_factory=Camera)
    motions: MotionStatistics = field(default_factory=MotionStatistics)
    pose_hidden: int = 64
    """Inner width of the model of the hand's poses."""
    history: int = 4
    """Earlier frames that the network sees."""
    fps: int = 2
    """What the network is told of the speed."""
    domain: int = 11
    """What the network is told of the robot; 11: AgiBot World."""
    schedule_steps: int = 50
    """Network calls per decision."""

    def __post_init__(self) -> None:
        """Check that the parts fit together.

        Raises:
            ValueError: They do not; says which sizes differ.
        """
        latent, unet = self.autoencoder.latent, self.unet
        pairs = {
            "channels of the network": (unet.in_channels, 3 * latent + 7),
            "channels that it predicts": (unet.out_channels, latent),
            "inputs of the image resampler": (self.image_resampler.inputs, self.image_encoder.width),
            "inputs of the action resampler": (self.action_resampler.inputs, MOTION_DIM),
            "width of the image tokens": (self.image_resampler.width, unet.context_dim),
            "width of the action tokens": (self.action_resampler.width, unet.context_dim),
        }
        for what, (found, needed) in pairs.items():
            if found != needed:
                raise ValueError(f"{what} is {found}, and the other parts need {needed}")
        encoder = self.image_encoder
        whole = {
            "channels of the network": (unet.channels, unet.groups),
            "channels of the network, in heads,": (unet.channels, unet.head_dim),
            "initial_inner": (unet.initial_inner, unet.head_dim),
            "channels of the autoencoder": (self.autoencoder.channels, self.autoencoder.groups),
            "width of the image encoder": (encoder.width, encoder.heads),
            "size of the image encoder": (encoder.size, encoder.patch),
        }
        for what, (found, unit) in whole.items():
            if unit < 1 or found < unit or found % unit:
                raise ValueError(f"{what} is {found}, expected a multiple of {unit}")
        smallest = self.autoencoder.reduction * 2 ** (len(unet.multipliers) - 1)
        if self.image_size < smallest or self.image_size % smallest:
            raise ValueError(f"image_size is {self.image_size}, expected a multiple of {smallest}")
        if self.history < 2 or not 1 <= self.schedule_steps <= LEVELS or not 0 <= self.domain < unet.domains:
            raise ValueError(
                f"history must be at least 2, schedule_steps 1 to {LEVELS}, and domain one of the network's"
            )

    @property
    def latent_size(self) -> int:
        """Height and width of the latents."""
        return self.image_size // self.autoencoder.reduction

    @property
    def frames(self) -> int:
        """Frames that the network sees at once."""
        return self.history + CHUNK

    @classmethod
    def tiny(cls, image_size: int = 32) -> EvacConfig:
        """A size for tests and small pictures."""
        unet, encoder = UNetConfig.tiny(), ImageEncoderConfig.tiny()
        inner = {"width": unet.context_dim, "depth": 1, "heads": 2, "head_dim": 8}
        return cls(
            image_size=image_size,
            unet=unet,
            autoencoder=AutoencoderConfig.tiny(),
            image_encoder=encoder,
            image_resampler=ResamplerConfig(inputs=encoder.width, queries=4, **inner),
            action_resampler=ResamplerConfig(inputs=MOTION_DIM, queries=3, **inner),
            schedule_steps=3,
        )

    @classmethod
    def published(cls) -> EvacConfig:
        """The size published for LIBERO: pictures of 256 pixels, chunks of 8."""
        return cls(
            image_size=256,
            unet=UNetConfig.published(),
            autoencoder=AutoencoderConfig.published(),
            image_encoder=ImageEncoderConfig.published(),
            image_resampler=ResamplerConfig.published_image(CHUNK),
            action_resampler=ResamplerConfig.published_actions(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvacConfig:
        """Read what `to_json` wrote.

        Raises:
            ValueError: A part is missing or unknown, a size is impossible, or the parts do not fit.
            TypeError: Likewise.
        """
        values = dict(content)
        check_sizes(values)
        check_kinds(cls, values)
        for name, kind in _PARTS.items():
            part = values.get(name, {})
            if not isinstance(part, Mapping):
                raise ValueError(f"{name} is no object")
            check_sizes(part)
            check_kinds(kind, part)
            values[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in part.items()})
        return cls(**values)


def check_kinds(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Check that the fields of a dataclass get numbers of the kind that they are declared with.

    Raises:
        ValueError: One does not; names it.
    """
    for field_ in fields(kind):
        declared = re.fullmatch(r"(tuple\[)?(int|float|bool)\b.*", str(field_.type))
        if declared is None or field_.name not in values:
            continue
        value = values[field_.name]
        many = declared[1] is not None
        wanted = {"int": (int,), "float": (int, float), "bool": (bool,)}[declared[2]]
        if many != isinstance(value, list | tuple) or (many and not value):
            raise ValueError(f"{field_.name} is {shortened(value)}, expected {field_.type}")
        if not all(type(number) in wanted for number in (value if many else (value,))):
            raise ValueError(f"{field_.name} is {shortened(value)}, expected {field_.type}")
