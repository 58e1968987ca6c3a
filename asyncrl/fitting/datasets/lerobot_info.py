"""Read what a LeRobot v3 folder says about itself: features, steps per second, instructions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError, first_line
from asyncrl.fitting.datasets.lerobot_tables import (
    batches,
    columns_of,
    numbers_in,
    reading_table,
    texts_in,
)
from asyncrl.storage.bounded_json import check_types, load_json, shortened

INFO: Final = "meta/info.json"
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""Where version 3.0 keeps rows and movies."""


def read_info(path: Path) -> tuple[dict[str, dict[str, Any]], float, str]:
    """Return a folder's features, its steps per second and the robot, if that is said."""
    try:
        info = load_json(path / INFO, dict)
        check_types(info, {"codebase_version": str, "fps": float, "features": dict})
        version, rate = info["codebase_version"], float(info["fps"])
        if not version.startswith("v3."):
            raise ConfigError(
                f"{path} is a LeRobot folder of version {shortened(version)}, and v3.0 is read. Convert it "
                "with LeRobot: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id NAME."
            )
        if not 0 < rate <= 10_000:
            raise ValueError(f"fps is {rate}")
        features = {key: _feature(key, about) for key, about in info["features"].items()}
        for name, usual in (("data_path", DATA), ("video_path", VIDEO)):
            if info.get(name) not in (None, usual):
                raise ValueError(f"{name} is {shortened(info[name])}, expected {usual}")
        robot = info.get("robot_type")
        return features, rate, robot if isinstance(robot, str) else ""
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path / INFO} cannot be read ({first_line(error)}). Download or write the data set again."
        ) from error


def _feature(key: str, about: object) -> dict[str, Any]:
    """Check one feature."""
    if not isinstance(about, dict):
        raise ValueError(f"the feature {shortened(key)} is no object")
    check_types(about, {"dtype": str, "shape": list})
    if not all(type(size) is int and 0 < size <= 2**31 for size in about["shape"]):
        raise ValueError(f"the feature {shortened(key)} has the shape {shortened(about['shape'])}")
    if "/" in key or key in ("", ".", ".."):
        raise ValueError(f"a feature is called {shortened(key)}, which is no name of a folder")
    return about


def picture_size(about: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return height and width of a camera's pictures; None: these are no pictures in colour."""
    shape, names = about["shape"], about.get("names")
    details = about.get("info") or about.get("video_info") or {}
    depth = isinstance(details, dict) and (details.get("video.is_depth_map") or details.get("is_depth_map"))
    if about["dtype"] not in ("video", "image") or len(shape) != 3 or depth:
        return None
    first = isinstance(names, list) and bool(names) and str(names[0]).startswith("channel")
    if first or (shape[0] == 3 and shape[2] != 3):
        return (shape[1], shape[2]) if shape[0] == 3 else None
    return (shape[0], shape[1]) if shape[2] == 3 else None


def read_tasks(path: Path) -> dict[int, str]:
    """Read the instructions by number."""
    file = path / "meta" / "tasks.parquet"
    texts = [name for name in columns_of(file) if name != "task_index"]
    column = next((name for name in ("task", "__index_level_0__") if name in texts), None)
    if column is None:
        raise ConfigError(
            f"{file} has no column of instructions (task), only {', '.join(texts)[:200]}. Give one "
            "instruction for all: --dataset.task 'fold the towel'."
        )
    tasks: dict[int, str] = {}
    for batch in batches(file, ["task_index", column]):
        with reading_table(file):
            numbers = numbers_in(batch, "task_index")[:, 0].tolist()
            tasks |= dict(zip(numbers, texts_in(batch, column), strict=True))
    return tasks
