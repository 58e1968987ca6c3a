"""What an EVAC world knows of the hand: how it moves, where actions take it, and what the camera sees.

Letters: F frames of all episodes, W windows, B windows of a batch, C steps of a decision (8).
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import to_device
from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.loop import Schedule, minimise
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.frame_latents import window_rows
from asyncrl.records import POSE_DIM
from asyncrl.worlds.evac.files import check_kinds
from asyncrl.worlds.evac.poses import ARMS, Camera, Motions, MotionStatistics, PoseModel

LEAST_SPREAD: Final = 1e-4
"""Metres or radians: deviation that a part of a motion has at least, lest what never moves be blown up."""
LEAST_POSE_SPREAD: Final = 1e-2
"""The same of a part of a pose, which the model of poses must tell to a fraction of it."""
UNITS: Final = (0.01,) * 3 + (0.05,) * 4 + (0.5,)
"""Errors of a pose that count the same: a centimetre, a tenth of a radian (half of it in the quaternion) and
half a gripper. In units of what each part of a pose varies by, what hardly moves would count most."""
STEPS: Final = 8_000
BATCH: Final = 512
LEARNING_RATE: Final = 3e-3
"""Of the model of poses, which is small."""
CAMERAS: Final = MappingProxyType(
    {
        "tabletop": Camera(
            focal=32 / math.tan(math.radians(33 / 2)),
            centre=32.0,
            size=64,
            position=(1.06, 0.0, 0.645),
            quaternion=(-0.66444, -0.66444, 0.24191, 0.24191),
            flipped=False,
            reach=0.0,
        ),
    }
)
"""By the simulator's name, or what it begins with: its first camera."""


def check_poses(recordings: Recordings) -> None:
    """Check that it is known of every frame where the hand is."""
    if len(recordings.poses) != len(recordings.frames):
        raise ConfigError(
            "--data has recordings without poses of the robot's hand, which a world of kind evac is told. "
            "Collect all of them again in a simulator that says where its hand is, or fit another --kind."
        )


def camera_of(simulator: str, file: str) -> Camera:
    """Say where the camera stands.

    Args:
        file: JSON object with numbers of `Camera`; what it leaves out is as published. Empty: as is known.
    """
    if not file:
        for name, camera in CAMERAS.items():
            if simulator.startswith(name):
                return camera
        raise ConfigError(
            f"Where the camera of simulator {simulator!r} stands is not known here, and a world of kind evac "
            f"draws the hand as the camera sees it. Give --camera FILE: a JSON object with "
            f"{', '.join(field.name for field in fields(Camera))}."
        )
    try:
        content = json.loads(Path(file).read_text())
        check_kinds(Camera, content)
        numbers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        camera = Camera(**numbers)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--camera {file} does not describe a camera ({first_line(error)}). It is a JSON object with "
            f"{', '.join(field.name for field in fields(Camera))}."
        ) from error
    return camera


def measured_motions(recordings: Recordings) -> MotionStatistics:
    """Measure mean and deviation of what moves from one frame to the next, the same for both arms."""
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
    """Let a fresh model see poses in units of their deviation, and predict that nothing moves.

    A step moves the hand by a small part of that deviation. A model that has to learn first that a pose is
    mostly the one before is centimetres wrong long after one that begins with it: ``x = relu(x) - relu(-x)``
    goes through both layers in twice eight of their channels, and the others add nothing yet.

    Args:
        poses_F8: ``[F, 8]`` recorded poses.
    """
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
    """Compute how far a model's poses of a decision are from the true ones, in `UNITS`.

    The model goes on from its own poses, as in imagination: an error of each step is one of the next.

    Args:
        actions_BC7: ``[B, C, 7]`` float32.
        poses_BC8: ``[B, C, 8]`` float32: where they took the hand.
        first_B8: ``[B, 8]`` float32: where it was before.

    Returns:
        ``[]`` float32, mean squared error.
    """
    units = torch.tensor(UNITS, device=poses_BC8.device)
    return ((model.follow(actions_BC7, first_B8) - poses_BC8) / units).square().mean()


def fit_poses(model: PoseModel, recordings: Recordings, schedule: Schedule) -> float:
    """Train the model of poses to follow recorded hands for a decision at a time.

    Args:
        model: Trained in place, in float32.
        schedule: Its number of steps, but at most `STEPS`, and its seed; it is small and learns fast.

    Returns:
        Mean loss of the last tenth.
    """
    device = next(model.parameters()).device
    rows_W = to_device(window_rows(recordings.offsets, lambda seen: seen[:, None] - 1), device)
    actions, poses = (to_device(part, device) for part in (recordings.actions, recordings.poses))
    generator = torch.Generator().manual_seed(schedule.seed)

    def loss_at(step: int) -> Tensor:
        rows = rows_W[torch.randint(len(rows_W), (BATCH,), generator=generator).to(device)]
        return pose_loss(model, actions[rows[:, 1:]], poses[rows[:, 1:]], poses[rows[:, 0]])

    steps = min(schedule.steps, STEPS)
    return minimise("poses", model, loss_at, steps=steps, learning_rate=LEARNING_RATE, weight_decay=0.0)


@torch.no_grad()
def followed_poses(model: PoseModel, recordings: Recordings) -> Tensor:
    """Follow the hand through every episode from its first pose, as in imagination.

    That is what the network is told there. Trained on the recorded poses, it would take these for as exact as
    those and draw the hand where they say; trained on these, it learns what they are worth beside the last
    picture, which shows where the hand was.

    Returns:
        ``[F, 8]`` float32, on the model's device.
    """
    device = next(model.parameters()).device
    lengths = np.diff(recordings.offsets)
    places = np.arange(lengths.max())
    inside = places < lengths[:, None]
    rows = np.where(inside, recordings.offsets[:-1, None] + places, 0)  # behind an episode's end: any action
    actions = to_device(recordings.actions[rows[:, 1:]], device)
    first = to_device(recordings.poses[recordings.offsets[:-1]], device)
    poses = torch.cat([first[:, None], model.follow(actions, first)], dim=1)
    return poses[to_device(inside, device)]
