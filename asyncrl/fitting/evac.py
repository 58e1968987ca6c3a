"""Fit an EVAC world as published (`worlds.evac.ddim`): autoencoder, model of poses, then the video U-Net.

As in imagination, the image encoder sees an episode's first frame, and maps and motions use predicted poses.

Letters: W windows, B windows of a batch, F frames of all episodes, Z latent channels, h w latent grid,
P frames remembered, C = 8 new frames.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import to_device, to_signed
from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting import world as fits
from asyncrl.fitting.loop import BatchSource, Schedule, minimise, prepared, prepared_network
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.settings import Size
from asyncrl.fitting.world import REDUCTION, FrameByFrameFit, Latents, WorldOptions
from asyncrl.records import ACTION_DIM, CHUNK, POSE_DIM
from asyncrl.worlds.evac import conditions
from asyncrl.worlds.evac.conditions import EvacConfig, EvacNetworks, Geometry
from asyncrl.worlds.evac.ddim import chunk_loss, draw
from asyncrl.worlds.evac.poses import ARMS, MOTION_DIM, Camera, Motions, MotionStatistics, PoseModel
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.evac.world import EvacWorld, memory_index, save_world
from asyncrl.worlds.layers import FrameVaeConfig

SAMPLING_STEPS: Final = 10  # Network calls per decision of a fresh world; --imagination.steps overrides it.
AVERAGE: Final = 0.9995  # Decay of the moving average of the weights.
LEAST_SPREAD: Final = 1e-4  # Least deviation of a motion in m or rad: a hand at rest is not scaled up.
LEAST_POSE_SPREAD: Final = 1e-2  # Least deviation of a pose.
UNITS: Final = (0.01,) * 3 + (0.05,) * 4 + (0.5,)
"""Pose errors that count the same: 1 cm, 0.1 rad (half of it in the quaternion), half a gripper."""
POSE_FIT: Final = Schedule(steps=8_000, batch=512, learning_rate=3e-3)  # Of the small model of poses.
CAMERAS: Final = {
    "tabletop": Camera(
        focal=32 / math.tan(math.radians(33 / 2)),
        centre=32.0,
        size=64,
        position=(1.06, 0.0, 0.645),
        quaternion=(-0.66444, -0.66444, 0.24191, 0.24191),
        flipped=False,
        reach=0.0,
    )
}
"""First camera of simulators, by the beginning of their names."""
_CHANNELS: Final = {"tiny": 32, "small": 64}


def fresh_config(
    size: Size, vae_size: Size, *, image_size: int, camera: Camera, motions: MotionStatistics
) -> EvacConfig:
    """Return the sizes of a fresh world: tiny 3.6, small 13 million parameters without the autoencoder."""
    channels = _CHANNELS[size]
    width = 2 * channels
    encoder = conditions.ImageEncoderConfig(width=width, layers=3, heads=4, mlp=4 * width, patch=8, size=64)
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
        autoencoder=getattr(FrameVaeConfig, vae_size)(),
        image_encoder=encoder,
        image_resampler=conditions.ResamplerConfig(inputs=width, queries=2 * CHUNK, **inner),
        action_resampler=conditions.ResamplerConfig(inputs=MOTION_DIM, queries=4, **inner),
        camera=camera,
        motions=motions,
        domain=0,
        schedule_steps=SAMPLING_STEPS,
    )


class EvacFit(FrameByFrameFit):
    """`FittedWorld` of EVAC. A world that is refined keeps its camera and the scale of motions."""

    kind: ClassVar = "evac"
    options: ClassVar = frozenset({"camera"})
    world: EvacWorld

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> EvacFit:
        """Build a world of the recordings' pictures, poses and camera."""
        _check_poses(recordings)
        config = fresh_config(
            size,
            vae_size,
            image_size=fits.check_picture_size(recordings, 4 * REDUCTION),
            camera=camera_of(recordings.simulator, options.camera),
            motions=measured_motions(recordings),
        )
        networks = EvacNetworks(config)
        prepare_poses(networks.pose_model, recordings.poses)
        return cls(EvacWorld(networks, config))

    def check(self, recordings: Recordings, options: WorldOptions) -> None:
        """Refuse recordings that this world cannot be fitted to, with a ConfigError."""
        self.refuse_options(options)
        _check_poses(recordings)

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the model of poses, then the network."""
        networks = self.world.networks
        networks.autoencoder.requires_grad_(False)
        fit_poses(networks.pose_model.requires_grad_(True), recordings, schedule)
        followed_F8 = followed_poses(networks.pose_model, recordings)
        pictures = BatchSource(recordings.frames, self.world.device)
        latents, maps = self.encode(recordings), self.encode_maps(followed_F8)
        cut = windows(recordings, latents, followed_F8, maps, self.world.config)
        return fit_unet(networks, self.world.config, cut, pictures, schedule)

    @torch.no_grad()
    def encode_maps(self, poses_F8: Tensor) -> Tensor:
        """Draw and encode the trajectory map of every frame: ``[F, Z, h, w]`` float32."""
        drawer = Geometry(self.world.config).to(self.world.device).drawer
        poses_F8 = poses_F8.to(self.world.device)
        rows = fits.pieces(len(poses_F8), self.world.image_size, self.world.device, "maps")
        return torch.cat(
            [self.autoencoder.encode(drawer(poses_F8[piece][None])[0]).float() for piece in rows]
        )

    def save(self, folder: Path, version: int) -> None:
        """Write the world in bfloat16; the model of poses, whose errors add up, in float32."""
        self.world.version = version
        for name, module in self.world.modules().items():
            if name != "pose_model":
                nn.Module.to(module, torch.bfloat16)  # halves the files; imagination computes in float32
        save_world(folder, self.world)


def _check_poses(recordings: Recordings) -> None:
    named = "a world of kind evac, whose published layout fixes the width of an action,"
    fits.check_recordings(recordings, ACTION_DIM, named)
    if len(recordings.poses) != len(recordings.frames):
        raise ConfigError(
            "--data has recordings without poses of the robot's hand, which a world of kind evac needs. "
            "Collect all of them again in a simulator that reports its hand's pose, or fit another --kind."
        )


@dataclass(frozen=True, kw_only=True)
class PoseWindows:
    """Remembered and new frames of each decision; each frame's latent, map and motion are stored once."""

    latents: Tensor  # [F, Z, h, w] float32.
    maps: Tensor  # [F, Z, h, w] float32 latents of the trajectory maps.
    motions: Tensor  # [F, 14] float32: normalised motion since the frame before; 0 at a first one.
    rows: Tensor  # [W, P + C] int64: the frames of each window.


def windows(
    recordings: Recordings, latents: Latents, poses_F8: Tensor, maps_FZhw: Tensor, config: EvacConfig
) -> PoseWindows:
    """Cut episodes into windows, one for each frame with eight frames after it."""
    device = maps_FZhw.device
    before_F8 = poses_F8.roll(1, 0)
    starts = to_device(recordings.offsets[:-1], device)
    before_F8[starts] = poses_F8[starts]  # no motion before the first frame

    def remembered(seen: Any) -> Any:
        return memory_index(torch.from_numpy(seen), config.history).numpy()

    return PoseWindows(
        latents=latents.all,
        maps=maps_FZhw,
        motions=Geometry(config).to(device).motions(poses_F8[None], before_F8[None])[0],
        rows=to_device(fits.window_rows(recordings.offsets, remembered), device),
    )


def fit_unet(
    networks: EvacNetworks,
    config: EvacConfig,
    windows: PoseWindows,
    pictures: BatchSource,
    schedule: Schedule,
) -> float:
    """Train the network and the networks that make its tokens, but not a published image encoder."""
    device, history = windows.latents.device, config.history
    networks.image_encoder.requires_grad_(False)
    own = config.image_encoder != conditions.ImageEncoderConfig.published()
    names = ["unet", *(["image_encoder"] if own else []), "image_resampler", "action_resampler"]
    trained = nn.ModuleDict({name: getattr(networks, name) for name in names}).requires_grad_(True)
    generator = torch.Generator().manual_seed(schedule.seed)
    rays = Geometry(config).to(device).drawer.rays
    fps = torch.full((schedule.batch,), float(config.fps), device=device)
    domain = torch.full((schedule.batch,), config.domain, device=device)

    def of_picture(pictures_BHW3: Tensor) -> Tensor:
        return networks.image_resampler(networks.image_encoder(to_signed(pictures_BHW3).permute(0, 3, 1, 2)))

    def of_motions(motions_BF14: Tensor) -> Tensor:
        return conditions.action_tokens(networks.action_resampler, motions_BF14)

    unet = prepared_network(networks.unet, device, compiled=schedule.compiled)
    image_tokens, motion_tokens = (
        prepared(part, device, compiled=schedule.compiled) for part in (of_picture, of_motions)
    )

    def loss_at(step: int) -> Tensor:
        chosen = torch.randint(len(windows.rows), (schedule.batch,), generator=generator)
        rows = windows.rows[chosen.to(device)]
        made, latents = rows[:, history:], windows.latents[rows]
        new = latents[:, history:]
        return chunk_loss(
            unet,
            latents[:, :history],
            new,
            windows.maps[made],
            rays,
            image_tokens(pictures.take(rows[:, 0])),
            motion_tokens(windows.motions[rows]),
            fps=fps,
            domain=domain,
            draws=draw(generator, new.shape, history),
        )

    return minimise("world", trained, loss_at, schedule, average=AVERAGE, rngs=[generator])


def camera_of(simulator: str, file: str) -> Camera:
    """Return the camera of a simulator, or of a JSON file with some fields of `Camera`."""
    named = ", ".join(field.name for field in fields(Camera))
    if not file:
        for name, camera in CAMERAS.items():
            if simulator.startswith(name):
                return camera
        raise ConfigError(
            f"Where the camera of simulator {simulator!r} stands is not known here, and a world of kind evac "
            f"draws the hand as the camera sees it. Give --camera FILE: a JSON object with {named}."
        )
    try:
        content = json.loads(Path(file).read_text())
        numbers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        return Camera(**numbers)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--camera {file} does not describe a camera ({first_line(error)}). It is a JSON object with "
            f"{named}."
        ) from error


def measured_motions(recordings: Recordings) -> MotionStatistics:
    """Measure mean and deviation of the motion from one frame to the next, the same for both arms."""
    after = np.delete(np.arange(len(recordings.poses)), recordings.offsets[:-1])
    plain = MotionStatistics(mean=(0.0,) * 12, std=(1.0,) * 12, stride=1)
    poses, before = (torch.from_numpy(recordings.poses[rows])[None] for rows in (after, after - 1))
    moved = Motions(plain)(poses, before)[0, :, :6].double()
    spread = moved.std(0).clamp(min=LEAST_SPREAD)
    return MotionStatistics(
        mean=tuple(moved.mean(0).tolist()) * ARMS, std=tuple(spread.tolist()) * ARMS, stride=1
    )


@torch.no_grad()
def prepare_poses(model: PoseModel, poses_F8: NDArray[np.float32]) -> None:
    """Scale a fresh model by the deviation of recorded poses ``[F, 8]``, and let it predict no motion."""
    # ``x = relu(x) - relu(-x)`` passes both layers in twice eight channels, and the others add nothing yet.
    model.abs_action_mean.copy_(torch.from_numpy(poses_F8.mean(0)))
    model.abs_action_std.copy_(torch.from_numpy(poses_F8.std(0)).clamp(min=LEAST_POSE_SPREAD))
    first, second, last = (layer for layer in model.net if isinstance(layer, nn.Linear))
    signed = torch.cat([torch.eye(POSE_DIM), -torch.eye(POSE_DIM)])  # [16, 8]
    for layer, rows in ((first, len(signed)), (second, len(signed)), (last, POSE_DIM)):
        layer.weight[:rows] = 0
        layer.bias[:rows] = 0
    first.weight[: len(signed), -POSE_DIM:] = signed
    second.weight[: len(signed), : len(signed)] = torch.eye(len(signed))
    last.weight[:, : len(signed)] = signed.T


def pose_loss(model: PoseModel, actions_BC7: Tensor, poses_BC8: Tensor, first_B8: Tensor) -> Tensor:
    """Compute the mean squared error ``[]``, in `UNITS`, of the poses predicted from `first_B8` on."""
    units = torch.tensor(UNITS, device=poses_BC8.device)
    return ((model.follow(actions_BC7, first_B8) - poses_BC8) / units).square().mean()


def fit_poses(model: PoseModel, recordings: Recordings, schedule: Schedule) -> float:
    """Train the pose model in float32 by `POSE_FIT`, with `schedule`'s seed and at most its steps."""
    device = next(model.parameters()).device
    rows_W = to_device(fits.window_rows(recordings.offsets, lambda seen: seen[:, None] - 1), device)
    actions, poses = (to_device(part, device) for part in (recordings.actions, recordings.poses))
    generator = torch.Generator().manual_seed(schedule.seed)
    own = replace(POSE_FIT, steps=min(schedule.steps, POSE_FIT.steps), kept=schedule.kept)

    def loss_at(step: int) -> Tensor:
        rows = rows_W[torch.randint(len(rows_W), (own.batch,), generator=generator).to(device)]
        return pose_loss(model, actions[rows[:, 1:]], poses[rows[:, 1:]], poses[rows[:, 0]])

    return minimise("poses", model, loss_at, own, weight_decay=0.0, rngs=[generator])


@torch.no_grad()
def followed_poses(model: PoseModel, recordings: Recordings) -> Tensor:
    """Predict the poses of every episode from its first one: ``[F, 8]`` float32 on the model's device."""
    device = next(model.parameters()).device
    lengths = np.diff(recordings.offsets)
    places = np.arange(lengths.max())
    inside = places < lengths[:, None]
    rows = np.where(inside, recordings.offsets[:-1, None] + places, 0)  # any action behind an episode's end
    actions = to_device(recordings.actions[rows[:, 1:]], device)
    first = to_device(recordings.poses[recordings.offsets[:-1]], device)
    poses = torch.cat([first[:, None], model.follow(actions, first)], dim=1)
    return poses[to_device(inside, device)]
