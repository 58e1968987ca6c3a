"""Read start states from RLinf's folders of ``traj*.npy`` and ``traj*_kir.npy``.

Each file is an array of one dict per frame: ``image`` uint8 ``[H, W, 3]``, ``delta_action`` ``[7]`` (the
action that produced the frame), ``instruction`` or ``task``, and perhaps ``init_ee_pose`` or ``abs_action``
``[8]`` (where the hand is); other keys are not looked at. The first frame is where the episode begins. A file
with four frames or more has a context: its last four frames with their actions. These are the keyframe files
(``_kir``, keyframe-initialised roll-outs): the reference frame, then four frames on the way. RLinf
(`NpyTrajectoryDatasetWrapper` and the Wan environment) goes by the number of frames and not by the name, and
so does this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from tqdm import tqdm

from asyncrl.errors import AssetError
from asyncrl.records import ACTION_DIM, POSE_DIM, StartState
from asyncrl.worlds.safe_pickle import read_object_array

CONTEXT: Final = 4
KEYFRAME_MARK: Final = "_kir"
_MAX_FRAMES: Final = 5_000
_MAX_PIXELS: Final = 4096


def trajectory_files(folder: Path, *, keyframes: bool) -> list[Path]:
    """List the trajectories of a folder in the order of their names (``traj10`` before ``traj2``).

    Args:
        keyframes: Whether files with ``_kir`` in their name count too, on an equal footing.
    """
    files = sorted(folder.glob("*.npy"), key=lambda file: file.name)
    return [file for file in files if keyframes or KEYFRAME_MARK not in file.name]


def load_trajectories(folder: Path, *, keyframes: bool, image_size: int = 0) -> list[StartState]:
    """Read one start state per trajectory of a folder.

    Args:
        folder: Holds ``*.npy``.
        keyframes: Whether to use files with ``_kir`` in their name.
    """
    files = trajectory_files(folder, keyframes=keyframes)
    if not files:
        raise AssetError(
            f"{folder} holds no trajectories to start from (looked for *.npy"
            f"{'' if keyframes else ' without _kir, because of --no-keyframes'}). Set --start-states."
        )
    shown = tqdm(files, desc="start states", unit="file", delay=2, leave=False)
    return [load_trajectory(file, image_size=image_size) for file in shown]


def load_trajectory(file: Path, *, image_size: int = 0) -> StartState:
    """Read the start state of one trajectory; its name is the file's, without ``.npy``."""
    frames = read_object_array(file)
    if not 1 <= len(frames) <= _MAX_FRAMES:
        raise AssetError(f"{file} has {len(frames)} frames; between 1 and {_MAX_FRAMES} can be read.")
    if not all(isinstance(frame, dict) for frame in frames):
        raise AssetError(f"{file} holds something else than one dict per frame. Use RLinf's layout.")
    context = frames[-CONTEXT:] if len(frames) >= CONTEXT else []
    images = np.stack(_alike([_image(frame, file) for frame in (frames[0], *context)], file))
    if image_size and images.shape[1:3] != (image_size, image_size):
        images = resized(images, image_size)
    actions = [_action(frame, file) for frame in context]
    return StartState(
        name=file.stem,
        task=_task(frames[0], file),
        frame=images[0],
        context_frames=images[1:],
        context_actions=np.array(actions, dtype=np.float32).reshape(-1, ACTION_DIM),
        ee_pose=_pose(frames[-1] if context else frames[0]),
    )


def resized(images_NHW3: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize ``[N, H, W, 3]`` uint8 to ``[N, size, size, 3]`` uint8: bilinear, corners not aligned."""
    floats = torch.from_numpy(np.ascontiguousarray(images_NHW3)).permute(0, 3, 1, 2).float()
    drawn = functional.interpolate(floats, size=(size, size), mode="bilinear", align_corners=False)
    return drawn.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def _alike(images: Sequence[NDArray[np.uint8]], file: Path) -> Sequence[NDArray[np.uint8]]:
    shapes = sorted({image.shape for image in images})
    if len(shapes) != 1:
        raise AssetError(f"{file}: frames differ in shape, {list(shapes[0])} and {list(shapes[-1])}.")
    return images


def _image(frame: Mapping[str, Any], file: Path) -> NDArray[np.uint8]:
    image = frame.get("image")
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
        seen = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise AssetError(f"{file}: 'image' is {seen}, expected uint8 [H, W, 3]. Use RLinf's layout.")
    height, width, channels = image.shape
    if channels != 3 or not 1 <= height <= _MAX_PIXELS or not 1 <= width <= _MAX_PIXELS:
        raise AssetError(
            f"{file}: 'image' has the shape {list(image.shape)}, expected [H, W, 3] of 1 to {_MAX_PIXELS} "
            "pixels a side. Use RLinf's layout."
        )
    return image


def _action(frame: Mapping[str, Any], file: Path) -> NDArray[np.float32]:
    """Read the action that produced a frame: ``[7]`` float32."""
    action = frame.get("delta_action")
    if isinstance(action, (list, tuple)) and all(type(n) in (int, float) and abs(n) < 1e9 for n in action):
        action = np.array(action, dtype=np.float64)
    if isinstance(action, np.ndarray) and action.shape == (ACTION_DIM,):
        with np.errstate(over="ignore"):
            action = action.astype(np.float32)
        if np.isfinite(action).all():
            return action
    raise AssetError(
        f"{file}: 'delta_action' of a frame is missing or is not {ACTION_DIM} finite numbers. It is the "
        "action that produced the frame; use RLinf's layout."
    )


def _pose(frame: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Read where the hand is at a frame: ``[8]`` float32; None where nothing says it."""
    for key in ("init_ee_pose", "abs_action"):
        pose = frame.get(key)
        if isinstance(pose, (list, tuple)) and all(type(n) in (int, float) and abs(n) < 1e9 for n in pose):
            pose = np.array(pose, dtype=np.float64)
        if isinstance(pose, np.ndarray) and pose.shape == (POSE_DIM,):
            with np.errstate(over="ignore"):
                pose = pose.astype(np.float32)
            if np.isfinite(pose).all():
                return pose
    return None


def _task(frame: Mapping[str, Any], file: Path) -> str:
    """Read the instruction as records want it: lower case, without a full stop."""
    for key in ("instruction", "task"):
        text = frame.get(key)
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        if isinstance(text, str) and text.strip():
            return text.strip().rstrip(".").lower()
    raise AssetError(f"{file}: the first frame has neither 'instruction' nor 'task'. Use RLinf's layout.")
