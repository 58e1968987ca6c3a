"""Fit an EVAC world: its frame autoencoder, its model of poses, then its network and what makes its tokens.

As published (`worlds.evac.ddim`): the velocity of a chunk at a random noise level, the history noised
while the network is told that it is clean, tokens left out for a tenth of the samples. The history is chosen
as in imagination, and a window may begin at any frame. The picture that the image encoder sees is an
episode's first frame, and the poses behind maps and motions are those that the model of poses follows from an
episode's first one: that is what an imagined episode begins with and shows.

The image encoder of a fresh world is small and is trained along; the published one is kept as it is. A world
that is refined keeps its autoencoder, its camera and how motions are normalised.

Letters: W windows, B windows of a batch, F frames of all episodes, Z latent channels, h w latent grid,
P frames remembered, C = 8 new frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import to_device, to_signed
from asyncrl.fitting.autoencoder import Latents
from asyncrl.fitting.frame_file import BatchSource, FrameFile
from asyncrl.fitting.loop import Schedule, minimise, prepared, prepared_network
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.evac_poses import (
    camera_of,
    check_poses,
    fit_poses,
    followed_poses,
    measured_motions,
    prepare_poses,
)
from asyncrl.fitting.worlds.frame_latents import (
    REDUCTION,
    FrameAutoencoder,
    FrameByFrameFit,
    encode_each,
    pieces,
    redraw_each,
    window_rows,
)
from asyncrl.fitting.worlds.interface import (
    Size,
    WorldOptions,
    check_picture_size,
    check_recordings,
    refuse_options,
)
from asyncrl.records import ACTION_DIM, CHUNK
from asyncrl.worlds.evac.conditions import (
    AutoencoderConfig,
    EvacConfig,
    EvacNetworks,
    Geometry,
    ImageEncoderConfig,
    ResamplerConfig,
    action_tokens,
    decode_frames,
    encode_frames,
)
from asyncrl.worlds.evac.ddim import chunk_loss, draw
from asyncrl.worlds.evac.poses import MOTION_DIM, Camera, MotionStatistics
from asyncrl.worlds.evac.state import memory_index
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.evac.world import EvacWorld, load_world, save_world

SAMPLING_STEPS: Final = 10
"""Network calls per decision that a fresh world is saved with; --imagination.steps takes others."""
AVERAGE: Final = 0.9995
"""Decay of the moving average of the weights."""
KIND_NAMED: Final = "a world of kind evac, whose published layout fixes the width of an action,"
_CHANNELS: Final = {"tiny": 32, "small": 64}
_AUTOENCODERS: Final = {
    "tiny": AutoencoderConfig(channels=16, multipliers=(1, 2, 4, 4), res_blocks=1, groups=8, scale=1.0),
    "small": AutoencoderConfig(channels=32, multipliers=(1, 2, 3, 3), res_blocks=1, groups=8, scale=1.0),
}


def fresh_config(
    size: Size, vae_size: Size, *, image_size: int, camera: Camera, motions: MotionStatistics
) -> EvacConfig:
    """Return the sizes of a fresh world: tiny 3.6, small 13 million parameters without the autoencoder."""
    channels = _CHANNELS[size]
    width = 2 * channels
    encoder = ImageEncoderConfig(width=width, layers=3, heads=4, mlp=4 * width, patch=8, size=64)
    inner: dict[str, Any] = {"width": width, "depth": 2, "heads": 4, "head_dim": channels // 2}
    return EvacConfig(
        image_size=image_size,
        unet=UNetConfig(
            channels=channels,
            multipliers=(1, 2, 2),
            res_blocks=1,
            attention_levels=(0, 1, 2),
            head_dim=16,
            context_dim=width,
            initial_inner=channels,
            groups=8,
            domains=1,
        ),
        autoencoder=_AUTOENCODERS[vae_size],
        image_encoder=encoder,
        image_resampler=ResamplerConfig(inputs=width, queries=2 * CHUNK, **inner),
        action_resampler=ResamplerConfig(inputs=MOTION_DIM, queries=4, **inner),
        camera=camera,
        motions=motions,
        domain=0,
        schedule_steps=SAMPLING_STEPS,
    )


class EvacFit(FrameByFrameFit):
    """`FittedWorld` of EVAC."""

    options: ClassVar = frozenset({"camera"})

    def __init__(self, world: EvacWorld) -> None:
        self.world = world

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> EvacFit:
        """Make a world of the recordings' pictures, poses and camera. See `FittedWorld.fresh`."""
        refuse_options(options, EvacFit, "evac")
        check_recordings(recordings, ACTION_DIM, KIND_NAMED)
        check_poses(recordings)
        config = fresh_config(
            size,
            vae_size,
            image_size=check_picture_size(recordings, 4 * REDUCTION),
            camera=camera_of(recordings.simulator, options.camera),
            motions=measured_motions(recordings),
        )
        networks = EvacNetworks.build(config)
        prepare_poses(networks.pose_model, recordings.poses)
        return cls(EvacWorld(networks, config))

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> EvacFit:
        """Read a folder of ours or a published one."""
        return cls(load_world(folder, device=device, dtype=dtype))

    @property
    def autoencoder(self) -> FrameAutoencoder:
        """The world's autoencoder."""
        size = self.world.config.autoencoder
        return FrameAutoencoder(self.world.networks.autoencoder, size.latent, size.scale)

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the model of poses, then the network. See `FittedWorld.fit_network` and `fit_unet`."""
        refuse_options(options, EvacFit, "evac")
        check_recordings(recordings, ACTION_DIM, KIND_NAMED)
        check_poses(recordings)
        networks = self.world.networks
        networks.autoencoder.requires_grad_(False)
        fit_poses(networks.pose_model.requires_grad_(True), recordings, schedule)
        told_F8 = followed_poses(networks.pose_model, recordings)
        pictures = BatchSource(recordings.frames, self.world.device)
        latents, maps = self.encode(recordings), self.encode_maps(told_F8)
        cut = windows(recordings, latents, told_F8, maps, self.world.config)
        names = trained_names(self.world.config)
        return fit_unet(networks, self.world.config, cut, pictures, schedule, names)

    @property
    def _latent(self) -> tuple[int, int, int]:
        """Shape ``Z, h, w`` of a latent."""
        config = self.world.config
        return (config.autoencoder.latent, config.latent_size, config.latent_size)

    def encode(self, recordings: Recordings) -> Latents:
        """Encode every frame by itself."""
        return encode_each(self._encode, recordings, self._latent, self.world.device)

    @torch.no_grad()
    def encode_maps(self, poses_F8: Tensor) -> Tensor:
        """Draw and encode the trajectory map of every frame: ``[F, Z, h, w]`` float32.

        Args:
            poses_F8: ``[F, 8]`` float32 of the hand.
        """
        drawer = Geometry(self.world.config).to(self.world.device).drawer
        poses_F8 = poses_F8.to(self.world.device)
        rows = pieces(len(poses_F8), self.image_size, self.world.device, "maps")
        return torch.cat([self._encode(drawer(poses_F8[piece][None])[0]).float() for piece in rows])

    def redraw(self, recordings: Recordings) -> FrameFile:
        """Draw the recorded frames as the autoencoder draws them."""
        return redraw_each(self._encode, self._decode, recordings, self.world.device)

    def save(self, folder: Path, version: int) -> None:
        """Write the world in bfloat16; the model of poses, whose errors add up, in float32."""
        self.world.version = version
        for name, module in self.world.modules().items():
            if name != "pose_model":
                nn.Module.to(module, torch.bfloat16)  # halves the files; imagination computes in float32
        save_world(folder, self.world)

    def _encode(self, frames_N3HW: Tensor) -> Tensor:
        config = self.world.config.autoencoder
        return encode_frames(self.world.networks.autoencoder, frames_N3HW, config.scale)

    def _decode(self, latents_NZhw: Tensor) -> Tensor:
        config = self.world.config.autoencoder
        return decode_frames(self.world.networks.autoencoder, latents_NZhw, config.scale)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What each decision sees and makes. What belongs to a frame is kept once."""

    latents: Tensor
    """``[F, Z, h, w]`` float32."""
    maps: Tensor
    """``[F, Z, h, w]`` float32 latents of the trajectory maps."""
    motions: Tensor
    """``[F, 14]`` float32: what moved since the frame before, normalised; nothing at a first one."""
    rows: Tensor
    """``[W, P + C]`` int64: the frames of each window."""

    def __len__(self) -> int:
        return len(self.rows)


def windows(
    recordings: Recordings, latents: Latents, poses_F8: Tensor, maps_FZhw: Tensor, config: EvacConfig
) -> Windows:
    """Cut episodes into windows, one behind every frame with eight more behind it.

    Args:
        poses_F8: ``[F, 8]`` float32 of the hand, on the device of the maps.
    """
    device = maps_FZhw.device
    before_F8 = poses_F8.roll(1, 0)
    starts = to_device(recordings.offsets[:-1], device)
    before_F8[starts] = poses_F8[starts]  # in front of the first frame stands its own

    def remembered(seen: Any) -> Any:
        return memory_index(torch.from_numpy(seen), config.history).numpy()

    return Windows(
        latents=latents.all,
        maps=maps_FZhw,
        motions=Geometry(config).to(device).motions(poses_F8[None], before_F8[None])[0],
        rows=to_device(window_rows(recordings.offsets, remembered), device),
    )


def trained_names(config: EvacConfig) -> list[str]:
    """Name what `fit_unet` trains: the published image encoder is kept as it is."""
    own = config.image_encoder != ImageEncoderConfig.published()
    return ["unet", *(["image_encoder"] if own else []), "image_resampler", "action_resampler"]


def fit_unet(
    networks: EvacNetworks,
    config: EvacConfig,
    windows: Windows,
    pictures: BatchSource,
    schedule: Schedule,
    names: Sequence[str],
) -> float:
    """Train the network and what makes its tokens. See `worlds.evac.ddim.chunk_loss`.

    Args:
        pictures: ``[F, H, W, 3]`` uint8, as recorded: the image encoder sees the first of an episode.

    Returns:
        Mean loss of the last tenth.
    """
    device, history = windows.latents.device, config.history
    networks.image_encoder.requires_grad_(False)
    trained = nn.ModuleDict({name: getattr(networks, name) for name in names}).requires_grad_(True)
    generator = torch.Generator().manual_seed(schedule.seed)
    rays = Geometry(config).to(device).drawer.rays
    fps = torch.full((schedule.batch,), float(config.fps), device=device)
    domain = torch.full((schedule.batch,), config.domain, device=device)

    def image_tokens(pictures_BHW3: Tensor) -> Tensor:
        return networks.image_resampler(networks.image_encoder(to_signed(pictures_BHW3).permute(0, 3, 1, 2)))

    def motion_tokens(motions_BF14: Tensor) -> Tensor:
        return action_tokens(networks.action_resampler, motions_BF14)

    unet = prepared_network(networks.unet, device, compiled=schedule.compiled)
    tokens: list[Callable[..., Tensor]] = [image_tokens, motion_tokens]
    look, tell = (prepared(part, device, compiled=schedule.compiled) for part in tokens)

    def loss_at(step: int) -> Tensor:
        rows = windows.rows[torch.randint(len(windows), (schedule.batch,), generator=generator).to(device)]
        made, latents = rows[:, history:], windows.latents[rows]
        new = latents[:, history:]
        return chunk_loss(
            unet,
            latents[:, :history],
            new,
            windows.maps[made],
            rays,
            look(pictures.take(rows[:, 0])),
            tell(windows.motions[rows]),
            fps=fps,
            domain=domain,
            draws=draw(generator, new.shape, history),
        ).loss

    return minimise(
        "world",
        trained,
        loss_at,
        steps=schedule.steps,
        learning_rate=schedule.learning_rate,
        warmup=schedule.warmup,
        average=AVERAGE,
    )
