"""Rotations as ManiSkill has them: quaternions with the real part first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def axis_angle(quaternion: Array) -> Array:
    """Turn a rotation into its vector: axis times angle, at most pi.

    Args:
        quaternion: ``[4]`` (w, x, y, z), of length 1.

    Returns:
        ``[3]`` radians.

    Example:
        >>> axis_angle(np.array([np.sqrt(0.5), 0, 0, -np.sqrt(0.5)])).round(4).tolist()
        [0.0, 0.0, -1.5708]
    """
    w, vector = quaternion[0], quaternion[1:]
    if w < 0:  # The same rotation, the short way round.
        w, vector = -w, -vector
    length = float(np.linalg.norm(vector))
    return vector * (2 * np.arctan2(length, w) / length if length > 1e-9 else 2.0)


def matrix(quaternion: Array) -> Array:
    """Turn a rotation into its matrix ``[3, 3]``.

    Example:
        >>> matrix(np.array([0.0, 1.0, 0.0, 0.0])).tolist()
        [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]]
    """
    w, x, y, z = quaternion
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def turn_between(now: Array, then: Array) -> Array:
    """Return the rotation vector ``[3]`` about the world's axes that leads from one matrix to another.

    Exact for small angles; for larger ones shorter than the true angle, in its direction.
    """
    turn = then @ now.T
    return 0.5 * np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
