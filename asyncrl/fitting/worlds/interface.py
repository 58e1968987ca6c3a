"""What fitting needs of a kind of world, and the one table of the kinds that there are.

The commands, the fits of rewards and policies, and the measurements know worlds only through `FittedWorld`:

    fresh  ->  fit_autoencoder or take_autoencoder                     `asyncrl fit world`
    fresh or load  ->  fit_network  ->  save                           `asyncrl fit world`
    load  ->  fine_tune  ->  rewrite                                   `asyncrl fit world --refine`, of some
    load  ->  redraw                                                   `asyncrl fit reward|policy --world`
    load  ->  fresh_decoder  ->  save_decoder                          `asyncrl fit decoder`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, runtime_checkable

from asyncrl.config.bounds import shown
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import CHUNK
from asyncrl.worlds.kinds import world_kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from asyncrl.fitting.autoencoder import Latents
    from asyncrl.fitting.frame_file import FrameFile
    from asyncrl.fitting.loop import Schedule
    from asyncrl.fitting.recordings import Recordings

Size = Literal["tiny", "small"]
CONTEXT_SIGMA: Final = 0.1
"""Of `WorldOptions.context_sigma`, unless it was set."""
DEFAULT_KIND: Final = "wan"
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "wan": "asyncrl.fitting.worlds.wan:WanFit",
        "opensora": "asyncrl.fitting.worlds.opensora:OpenSoraFit",
        "evac": "asyncrl.fitting.worlds.evac:EvacFit",
    }
)
"""Short name of a kind of world, as in `registry.BUILT_IN` -> 'module:Class' of its `FittedWorld`."""


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """What some kinds of worlds can be told and others cannot."""

    context_sigma: float = CONTEXT_SIGMA
    """Noise level of the memory latent while training, in [0, 1]."""
    camera: str = ""
    """JSON file that says where the camera stands; empty: what is known of the recordings' simulator."""


class FittedWorld(Protocol):
    """A world of one kind while it is fitted."""

    options: ClassVar[frozenset[str]]
    """Fields of `WorldOptions` that mean something to this kind."""

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> Self:
        """Make networks with fresh weights for the recordings' pictures, on the CPU.

        Args:
            size: Of the network that draws latents, and of what makes its tokens.
            vae_size: Of the autoencoder.
            recordings: What it will imagine.
            options: See `WorldOptions`.

        Raises:
            ConfigError: The recordings lack what this kind needs, or an option is not for it.
        """
        ...

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Read a folder of this kind.

        Args:
            folder: Ours or a published one.
            device: Where the weights go.
            dtype: Of the weights; None: as the kind prefers, float32 for folders of ours.

        Raises:
            CheckpointError: A file is missing or does not fit.
        """
        ...

    @property
    def world(self) -> Any:
        """Return what is fitted, as it imagines (`worlds.interface.World`)."""
        ...

    @property
    def image_size(self) -> int:
        """Return height and width of the frames in pixels."""
        ...

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        ...

    def fit_autoencoder(self, recordings: Recordings, schedule: Schedule) -> float:
        """Train the autoencoder in place and return the mean loss of the last tenth; see `autoencoder`."""
        ...

    def take_autoencoder(self, source: FittedWorld) -> None:
        """Take over the autoencoder of another world instead of fitting one.

        Raises:
            ConfigError: It has other layers.
        """
        ...

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train all but the autoencoder in place by the published objective; return the mean loss at the end.

        Args:
            recordings: What it will imagine.
            schedule: Its batch is of windows, each as long as a decision and what it sees before.
            options: See `WorldOptions`.

        Raises:
            ConfigError: The recordings lack what this kind needs, or an option is not for it.
            RunError: The loss stopped being finite.
        """
        ...

    def encode(self, recordings: Recordings) -> Latents:
        """Encode all episodes: as many latents of each as this kind makes of its frames."""
        ...

    def redraw(self, recordings: Recordings) -> FrameFile:
        """Draw the recorded frames as the autoencoder draws them.

        Returns:
            ``[F, H, W, 3]`` uint8, in the recordings' order, in a temporary file.
        """
        ...

    def save(self, folder: Path, version: int) -> None:
        """Write the world in our layout, its weights in bfloat16, so that the world's class loads it."""
        ...


@runtime_checkable
class FineTunes(Protocol):
    """A kind whose network can be spread over ranks, be given adapters, and be written as it was read."""

    def network(self) -> nn.Module:
        """Return what is trained; passes are calls of it."""
        ...

    def blocks(self) -> Iterable[nn.Module]:
        """Return the units of the network that are gathered and computed again one by one."""
        ...

    def adapted_layers(self) -> set[str]:
        """Return the names in the network of the linear layers that adapters go into."""
        ...

    def types(self, source: Path) -> dict[str, torch.dtype]:
        """Return the types that the network's weights have in a world's files, by the names of parameters."""
        ...

    def check_fine_tuning(self, recordings: Recordings, options: WorldOptions) -> None:
        """Check recordings and options before any time is spent on them.

        Raises:
            ConfigError: The network cannot be trained on them.
        """
        ...

    def fine_tune(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train what is trainable of the network, however it is spread; return the mean loss at the end.

        The objective is that of `FittedWorld.fit_network`. The autoencoder's weights are gone afterwards.

        Args:
            recordings: The same on all ranks; passed `check_fine_tuning`.
            schedule: Also says which ranks share a batch, and in which parts.
            options: See `WorldOptions`.

        Raises:
            ConfigError: The batch cannot be shared out evenly.
            RunError: The loss stopped being finite, or another rank is gone.
        """
        ...

    def rewrite(self, source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
        """Write a world's folder again, in its own layout, with other weights of the network.

        Args:
            source: What `load` read; our layout or the published one.
            folder: Created; gets the same files, with the same names and types of tensors.
            tensors: All of the network's weights, by the names of its parameters, of any dtype, on the CPU.
            version: Of the world.
        """
        ...


@runtime_checkable
class DistilsDecoder(Protocol):
    """A kind whose decoder can be replaced by a tiny one, for `fit_decoder`."""

    @property
    def world(self) -> Any:
        """Return what imagines; its attribute ``decoder`` draws."""
        ...

    def fresh_decoder(self) -> nn.Module:
        """Make a tiny decoder with fresh weights for the latents and pictures of this world."""
        ...

    def save_decoder(self, folder: Path, decoder: nn.Module, fit: Mapping[str, Any]) -> None:
        """Write a tiny decoder of `fresh_decoder`, and how it was fitted, into an existing folder."""
        ...


def check_kind(kind: str) -> None:
    """Check that there is a kind of that name.

    Raises:
        ConfigError: There is none.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {shown(kind)} is no kind of world that can be fitted: {', '.join(KINDS)}.")


def fit_class(kind: str) -> type[FittedWorld]:
    """Return the class of a kind.

    Raises:
        ConfigError: There is no such kind.
    """
    check_kind(kind)
    module, name = KINDS[kind].split(":")
    return getattr(import_module(module), name)


def load_fitted(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> FittedWorld:
    """Read a world of any kind; what lies in the folder says of which. See `FittedWorld.load`.

    Raises:
        CheckpointError: The folder does not exist, or a file is missing or does not fit.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no folder {folder.absolute()} with a world. Give one that `asyncrl fit world` "
            "wrote, a published one, or the name of a shipped world."
        )
    return fit_class(world_kind(folder)).load(folder, device, dtype)


def check_recordings(recordings: Recordings, numbers: int = 0, world: str = "the world of --refine") -> None:
    """Check that there are decisions to imagine, before any time is spent on them.

    Args:
        recordings: What is to be imagined.
        numbers: Of an action, as the world takes them; 0: any, it is made for the recordings.
        world: What takes them, in words.

    Raises:
        ConfigError: Actions are not so many numbers wide, or no episode has a decision.
    """
    width = recordings.actions.shape[1]
    if numbers and width != numbers:
        raise ConfigError(
            f"--data has actions of {width} numbers, but {world} takes {numbers}. Give recordings with "
            f"{numbers} numbers per action, or fit a fresh world of --kind wan or opensora, which take any."
        )
    if (recordings.offsets[1:] - recordings.offsets[:-1]).max(initial=0) <= CHUNK:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imagine.")


def check_same_size(world: FittedWorld, recordings: Recordings, flag: str) -> None:
    """Check that a world draws pictures of the recordings' size.

    Raises:
        ConfigError: It does not.
    """
    if world.image_size != recordings.image_size:
        raise ConfigError(
            f"--data has pictures of {recordings.image_size} pixels, but --{flag} draws {world.image_size}. "
            "Give recordings and a world of one size: asyncrl collect --image-size sets that of recordings."
        )


def check_picture_size(recordings: Recordings, multiple: int) -> int:
    """Return the side of the pictures, which must be a multiple of what the networks cut them into.

    Raises:
        ConfigError: It is not, or the pictures are not square.
    """
    side = recordings.image_size
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ConfigError(
            f"--data has pictures of {side} pixels, but this kind of world cuts them into squares of "
            f"{multiple} x {multiple}. Use a multiple of {multiple}: --dataset.image-size {near} of a data "
            f"set, asyncrl collect --image-size {near} of a simulator."
        )
    return side


def refuse_options(options: WorldOptions, fitted: type[FittedWorld], kind: str) -> None:
    """Refuse what was set and does not mean anything to a kind.

    Raises:
        ConfigError: One was set.
    """
    for name in ("context_sigma", "camera"):
        value = getattr(options, name)
        if name not in fitted.options and value != getattr(WorldOptions(), name):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} means nothing to a world of kind {kind}: its published "
                "training has no such choice. Leave it out."
            )
