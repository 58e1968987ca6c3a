"""Simplify shapes of triangles, and write them as MuJoCo reads them.

Dimension letters:
    V  points      F  faces
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.libero.loading import PIP
from asyncrl.simulators.rendering import load_mujoco

_EDGES = ((0, 1), (1, 2), (2, 0))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape of triangles, as its file has it."""

    points: NDArray[np.float64]
    """``[V, 3]``."""
    faces: NDArray[np.int32]
    """``[F, 3]`` points of a face."""
    texture: NDArray[np.float64] | None = None
    """``[F, 3, 2]`` places in the texture, by corner."""

    @classmethod
    def of(cls, model: Any, mesh: int) -> Shape:
        """Read a shape from a compiled model, which has moved and turned it to its middle, and scaled it."""
        mujoco = load_mujoco()
        first, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, model.mesh_quat[mesh])
        points = model.mesh_vert[first : first + count].astype(np.float64) @ turn.reshape(3, 3).T
        points = (points + model.mesh_pos[mesh]) / model.mesh_scale[mesh]
        first, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        faces = model.mesh_face[first : first + count].copy()
        if not model.mesh_texcoordnum[mesh]:
            return cls(points=points, faces=faces)
        corners = model.mesh_facetexcoord[first : first + count]
        places = model.mesh_texcoord[model.mesh_texcoordadr[mesh] :]
        return cls(points=points, faces=faces, texture=places[corners].astype(np.float64))

    def welded(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return points and faces of the surface: points that differ in their texture only are one."""
        points, inverse = np.unique(np.round(self.points, 9), axis=0, return_inverse=True)
        corners = inverse.reshape(-1)[self.faces].astype(np.int32)
        whole = np.all([corners[:, a] != corners[:, b] for a, b in _EDGES], axis=0)
        return points, corners[whole]

    def open_share(self) -> float:
        """Return the share of edges with a face on one side only: 0 of a closed surface."""
        _, corners = self.welded()
        edges = np.sort(np.concatenate([corners[:, edge] for edge in _EDGES]), axis=1)
        _, sides = np.unique(edges, axis=0, return_counts=True)
        return float((sides == 1).mean())

    def as_msh(self) -> bytes:
        """Return the content of MuJoCo's MSH format: counts, points, normals, texture places, faces."""
        normals = point_normals(self.points, self.faces)
        points, faces, places = self.points, self.faces, np.zeros((0, 2))
        if self.texture is not None:  # The format has one place per point: every face has points of its own.
            points, normals = points[faces.reshape(-1)], normals[faces.reshape(-1)]
            places = self.texture.reshape(-1, 2)
            faces = np.arange(len(points), dtype=np.int32).reshape(-1, 3)
        counts = np.array([len(points), len(normals), len(places), len(faces)], np.int32)
        numbers = [np.ascontiguousarray(part, np.float32) for part in (points, normals, places)]
        return b"".join(part.tobytes() for part in (counts, *numbers, faces.astype(np.int32)))


def simplified(shape: Shape, faces: int) -> Shape:
    """Return the shape with at most about `faces` faces; its texture is laid on as before."""
    points, corners = shape.welded()
    reduced, new_faces = load_simplifier()(points.astype(np.float32), corners, target_count=faces)
    reduced, new_faces = reduced.astype(np.float64), new_faces.astype(np.int32)
    if shape.texture is None:
        return Shape(points=reduced, faces=new_faces)
    return Shape(points=reduced, faces=new_faces, texture=_laid_on(shape, reduced[new_faces]))


def _laid_on(shape: Shape, corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return texture places ``[F, 3, 2]`` of new faces, from the old face nearest to each."""
    tree: Any = importlib.import_module("scipy.spatial").cKDTree(shape.points[shape.faces].mean(axis=1))
    nearest = tree.query(corners.mean(axis=1))[1]
    assert shape.texture is not None
    old, places = shape.points[shape.faces[nearest]], shape.texture[nearest]
    first, second = old[:, 1] - old[:, 0], old[:, 2] - old[:, 0]
    aa, ab, bb = ((x * y).sum(axis=1) for x, y in ((first, first), (first, second), (second, second)))
    area = np.maximum(aa * bb - ab * ab, 1e-30)
    way = corners - old[:, None, 0]
    a, b = ((way * side[:, None]).sum(axis=2) for side in (first, second))
    along = (bb[:, None] * a - ab[:, None] * b) / area[:, None]
    across = (aa[:, None] * b - ab[:, None] * a) / area[:, None]
    u, v = places[:, 1] - places[:, 0], places[:, 2] - places[:, 0]
    return places[:, None, 0] + along[..., None] * u[:, None] + across[..., None] * v[:, None]


def point_normals(points: NDArray[np.float64], faces: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the mean direction ``[V, 3]`` of the faces around each point, weighted by their area."""
    corners = points[faces]
    weighted = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    total = np.zeros_like(points)
    for corner in range(3):
        np.add.at(total, faces[:, corner], weighted)
    length = np.linalg.norm(total, axis=1, keepdims=True)
    return np.where(length > 0, total / np.maximum(length, 1e-30), [0.0, 0.0, 1.0])


def load_simplifier() -> Callable[..., Any]:
    """Return what reduces the faces of a shape."""
    try:
        return importlib.import_module("fast_simplification").simplify
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"asyncrl simulators lite needs fast-simplification, which is not installed. Install it: {PIP}"
        ) from error
