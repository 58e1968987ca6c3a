"""Read the spaces of a gymnasium environment: which observation is the picture, how wide an action is.

Looks at spaces by their attributes and imports no gymnasium: who made an environment has imported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError


class ActionBounds(NamedTuple):
    """Of a box of ``A`` numbers."""

    low: NDArray[np.float64]
    """``[A]``."""
    high: NDArray[np.float64]
    """``[A]``."""
    dtype: np.dtype[Any]


def leaves_of(space: Any, above: str = "") -> dict[str, Any]:
    """Return the spaces of an observation by path: ``sensors/rgb``; of one that is no Dict by ''."""
    inner = getattr(space, "spaces", None)
    if not isinstance(inner, Mapping):
        return {above: space}
    found: dict[str, Any] = {}
    for key, value in inner.items():
        found |= leaves_of(value, f"{above}/{key}" if above else str(key))
    return found


def value_at(observation: Any, path: str) -> Any:
    """Return the part of an observation that `leaves_of` calls `path`."""
    for key in path.split("/") if path else ():
        observation = observation[key]
    return observation


def find_picture(space: Any, image_key: str) -> tuple[str, int]:
    """Return path and side in pixels of the picture in an observation.

    Args:
        image_key: Path of the picture; empty: the only one that looks like a picture.
    """
    leaves = leaves_of(space)
    has = f"Its observation has {', '.join(_describe(path, leaf) for path, leaf in leaves.items())}."
    if image_key:
        if image_key not in leaves:
            raise ConfigError(f"image_key is {image_key!r}, which the environment does not show. {has}")
        if not _is_picture(leaves[image_key]):
            raise ConfigError(
                f"image_key is {image_key!r}, which is no picture: uint8 of [H, W, 3], with colours last, is "
                f"needed. {has} Turn it with gymnasium.wrappers.TransformObservation."
            )
        path = image_key
    else:
        pictures = [path for path, leaf in leaves.items() if _is_picture(leaf)]
        if not pictures:
            raise ConfigError(
                "The environment shows no picture: uint8 of [H, W, 3], with colours last, is needed. "
                f"{has} Add one with gymnasium.wrappers.AddRenderObservation, or turn one that is there with "
                "gymnasium.wrappers.TransformObservation."
            )
        if len(pictures) > 1:
            raise ConfigError(
                f"The environment shows several pictures: {', '.join(pictures)}. Say which one policies see: "
                f"VectorEnvSimulator(env, image_key={pictures[0]!r})."
            )
        (path,) = pictures
    height, width, _ = leaves[path].shape
    if height != width:
        raise ConfigError(
            f"The picture {path!r} has {height} x {width} pixels, but pictures must be square. Cut or resize "
            "it with gymnasium.wrappers.ResizeObservation or TransformObservation."
        )
    return path, height


def state_width(space: Any, state_key: str) -> int:
    """Return how many numbers the state called `state_key` has; 0 without a key."""
    if not state_key:
        return 0
    leaves = leaves_of(space)
    leaf = leaves.get(state_key)
    if leaf is None or not hasattr(leaf, "low") or _is_picture(leaf):
        raise ConfigError(
            f"state_key is {state_key!r}, which is no box of numbers here. The environment's observation "
            f"has {', '.join(_describe(path, found) for path, found in leaves.items())}."
        )
    return int(np.prod(leaf.shape))


def action_bounds(space: Any) -> ActionBounds:
    """Read the action space of one environment."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(
            f"The environment's actions are {space}, but policies choose a row of real numbers: a Box of "
            "shape (A,) with a float dtype. Turn them with gymnasium.wrappers.TransformAction."
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(
            f"The environment's actions have no finite bounds ({space}), so nobody can say how large an "
            "action is. Give them bounds with gymnasium.wrappers.TransformAction."
        )
    return ActionBounds(np.asarray(low, np.float64), np.asarray(high, np.float64), np.dtype(space.dtype))


def _is_picture(space: Any) -> bool:
    shape = getattr(space, "shape", None)
    return shape is not None and len(shape) == 3 and shape[-1] == 3 and space.dtype == np.uint8


def _describe(path: str, space: Any) -> str:
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    return f"{path or 'one array'} ({dtype}{list(shape or ())})"
