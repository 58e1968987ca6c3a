"""What `meta/info.json` of a LeRobot v3.0 data set says."""

from __future__ import annotations

from typing import Any, Final

IMAGE: Final = "observation.images.agentview"
_ACTION = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]


def _number(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "names": None}


FEATURES: Final[dict[str, dict[str, Any]]] = {
    IMAGE: {"dtype": "video", "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": [7], "names": _ACTION},
    "next.reward": _number("float32"),
    "next.done": _number("bool"),
    "next.success": _number("bool"),
    "timestamp": _number("float32"),
    "frame_index": _number("int64"),
    "episode_index": _number("int64"),
    "index": _number("int64"),
    "task_index": _number("int64"),
}
"""The columns; the shape of the images is known once there are some."""


def info_of(episodes: int, frames: int, tasks: int, size: tuple[int, int], fps: int) -> dict[str, Any]:
    """Describe a data set.

    Args:
        episodes: How many.
        frames: Of all episodes.
        tasks: Different ones.
        size: Height and width of the frames in pixels.
        fps: Frames per second.
    """
    video = {
        "video.height": size[0],
        "video.width": size[1],
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
    image = FEATURES[IMAGE] | {"shape": [*size, 3], "info": video}
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": FEATURES | {IMAGE: image},
    }
