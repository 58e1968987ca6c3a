"""Light files of a suite's visible shapes and textures, for scenes that are drawn several times faster.

Shapes that collide stay, so the physics is the same. The files go to the user's cache. Letters: V points,
F faces.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError
from asyncrl.simulators.libero import tasks
from asyncrl.simulators.libero.scene import build_environment, numpy_generator
from asyncrl.simulators.rendering import load_mujoco
from asyncrl.storage.atomic import read_json, replacing, write_json

_EDGES = ((0, 1), (1, 2), (2, 0))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape of triangles in its file's coordinates."""

    points: NDArray[np.float64]  # [V, 3].
    faces: NDArray[np.int32]  # [F, 3] points of a face.
    texture: NDArray[np.float64] | None = None  # [F, 3, 2] places in the texture, by corner.

    @classmethod
    def of(cls, model: Any, mesh: int) -> Shape:
        """Read a shape from a compiled model, which has centred, turned and scaled it."""
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
        """Return points and faces of the surface; points that differ in their texture only are joined."""
        points, inverse = np.unique(np.round(self.points, 9), axis=0, return_inverse=True)
        corners = inverse.reshape(-1)[self.faces].astype(np.int32)
        whole = np.all([corners[:, a] != corners[:, b] for a, b in _EDGES], axis=0)
        return points, corners[whole]

    def open_share(self) -> float:
        """Return the share of edges with a face on one side only: 0 for a closed surface."""
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
    """Return the shape with at most about `faces` faces, and its texture."""
    points, corners = shape.welded()
    library: Any = importlib.import_module("fast_simplification")
    reduced, new_faces = library.simplify(points.astype(np.float32), corners, target_count=faces)
    reduced, new_faces = reduced.astype(np.float64), new_faces.astype(np.int32)
    if shape.texture is None:
        return Shape(points=reduced, faces=new_faces)
    return Shape(points=reduced, faces=new_faces, texture=_laid_on(shape, reduced[new_faces]))


def _laid_on(shape: Shape, corners: NDArray[np.float64]) -> NDArray[np.float64]:
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


FACES: Final = 3600  # Most faces of a shape.
TEXTURE: Final = 512  # Most pixels of a texture's longer side.
_FORMAT: Final = 1
_OPEN: Final = 0.1
_MORE: Final = 3  # Times more faces for a shape of loose parts, which would fall apart.


@dataclass(kw_only=True)
class LightReport:
    """Files made for a suite."""

    folder: Path
    shapes: int = 0
    textures: int = 0
    faces_before: int = 0
    faces_after: int = 0
    kept: list[str] = field(default_factory=list)  # Shapes that could not be simplified.


def light_files(suite: str) -> dict[str, str]:
    """Return path of the package's file -> path of the simplified one that `make_light` made."""
    index = _index(suite)
    remedy = f"Make them: asyncrl simulators lite {suite}"
    if not index.is_file():
        raise AssetError(f"scene=light needs the light files of {suite}, but {index} is not there. {remedy}")
    content = read_json(index, remedy)
    if content.get("format") != _FORMAT or content.get("versions") != tasks.TESTED:
        raise AssetError(f"The light files of {suite} in {index.parent} are of another version. {remedy}")
    base = _base()
    files = {str(base / name): str(index.parent / light) for name, light in content["files"].items()}
    if missing := [light for light in files.values() if not Path(light).is_file()]:
        raise AssetError(f"{missing[0]} is not there any more. {remedy}")
    return files


def make_light(suite: str, *, say: Callable[[str], None] = print) -> LightReport:
    """Make the light files of all scenes of a suite, and replace earlier ones."""
    tasks.load_robosuite()
    folder = tasks.cache_folder() / "light"
    folder.mkdir(parents=True, exist_ok=True)
    report, made = LightReport(folder=folder), {}
    for number, name in enumerate(tasks.task_names(suite)):
        say(f"{suite} task {number}: {name}")
        for source, model, mesh in _sources(tasks.bddl_file(suite, number)):
            rel = str(Path(os.path.realpath(source)).relative_to(_base()))
            if rel not in made:
                made[rel] = _make(source, model, mesh, report)
    write_json(
        _index(suite),
        {
            "format": _FORMAT,
            "versions": tasks.TESTED,
            "faces": FACES,
            "texture": TEXTURE,
            "files": {name: light for name, light in made.items() if light},
        },
    )
    return report


def _sources(bddl: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield file, compiled model and mesh number of each shape without collisions; textures have -1."""
    with tasks.quiet(), numpy_generator([0]):
        environment = build_environment(bddl, {})
    try:
        text, model = environment.model.get_xml(), environment.sim.model._model
        for tag in re.findall(r"<mesh [^>]*>", text):
            mesh = model.mesh(_attribute(tag, "name")).id
            users = np.flatnonzero((model.geom_dataid == mesh) & (model.geom_type == 7))
            seen_only = (model.geom_contype[users] | model.geom_conaffinity[users]) == 0
            if len(users) and seen_only.all() and (model.geom_group[users] == 1).all():
                yield _attribute(tag, "file"), model, mesh
        for tag in re.findall(r"<texture [^>]*file=[^>]*>", text):
            yield _attribute(tag, "file"), model, -1
    finally:
        with tasks.quiet():
            environment.close()


def _attribute(tag: str, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', tag)
    assert found is not None, tag
    return found[1]


def _make(source: str, model: Any, mesh: int, report: LightReport) -> str:
    key = hashlib.sha256(Path(source).read_bytes() + f"{_FORMAT} {FACES} {TEXTURE}".encode()).hexdigest()[:24]
    if mesh < 0:
        target = report.folder / f"{key}.png"
        small = shrink_texture(source, target, TEXTURE)
        report.textures += small
        return target.name if small else ""
    count = int(model.mesh_facenum[mesh])
    if count <= FACES:
        return ""
    target = report.folder / f"{key}.msh"
    shape = Shape.of(model, mesh)
    faces = FACES * (_MORE if shape.open_share() > _OPEN else 1)
    if count <= faces:
        return ""
    shape = simplified(shape, faces)
    with replacing(target) as part:
        part.write_bytes(shape.as_msh())
    if not _compiles(target):
        target.unlink()
        report.kept.append(source)
        return ""
    report.shapes += 1
    report.faces_before += count
    report.faces_after += len(shape.faces)
    return target.name


def shrink_texture(source: str | Path, target: Path, longest: int) -> bool:
    """Write a PNG halved in size until its longer side fits; False if it fits already."""
    from PIL import Image

    with Image.open(source) as image:
        factor = 1
        while max(image.size) / factor > longest and all(side % (2 * factor) == 0 for side in image.size):
            factor *= 2
        if factor == 1:
            return False
        small = (image.convert("RGB") if image.mode == "P" else image).reduce(factor)
    with replacing(target) as part:
        small.save(part, format="PNG")
    return True


def _compiles(file: Path) -> bool:
    text = (
        f'<mujoco><asset><mesh name="a" file="{file}"/></asset><worldbody>'
        '<geom type="mesh" mesh="a" contype="0" conaffinity="0" mass="0"/></worldbody></mujoco>'
    )
    try:
        load_mujoco().MjModel.from_xml_string(text)
    except ValueError:
        return False
    return True


def _base() -> Path:
    return tasks.libero_package().resolve().parents[1]


def _index(suite: str) -> Path:
    return tasks.cache_folder() / "light" / f"{suite}.json"
