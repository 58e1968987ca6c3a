"""Write recordings as the trajectories that RLinf's world-model environments begin with.

    traj00003.npy                 the first frame of episode 3
    traj00003_step0040_kir.npy    its first frame, then the four frames up to step 40: a key frame

Each file is an array of one dict per frame: `image` uint8 ``[H, W, 3]``, `delta_action` float32 ``[7]`` (the
action that produced the frame) and `instruction`; where the recordings say it, `init_ee_pose` and
`abs_action` float32 ``[8]``, both where the hand is in that very frame. RLinf tells the two kinds apart by
the number of frames, and takes every file of a folder as often as any other. Key frames are those of
`keyframes`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.starts import keyframes
from asyncrl.records import ACTION_DIM
from asyncrl.storage.atomic import replacing
from asyncrl.worlds.rlinf_start_states import CONTEXT, KEYFRAME_MARK


def write_trajectories(
    recordings: Recordings, folder: Path, *, with_keyframes: bool = True
) -> tuple[int, int]:
    """Write every episode's start and key frames.

    Args:
        folder: Created when missing; must not hold trajectories.

    Returns:
        Ordinary starts and key frames that were written.

    Raises:
        ConfigError: The folder holds trajectories, or actions are not 7 numbers wide.
    """
    if (width := recordings.actions.shape[1]) != ACTION_DIM:
        raise ConfigError(
            f"DATA has actions of {width} numbers, but RLinf's trajectories hold {ACTION_DIM}. Export "
            f"recordings of a simulator with {ACTION_DIM}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.npy")):
        raise ConfigError(f"{folder} already holds trajectories; they are not overwritten. Choose another.")
    written = 0
    for episode in tqdm(range(len(recordings)), desc="export", unit="episode", mininterval=2.0):
        span = recordings.span(episode)
        _write(folder / f"traj{episode:05d}.npy", recordings, episode, [0])
        if not with_keyframes:
            continue
        for step in keyframes(recordings.actions[span], recordings.success[span]):
            steps = [0, *range(step - CONTEXT + 1, step + 1)]
            name = f"traj{episode:05d}_step{step:04d}{KEYFRAME_MARK}.npy"
            _write(folder / name, recordings, episode, steps)
            written += 1
    return len(recordings), written


def _write(path: Path, recordings: Recordings, episode: int, steps: list[int]) -> None:
    rows = int(recordings.offsets[episode]) + np.array(steps)
    frames = np.empty(len(rows), object)
    for place, (image, action) in enumerate(
        zip(recordings.frames[rows], recordings.actions[rows], strict=True)
    ):
        frames[place] = {
            "image": image.copy(),
            "delta_action": action.astype(np.float32),
            "instruction": recordings.tasks[episode],
        }
        if len(recordings.poses):
            pose = recordings.poses[rows[place]]
            frames[place] |= {"init_ee_pose": pose.copy(), "abs_action": pose.copy()}
    with replacing(path) as part, part.open("wb") as file:
        np.save(file, frames, allow_pickle=True)  # RLinf's format is a pickle; it is written, never loaded
