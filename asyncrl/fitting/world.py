"""Fits of world models: the table of kinds, their common protocol, and the fit of an autoencoder.

fresh  ->  check  ->  fit_autoencoder or take_autoencoder  ->  fit_network  ->  save    `asyncrl fit world`
load   ->  check  ->  fit_network or fine_tune  ->  save or rewrite                     with --refine
load   ->  redraw                                                      `asyncrl fit reward|policy --world`

Letters: B batch, T frames of a clip, Z latent channels, F' latent frames, h w latent grid, E episodes, N
scenes or latents of all episodes, F frames of all episodes, W windows, P frames given, C frames made (8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.tensors import require_finite, to_device, to_signed, to_uint8
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.fitting.loop import BatchSource, Schedule, minimise, prepared
from asyncrl.fitting.recording_files import FrameFile, Recordings
from asyncrl.fitting.settings import CONTEXT_SIGMA, Size
from asyncrl.observability.terminal import progress
from asyncrl.records import CHUNK
from asyncrl.worlds.files import world_class, world_kind
from asyncrl.worlds.layers import FrameVae

KINDS: Final = {
    "wan": "asyncrl.fitting.wan:WanFit",
    "opensora": "asyncrl.fitting.opensora:OpenSoraFit",
    "evac": "asyncrl.fitting.evac:EvacFit",
}
"""Short name of a kind of world, as in `registry.BUILT_IN` -> 'module:Class' of its `FittedWorld`."""
CLIP_FRAMES: Final = 17  # A causal autoencoder's 1 + 16: a latent of one frame and four of 4.
LATENT_NOISE: Final = 0.1  # The posterior's fixed deviation: the decoder tolerates a world model's errors.
FOREGROUND_WEIGHT: Final = 20.0  # Extra weight of a pixel per unit of difference from the average picture.
PRIOR_WEIGHT: Final = 1e-4  # Of the KL divergence to a standard normal prior, as far as the mean matters.
MEASURED_CLIPS: Final = 64
MEASUREMENTS: Final = 8  # Clips at a time, and rounds, that measure the latents' mean and deviation.
MEASURED_TOGETHER: Final = 8  # Of those clips, as many are encoded at once.
AT_ONCE_ON_CPU: Final = 48 * 2**20
AT_ONCE_ON_GPU: Final = 256 * 2**20  # Bytes of pictures; on a CPU their features take 100 times as much.
REDUCTION: Final = 8  # Pixels per latent pixel in height and width, frame by frame.
PIXELS_ON_CPU: Final = 2**17
PIXELS_ON_GPU: Final = 2**22  # Pixels encoded or drawn at once, frame by frame.


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """Options of certain worlds."""

    context_sigma: float = CONTEXT_SIGMA  # Noise level of the memory latent while training, in [0, 1].
    imagined_memory: float = 0.0  # Share of windows whose memory latent the network drew itself.
    camera: str = ""  # JSON file with the camera's place; empty: that of the recordings' simulator, if known.

    @classmethod
    def of(cls, config: Any) -> WorldOptions:
        """Copy the settings of the same names."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def average_pictures(recordings: Recordings) -> Tensor:
    """Average about 2,000 pictures of each of N scenes: ``[N, 3, H, W]`` in [-1, 1] on the CPU."""
    means = []
    scenes_F = np.repeat(recordings.scenes(), np.diff(recordings.offsets))
    for scene in range(int(scenes_F.max()) + 1):
        rows = np.flatnonzero(scenes_F == scene)
        some = torch.from_numpy(recordings.frames[rows[:: max(1, len(rows) // 2000)]])
        # A line of the pictures at a time: as floats all of them would take four times the memory.
        lines = [to_signed(some[:, line]).mean(0) for line in range(some.shape[1])]
        means.append(torch.stack(lines).permute(2, 0, 1))
    return torch.stack(means)


def to_video(frames_BTHW3: Tensor) -> Tensor:
    """Turn ``[B, T, H, W, 3]`` uint8 into ``[B, 3, T, H, W]`` float32 in [-1, 1]."""
    return to_signed(frames_BTHW3).permute(0, 4, 1, 2, 3)


def reconstruction_loss(drawn_B3THW: Tensor, wanted_B3THW: Tensor, background: Tensor) -> Tensor:
    """Compute absolute plus twice the squared error, heavier where a pixel differs from the average picture.

    `background`, ``[3, H, W]`` or ``[B, 3, H, W]``, and `wanted_B3THW` are in [-1, 1].
    """
    # Without the weight a decoder learns the table and forgets the cubes.
    away = (wanted_B3THW - background.unsqueeze(-3)).abs().mean(1, keepdim=True)
    error = drawn_B3THW - wanted_B3THW
    return ((1 + FOREGROUND_WEIGHT * away) * (error.abs() + 2 * error.square())).mean()


@dataclass(frozen=True)
class Latents(Sequence[Tensor]):
    """Encoded episodes, one after another; item e is ``[L, Z, h, w]`` of episode e."""

    all: Tensor  # [N, Z, h, w] float32.
    offsets: NDArray[np.int64]  # [E + 1]; episode e owns latents offsets[e] : offsets[e + 1].

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, episode: Any) -> Any:
        return self.all[int(self.offsets[episode]) : int(self.offsets[episode + 1])]


def rows_at_once(device: torch.device, most: int, frames: int, frame_bytes: int) -> int:
    """Count the episodes, at most `most`, that are encoded or drawn at once."""
    room = AT_ONCE_ON_GPU if device.type == "cuda" else AT_ONCE_ON_CPU
    return max(1, min(most, room // max(1, frames * frame_bytes)))


class FittedWorld(ABC):
    """A world of one kind while it is fitted. Its autoencoder is trained on clips of `CLIP_FRAMES` frames."""

    kind: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # Fields of `WorldOptions` that this kind has.
    fine_tunes: ClassVar[bool] = False  # True with the methods for `launch.fine_tune`, as `wan.WanFit`.

    def __init__(self, world: Any) -> None:
        networks = world.modules()
        self.world = world
        self.autoencoder: Any = networks.get("vae", networks.get("autoencoder"))

    @classmethod
    @abstractmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> Self:
        """Build fresh networks on the CPU: `size` of the latents' network, `vae_size` of the autoencoder."""

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Load a world's folder in `dtype`; None: the kind's default, float32 for our own folders."""
        world = world_class(folder)
        return cls(world.from_files(world.files(folder), device, dtype=dtype))

    @abstractmethod
    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw clips: rows ``[batch, CLIP_FRAMES]`` int64 of the pictures, episodes ``[batch]`` int64."""

    @abstractmethod
    def encode_clips(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips in [-1, 1] to the posterior's means ``[B, Z, F', h, w]``, unscaled."""

    @abstractmethod
    def decode_clips(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""

    @abstractmethod
    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Rescale latents, so that those of this mean and deviation ``[Z]`` become standard normal."""

    @abstractmethod
    def encode(self, recordings: Recordings) -> Latents:
        """Encode all episodes."""

    @abstractmethod
    def redraw(self, recordings: Recordings) -> FrameFile:
        """Pass the recorded frames through the autoencoder: ``[F, H, W, 3]`` uint8, in their order."""

    @abstractmethod
    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train all but the autoencoder on windows (published objective); return the mean loss at the end."""

    @abstractmethod
    def save(self, folder: Path, version: int) -> None:
        """Write the world in our layout, its weights in bfloat16."""

    def check(self, recordings: Recordings, options: WorldOptions) -> None:
        """Refuse recordings that this world cannot be fitted to, with a ConfigError."""
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

    def fit_autoencoder(self, recordings: Recordings, schedule: Schedule) -> float:
        """Train encoder and decoder in place with a posterior of fixed width; set the latents' statistics."""
        rng = np.random.default_rng(schedule.seed)
        device = next(self.autoencoder.parameters()).device
        generator = torch.Generator(device).manual_seed(schedule.seed)
        frames = BatchSource(recordings.frames, device)
        backgrounds_N3HW, scenes_E = average_pictures(recordings).to(device), recordings.scenes()

        def redraw(video: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            latents = self.encode_clips(video)
            return latents.float(), self.decode_clips(latents + LATENT_NOISE * noise).float()

        redraw = prepared(redraw, device, compiled=schedule.compiled)
        with torch.no_grad():
            one = self.encode_clips(
                torch.zeros(1, 3, CLIP_FRAMES, *recordings.frames.shape[1:3], device=device)
            )
        shape = (schedule.batch, *one.shape[1:])

        def loss_at(step: int) -> Tensor:
            rows, episodes = self.clips(recordings, schedule.batch, rng)
            video = to_video(frames.take(rows))
            noise = torch.randn(shape, generator=generator, device=device)
            latents, drawn = redraw(video, noise)
            background_B3HW = backgrounds_N3HW[torch.from_numpy(scenes_E[episodes]).to(device)]
            return reconstruction_loss(drawn, video, background_B3HW) + PRIOR_WEIGHT * latents.square().mean()

        loss = minimise("vae", self.autoencoder, loss_at, schedule, average=0.999, rngs=[rng, generator])
        with torch.no_grad():
            clips = (self.clips(recordings, MEASURED_CLIPS, rng)[0] for _ in range(MEASUREMENTS))
            videos = (to_video(frames.take(rows)) for rows in clips)
            parts = (part for video in videos for part in video.split(MEASURED_TOGETHER))
            raw_ZN = torch.cat([self.encode_clips(part) for part in parts]).transpose(0, 1).flatten(1)
        self.set_statistics(raw_ZN.mean(1).tolist(), raw_ZN.std(1).tolist())
        return loss

    def take_autoencoder(self, source: FittedWorld) -> None:
        """Copy the autoencoder of another world instead of fitting one."""
        raise ConfigError(
            f"--autoencoder is of the kinds opensora and evac. A {self.kind} world keeps the autoencoder of "
            "the one that it is refined from (--refine)."
        )


class FrameByFrameFit(FittedWorld):
    """A `FittedWorld` whose autoencoder encodes each frame by itself."""

    autoencoder: FrameVae

    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw frames from anywhere in an episode."""
        episodes = rng.integers(len(recordings), size=batch)
        begins, ends = recordings.offsets[episodes], recordings.offsets[episodes + 1]
        rows = rng.integers(begins[:, None], ends[:, None], size=(batch, CLIP_FRAMES))
        return torch.from_numpy(rows), episodes

    def encode_clips(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips to the posterior's means ``[B, Z, T, h, w]``."""
        vae = self.autoencoder
        moments = vae.quant_conv(vae.encoder(video_B3THW.transpose(1, 2).flatten(0, 1)))
        return moments[:, : vae.size.channels].unflatten(0, (len(video_B3THW), -1)).transpose(1, 2)

    def decode_clips(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""
        vae = self.autoencoder
        drawn = vae.decoder(vae.post_quant_conv(latents_BZFhw.transpose(1, 2).flatten(0, 1)))
        return drawn.unflatten(0, (len(latents_BZFhw), -1)).transpose(1, 2)

    @torch.no_grad()
    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Fold mean and deviation into the two 1 x 1 convolutions at the latents, exactly; the scale is 1."""
        into, out = self.autoencoder.quant_conv, self.autoencoder.post_quant_conv
        mean_Z, std_Z = (torch.tensor(numbers, device=into.weight.device) for numbers in (mean, std))
        # z' = (z - mean) / std, of which the next layer makes W z + b = (W std) z' + (b + W mean).
        channels = len(mean_Z)
        into.weight[:channels] /= std_Z[:, None, None, None]
        into.bias[:channels] = (into.bias[:channels] - mean_Z) / std_Z
        out.bias += out.weight[:, :, 0, 0] @ mean_Z
        out.weight *= std_Z[:, None, None]

    def take_autoencoder(self, source: FittedWorld) -> None:
        """Copy another world's autoencoder: both then have the same latents of a frame."""
        if not isinstance(source, FrameByFrameFit):
            raise ConfigError(
                "The world of --autoencoder encodes videos, and this --kind encodes each frame by itself. "
                "Give a world of kind opensora or evac, or leave it out."
            )
        try:
            self.autoencoder.load_state_dict(source.autoencoder.state_dict())
        except RuntimeError as error:
            raise ConfigError(
                "The autoencoder of --autoencoder has other layers than the fresh world's. Give a world that "
                "was fitted with the same --vae-size, or leave it out."
            ) from error
        size, scale = self.autoencoder.size, source.autoencoder.size.scale
        self.set_statistics([0.0] * size.channels, [size.scale / scale] * size.channels)

    @torch.no_grad()
    def encode(self, recordings: Recordings) -> Latents:
        """Encode every frame by itself: row i of `Latents.all` is frame i."""
        device, side = self.world.device, self.world.image_size // REDUCTION
        shape = (len(recordings.frames), self.autoencoder.size.channels, side, side)
        latents = torch.empty(shape, device=device)
        for piece, frames_N3HW in self._pieces(recordings, "encode"):
            latents[piece] = self.autoencoder.encode(frames_N3HW).float()
        return Latents(latents, recordings.offsets)

    @torch.no_grad()
    def redraw(self, recordings: Recordings) -> FrameFile:
        """Encode every frame by itself and draw it again."""
        count, height, width, _ = recordings.frames.shape
        drawn = FrameFile((count, height, width, 3))
        for piece, frames_N3HW in self._pieces(recordings, "redraw"):
            pictures = self.autoencoder.decode(self.autoencoder.encode(frames_N3HW))
            require_finite("world's autoencoder", pictures=pictures)
            drawn.write(piece.start, to_uint8(pictures).permute(0, 2, 3, 1).cpu().numpy())
        return drawn

    def _pieces(self, recordings: Recordings, name: str) -> Iterator[tuple[slice, Tensor]]:
        device = self.world.device
        for piece in pieces(len(recordings.frames), recordings.image_size, device, name):
            yield piece, to_signed(to_device(recordings.frames[piece], device)).permute(0, 3, 1, 2)


def pieces(count: int, side: int, device: torch.device, name: str) -> Iterator[slice]:
    """Cut the rows of ``count`` square pictures into slices that are encoded or drawn at once."""
    pixels = PIXELS_ON_GPU if device.type == "cuda" else PIXELS_ON_CPU
    size = max(1, pixels // side**2)
    for begin in progress(range(0, count, size), desc=name):
        yield slice(begin, min(begin + size, count))


def window_rows(
    offsets: NDArray[np.int64], given: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return windows ``[W, P + C]`` of rows, one for each frame with a whole decision after it.

    `given` maps counts of frames seen ``[n]``, at least 1, to the remembered frames ``[n, P]``.
    """
    windows = []
    for begin, end in pairwise(offsets.tolist()):
        seen = np.arange(1, end - begin - CHUNK + 1)
        windows.append(begin + np.concatenate([given(seen), seen[:, None] + np.arange(CHUNK)], axis=1))
    return np.concatenate(windows)


def fit_class(kind: str) -> type[FittedWorld]:
    """Import the class of a kind."""
    return resolve_name(KINDS[kind])


def load_fitted(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> FittedWorld:
    """Load a world of any kind."""
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no folder {folder.absolute()} with a world. Give one that `asyncrl fit world` "
            "wrote, or a published one; names of shipped worlds are for --refine and --autoencoder."
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
    if np.diff(recordings.offsets).max(initial=0) <= CHUNK:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imagine.")


def check_same_size(world: FittedWorld, recordings: Recordings, flag: str) -> None:
    """Refuse recordings of another picture size, with a ConfigError."""
    if (side := world.world.image_size) != recordings.image_size:
        raise ConfigError(
            f"--data has pictures of {recordings.image_size} pixels, but --{flag} draws {side}. "
            "Give recordings and a world of one size: asyncrl collect --image-size sets that of recordings."
        )


def check_picture_size(recordings: Recordings, multiple: int) -> int:
    """Return the pictures' side; ConfigError unless they are square and it is a multiple of `multiple`."""
    side = recordings.image_size
    if side % multiple:
        near = max(1, round(side / multiple)) * multiple
        raise ConfigError(
            f"--data has pictures of {side} pixels, but this kind of world cuts them into squares of "
            f"{multiple} x {multiple}. Use a multiple of {multiple}: --dataset.image-size {near} for LeRobot "
            f"and robomimic, asyncrl collect --image-size {near}, or resize the pictures that you record."
        )
    return side
