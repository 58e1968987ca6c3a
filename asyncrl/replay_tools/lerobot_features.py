"""Describe the columns of a LeRobot folder, and the folder: what meta/info.json says."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.replay_tools.samples import Samples, camera_name

IMAGE: Final = "observation.images.agentview"
STATE: Final = "observation.state"
CHUNK: Final = "decision.actions"
"""All actions of a decision, step by step, where a sample is a decision."""
_ACTION = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """What every sample of a data set has; one folder holds samples of one layout."""

    cameras: int
    size: tuple[int, int]
    """Height and width of the pictures in pixels."""
    numbers: int
    """Of an action."""
    chunk: int
    """Numbers of all actions of a decision; 0: a sample is a step."""
    states: int
    """Numbers of a state; 0: it is not known."""

    @classmethod
    def of(cls, samples: Samples) -> SampleLayout:
        """Return the layout of an episode's samples."""
        return cls(
            cameras=1 + samples.more_images.shape[1],
            size=(samples.images.shape[1], samples.images.shape[2]),
            numbers=samples.actions.shape[1],
            chunk=samples.chunks.shape[1],
            states=samples.states.shape[1],
        )

    @property
    def image_keys(self) -> list[str]:
        """Names of the cameras' columns, the first one first."""
        return [IMAGE, *(f"observation.images.{camera_name(n)}" for n in range(self.cameras - 1))]

    def features(self) -> dict[str, dict[str, Any]]:
        """Return the columns that are tables, in their order."""
        names = _ACTION if self.numbers == len(_ACTION) else [f"action_{i}" for i in range(self.numbers)]
        state = {
            "dtype": "float32",
            "shape": [self.states],
            "names": [f"state_{i}" for i in range(self.states)],
        }
        chunk = {"dtype": "float32", "shape": [self.chunk], "names": None}
        return {
            **({STATE: state} if self.states else {}),
            "action": {"dtype": "float32", "shape": [self.numbers], "names": names},
            **({CHUNK: chunk} if self.chunk else {}),
            "next.reward": _number("float32"),
            "next.done": _number("bool"),
            "next.success": _number("bool"),
            "timestamp": _number("float32"),
            "frame_index": _number("int64"),
            "episode_index": _number("int64"),
            "index": _number("int64"),
            "task_index": _number("int64"),
        }

    def videos(self, fps: float) -> dict[str, dict[str, Any]]:
        """Return the columns that are movies; an odd height or width loses a row or column in them."""
        height, width = (side // 2 * 2 for side in self.size)
        about = {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        }
        names = ["height", "width", "channels"]
        video = {"dtype": "video", "shape": [height, width, 3], "names": names, "info": about}
        return {key: dict(video) for key in self.image_keys}


def _number(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "names": None}


def whole_or_float(rate: Fraction) -> float:
    """Return frames per second as info.json has them: a whole number where they are one."""
    return int(rate) if rate.denominator == 1 else float(rate)


def info_of(
    layout: SampleLayout, rate: Fraction, *, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    """Describe a data set.

    Args:
        rate: Samples per second.
    """
    fps = whole_or_float(rate)
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
        "features": layout.videos(fps) | layout.features(),
    }


def episode_row(
    row: StoredEpisode, layout: SampleLayout, rate: Fraction, number: int, begin: int, end: int
) -> dict[str, Any]:
    """Return one row of meta/episodes: what LeRobot asks for, then where the episode comes from.

    Args:
        rate: Samples per second.
    """
    position = {"chunk_index": 0, "file_index": 0}
    seconds = {"from_timestamp": float(begin / rate), "to_timestamp": float(end / rate)}
    places = {f"videos/{key}/{n}": v for key in layout.image_keys for n, v in (position | seconds).items()}
    return {
        "episode_index": number,
        "tasks": [row.episode.task],
        "length": end - begin,
        **{f"data/{name}": value for name, value in position.items()},
        "dataset_from_index": begin,
        "dataset_to_index": end,
        **places,
        **{f"meta/episodes/{name}": value for name, value in position.items()},
        "asyncrl/episode_id": row.episode.episode_id,
        "asyncrl/success": row.episode.success,
        "asyncrl/policy_version": row.episode.oldest_version,
    }
