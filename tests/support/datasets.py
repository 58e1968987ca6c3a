"""Small data sets as LeRobot v3 and robomimic write them, made with pyarrow, PyAV and h5py alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

TOP, WRIST = "observation.images.top", "observation.images.wrist"
TOWEL = "Fold the towel."


def smooth_pictures(seed: int, steps: int, height: int = 48, width: int = 48) -> np.ndarray:
    """Pictures that a codec keeps: a slowly moving bright square on a colour, ``[T, H, W, 3]`` uint8."""
    rng = np.random.default_rng(seed)
    pictures = np.empty((steps, height, width, 3), np.uint8)
    pictures[:] = rng.integers(40, 200, 3)
    for step in range(steps):
        at = 4 + step % (width // 2)
        pictures[step, height // 4 : height // 2, at : at + 12] = 230
    return pictures


@dataclass(kw_only=True)
class Sampled:
    """One episode as other programs keep it: observation t was seen before action t."""

    task: str = TOWEL
    actions: np.ndarray
    states: np.ndarray
    rewards: np.ndarray
    success: np.ndarray
    pictures: dict[str, np.ndarray] = field(default_factory=dict)


def sampled(
    seed: int, steps: int, *, numbers: int = 14, task: str = TOWEL, cameras: Sequence[str] = (TOP,)
) -> Sampled:
    """An episode whose numbers are all different; every second one is solved by its last action."""
    rng = np.random.default_rng(seed)
    solved = np.arange(steps) == steps - 1 if seed % 2 else np.zeros(steps, bool)
    return Sampled(
        task=task,
        actions=rng.uniform(-100, 100, (steps, numbers)).astype(np.float32),
        states=rng.uniform(-3, 3, (steps, 5)).astype(np.float32),
        rewards=rng.uniform(0, 1, steps).astype(np.float32) if seed % 2 else np.zeros(steps, np.float32),
        success=solved,
        pictures={key: smooth_pictures(seed + 100 * i, steps) for i, key in enumerate(cameras)},
    )


def write_lerobot_folder(
    folder: Path,
    episodes: Sequence[Sampled],
    *,
    rate: int = 30,
    per_file: int = 2,
    video: bool = True,
    judged: bool = True,
    robot: str | None = "so100",
) -> Path:
    """Write a folder of version 3.0, with `per_file` episodes in each file of rows and each movie."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    rows_of_episodes, begin = [], 0
    for first in range(0, len(episodes), per_file):
        part, number = episodes[first : first + per_file], first // per_file
        rows, at = [], 0
        for offset, episode in enumerate(part):
            steps = len(episode.actions)
            rows += _rows(episode, first + offset, begin, tasks.index(episode.task), rate, video, judged)
            place = {"chunk_index": 0, "file_index": number}
            about: dict[str, Any] = {
                "episode_index": first + offset,
                "tasks": [episode.task],
                "length": steps,
            }
            about |= {f"data/{name}": value for name, value in place.items()}
            about |= {"dataset_from_index": begin, "dataset_to_index": begin + steps}
            for key in episode.pictures if video else ():
                seconds = {"from_timestamp": at / rate, "to_timestamp": (at + steps) / rate}
                about |= {f"videos/{key}/{name}": value for name, value in (place | seconds).items()}
            rows_of_episodes.append(about)
            begin, at = begin + steps, at + steps
        _write(pq, folder / "data" / f"chunk-000/file-{number:03d}.parquet", pa.Table.from_pylist(rows))
        for key in part[0].pictures if video else ():
            path = folder / "videos" / key / f"chunk-000/file-{number:03d}.mp4"
            write_movie(path, np.concatenate([episode.pictures[key] for episode in part]), rate)
    _write(pq, folder / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows_of_episodes))
    table = pa.table({"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    _write(pq, folder / "meta" / "tasks.parquet", table)
    info = {
        "codebase_version": "v3.0",
        "robot_type": robot,
        "total_episodes": len(episodes),
        "total_frames": begin,
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": rate,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": _features(episodes[0], video, judged),
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def _rows(
    episode: Sampled, number: int, begin: int, task: int, rate: int, video: bool, judged: bool
) -> list[dict[str, Any]]:
    rows = []
    for step in range(len(episode.actions)):
        row: dict[str, Any] = {
            "action": episode.actions[step].tolist(),
            "observation.state": episode.states[step].tolist(),
            "timestamp": step / rate,
            "frame_index": step,
            "episode_index": number,
            "index": begin + step,
            "task_index": task,
        }
        if judged:
            row |= {
                "next.reward": float(episode.rewards[step]),
                "next.success": bool(episode.success[step]),
            }
        for key in () if video else episode.pictures:
            packed = BytesIO()
            Image.fromarray(episode.pictures[key][step]).save(packed, "PNG")
            row[key] = {"bytes": packed.getvalue(), "path": None}
        rows.append(row)
    return rows


def _features(episode: Sampled, video: bool, judged: bool) -> dict[str, Any]:
    one = {"shape": [1], "names": None}
    features: dict[str, Any] = {
        key: {
            "dtype": "video" if video else "image",
            "shape": list(pictures.shape[1:]),
            "names": ["height", "width", "channels"],
        }
        for key, pictures in episode.pictures.items()
    }
    features["action"] = {"dtype": "float32", "shape": [episode.actions.shape[1]], "names": None}
    features["observation.state"] = {"dtype": "float32", "shape": [episode.states.shape[1]], "names": None}
    features |= {"timestamp": {"dtype": "float32", **one}}
    features |= {
        name: {"dtype": "int64", **one} for name in ("frame_index", "episode_index", "index", "task_index")
    }
    if judged:
        features |= {"next.reward": {"dtype": "float32", **one}, "next.success": {"dtype": "bool", **one}}
    return features


def _write(pq: Any, path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def write_movie(path: Path, pictures: np.ndarray, rate: int) -> None:
    """Write H.264 as LeRobot does: a key frame every 2 frames."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"g": "2", "crf": "18"})
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_robomimic_file(
    path: Path,
    episodes: Sequence[Sampled],
    *,
    task: str | None = "lift the cube",
    next_obs: bool = False,
    sparse: bool = True,
    channels_first: bool = False,
) -> Path:
    """Write a file as robomimic's image data sets are; its demonstrations are numbered 0, 10, 20, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20, "robots": ["Panda"]}}
        )
        for number, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{10 * number}")
            demo.attrs["num_samples"] = len(episode.actions)
            if task is not None:
                demo.attrs["ep_meta"] = json.dumps({"lang": task})
            demo["actions"] = episode.actions.astype(np.float64)
            demo["rewards"] = episode.success.astype(np.float64) if sparse else episode.rewards
            demo["dones"] = (np.arange(len(episode.actions)) == len(episode.actions) - 1).astype(np.int64)
            demo["states"] = np.zeros((len(episode.actions), 32))
            for name, key in (("agentview_image", TOP), ("robot0_eye_in_hand_image", WRIST)):
                if key in episode.pictures:
                    stored = episode.pictures[key]
                    demo[f"obs/{name}"] = stored.transpose(0, 3, 1, 2) if channels_first else stored
                    if next_obs:
                        demo[f"next_obs/{name}"] = np.concatenate([stored[1:], 255 - stored[-1:]])
            columns = {"robot0_eef_pos": (0, 3), "robot0_eef_quat": (3, 4), "robot0_gripper_qpos": (4, 5)}
            for name, (low, high) in columns.items():
                demo[f"obs/{name}"] = episode.states[:, low:high].astype(np.float64)
                if next_obs:
                    after = np.concatenate([episode.states[1:], -episode.states[-1:]])
                    demo[f"next_obs/{name}"] = after[:, low:high]
    return path
