"""Fits of world models: what every kind offers, and the table of kinds. Imports no torch.

fresh  ->  fit_autoencoder or take_autoencoder  ->  fit_network  ->  save       `asyncrl fit world`
load  ->  fit_network or fine_tune  ->  save or rewrite                         with --refine
load  ->  redraw                                                      `asyncrl fit reward|policy --world`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from asyncrl.config.bounds import shown
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import CHUNK
from asyncrl.worlds.files import AS_SAVED, world_class, world_kind

if TYPE_CHECKING:
    import torch

    from asyncrl.fitting.loop import Schedule
    from asyncrl.fitting.recordings import FrameFile, Recordings

Size = Literal["tiny", "small"]
CONTEXT_SIGMA: Final = 0.1
DEFAULT_KIND: Final = "wan"
KINDS: Final = {
    "wan": "asyncrl.fitting.wan:WanFit",
    "opensora": "asyncrl.fitting.opensora:OpenSoraFit",
    "evac": "asyncrl.fitting.evac:EvacFit",
}
"""Short name of a kind of world, as in `registry.BUILT_IN` -> 'module:Class' of its `FittedWorld`."""


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """Options of some kinds only."""

    context_sigma: float = CONTEXT_SIGMA  # Noise level of the memory latent while training, in [0, 1].
    camera: str = ""  # JSON file with the camera's place; empty: that of the recordings' simulator, if known.


class FittedWorld(ABC):
    """A world of one kind while it is fitted."""

    kind: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # Fields of `WorldOptions` that this kind has.
    fine_tunes: ClassVar[bool] = False  # True with the methods for `launch.fine_tune`, as `wan.WanFit`.
    distils: ClassVar[bool] = False  # True with `fresh_decoder` and `save_decoder` (`asyncrl fit decoder`).

    def __init__(self, world: Any) -> None:
        self.world = world

    @classmethod
    @abstractmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> Self:
        """Build fresh networks on the CPU: `size` of the latents' network, `vae_size` of the autoencoder."""

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Load a folder with weights of a type; None: as the kind prefers, float32 for folders of ours."""
        world = world_class(folder)
        return cls(world.from_files(world.files(folder, AS_SAVED, {}), device, dtype=dtype))

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.world.image_size

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        self.world.to(device)

    @abstractmethod
    def fit_autoencoder(self, recordings: Recordings, schedule: Schedule) -> float:
        """Train the autoencoder in place and return the mean loss of the last tenth."""

    @abstractmethod
    def take_autoencoder(self, source: FittedWorld) -> None:
        """Copy the autoencoder of another world instead of fitting one."""

    @abstractmethod
    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train all but the autoencoder on windows (published objective); return the mean loss at the end."""

    @abstractmethod
    def redraw(self, recordings: Recordings) -> FrameFile:
        """Pass the recorded frames through the autoencoder: ``[F, H, W, 3]`` uint8, in their order."""

    @abstractmethod
    def save(self, folder: Path, version: int) -> None:
        """Write the world in our layout, its weights in bfloat16."""

    def check(self, recordings: Recordings, options: WorldOptions) -> None:
        """Refuse options of other kinds and actions of another width, with a ConfigError."""
        self.refuse_options(options)
        check_recordings(recordings, self.world.action_spec.dim)

    @classmethod
    def refuse_options(cls, options: WorldOptions) -> None:
        """Refuse options that the kind does not have, with a ConfigError."""
        for field in fields(WorldOptions):
            value = getattr(options, field.name)
            if field.name not in cls.options and value != field.default:
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} {value} means nothing to a world of kind {cls.kind}: "
                    "its published training has no such choice. Leave it out."
                )


def check_kind(kind: str) -> None:
    """Refuse a kind that is not in the table, with a ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"--kind {shown(kind)} is no kind of world that can be fitted: {', '.join(KINDS)}.")


def fit_class(kind: str) -> type[FittedWorld]:
    """Import the class of a kind."""
    check_kind(kind)
    module, name = KINDS[kind].split(":")
    return getattr(import_module(module), name)


def load_fitted(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> FittedWorld:
    """Load a world of any kind."""
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no folder {folder.absolute()} with a world. Give one that `asyncrl fit world` "
            "wrote, a published one, or the name of a shipped world."
        )
    return fit_class(world_kind(folder)).load(folder, device, dtype)


def check_recordings(recordings: Recordings, numbers: int = 0, world: str = "the world of --refine") -> None:
    """Raise ConfigError for recordings without a decision or with actions not `numbers` wide (0: any)."""
    width = recordings.actions.shape[1]
    if numbers and width != numbers:
        raise ConfigError(
            f"--data has actions of {width} numbers, but {world} takes {numbers}. Give recordings with "
            f"{numbers} numbers per action, or fit a fresh world of --kind wan or opensora, which take any."
        )
    if (recordings.offsets[1:] - recordings.offsets[:-1]).max(initial=0) <= CHUNK:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imagine.")


def check_same_size(world: FittedWorld, recordings: Recordings, flag: str) -> None:
    """Refuse recordings of another picture size, with a ConfigError."""
    if world.image_size != recordings.image_size:
        raise ConfigError(
            f"--data has pictures of {recordings.image_size} pixels, but --{flag} draws {world.image_size}. "
            "Give recordings and a world of one size: asyncrl collect --image-size sets that of recordings."
        )


def check_picture_size(recordings: Recordings, multiple: int) -> int:
    """Return the side of the pictures; a ConfigError refuses those that are not square multiples."""
    side = recordings.image_size
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ConfigError(
            f"--data has pictures of {side} pixels, but this kind of world cuts them into squares of "
            f"{multiple} x {multiple}. Use a multiple of {multiple}: --dataset.image-size {near} of a data "
            f"set, asyncrl collect --image-size {near} of a simulator."
        )
    return side
