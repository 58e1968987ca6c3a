"""Make light files of a suite's shapes and pictures, for scenes that are drawn several times faster.

What is only looked at is simplified: shapes of many faces, and large textures. What things collide with
stays, so the physics is the same. The files go to the user's cache; they are made of the installed package
and are never shipped.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.errors import AssetError
from asyncrl.simulators.libero.loading import TESTED, cache_folder, libero_package, load_robosuite, quiet
from asyncrl.simulators.libero.scene import build_environment, numpy_generator
from asyncrl.simulators.libero.shapes import Shape, load_simplifier, simplified
from asyncrl.simulators.libero.tasks import bddl_file, task_names
from asyncrl.simulators.rendering import load_mujoco
from asyncrl.storage.atomic import read_json, replacing, write_json

FACES: Final = 3600
"""Faces that a shape keeps at most."""
TEXTURE: Final = 512
"""Pixels that a texture's longer side keeps at most."""
_FORMAT: Final = 1
_OPEN: Final = 0.1
_MORE: Final = 3
"""A shape of loose parts falls apart at few faces: it keeps so many times more."""


@dataclass(kw_only=True)
class LightReport:
    """What was made of a suite."""

    folder: Path
    shapes: int = 0
    textures: int = 0
    faces_before: int = 0
    faces_after: int = 0
    kept: list[str] = field(default_factory=list)
    """Shapes that could not be simplified and stay as they are."""


def light_files(suite: str) -> dict[str, str]:
    """Return what `make_light` made of a suite: paths of the package's files, and of those in their place."""
    index = _index(suite)
    remedy = f"Make them: asyncrl simulators lite {suite}"
    if not index.is_file():
        raise AssetError(f"scene=light needs the light files of {suite}, but {index} is not there. {remedy}")
    content = read_json(index, remedy)
    if content.get("format") != _FORMAT or content.get("versions") != TESTED:
        raise AssetError(f"The light files of {suite} in {index.parent} are of another version. {remedy}")
    base = _base()
    files = {str(base / name): str(index.parent / light) for name, light in content["files"].items()}
    if missing := [light for light in files.values() if not Path(light).is_file()]:
        raise AssetError(f"{missing[0]} is not there any more. {remedy}")
    return files


def make_light(
    suite: str, *, faces: int = FACES, texture: int = TEXTURE, say: Callable[[str], None] = print
) -> LightReport:
    """Make the light files of all scenes of a suite, in place of those that were made before.

    Args:
        faces: That a shape keeps at most.
        texture: Pixels that a texture's longer side keeps at most.

    Raises:
        ConfigError: See `check_versions`; or what simplifies shapes is not installed.
    """
    load_simplifier()
    load_robosuite()
    folder = cache_folder() / "light"
    folder.mkdir(parents=True, exist_ok=True)
    report, made = LightReport(folder=folder), {}
    for number, name in enumerate(task_names(suite)):
        say(f"{suite} task {number}: {name}")
        for source, model, mesh in _sources(bddl_file(suite, number)):
            rel = str(Path(os.path.realpath(source)).relative_to(_base()))
            if rel not in made:
                made[rel] = _make(source, model, mesh, faces, texture, report)
    write_json(
        _index(suite),
        {
            "format": _FORMAT,
            "versions": TESTED,
            "faces": faces,
            "texture": texture,
            "files": {name: light for name, light in made.items() if light},
        },
    )
    return report


def _sources(bddl: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield file, compiled model and number of each shape that is only looked at; of textures with -1."""
    with quiet(), numpy_generator([0]):
        environment = build_environment(bddl, {})
    try:
        text, model = environment.model.get_xml(), environment.sim.model._model
        for tag in re.findall(r"<mesh [^>]*>", text):
            file, name = _attribute(tag, "file"), _attribute(tag, "name")
            mesh = model.mesh(name).id
            users = np.flatnonzero((model.geom_dataid == mesh) & (model.geom_type == 7))
            seen_only = (model.geom_contype[users] | model.geom_conaffinity[users]) == 0
            if len(users) and seen_only.all() and (model.geom_group[users] == 1).all():
                yield file, model, mesh
        for tag in re.findall(r"<texture [^>]*file=[^>]*>", text):
            yield _attribute(tag, "file"), model, -1
    finally:
        with quiet():
            environment.close()


def _attribute(tag: str, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', tag)
    assert found is not None, tag
    return found[1]


def _make(source: str, model: Any, mesh: int, faces: int, texture: int, report: LightReport) -> str:
    """Make the light file of one; return its name, or '' when the original is to stay."""
    key = hashlib.sha256(Path(source).read_bytes() + f"{_FORMAT} {faces} {texture}".encode()).hexdigest()[:24]
    if mesh < 0:
        target = report.folder / f"{key}.png"
        small = shrink_texture(source, target, texture)
        report.textures += small
        return target.name if small else ""
    count = int(model.mesh_facenum[mesh])
    if count <= faces:
        return ""
    target = report.folder / f"{key}.msh"
    shape = Shape.of(model, mesh)
    if shape.open_share() > _OPEN:
        faces *= _MORE
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
    """Write a PNG halved in size until its longer side fits; False when it does already."""
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
    """Whether MuJoCo takes the file as a shape."""
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
    """Return the folder that the packages with the files are installed in."""
    return libero_package().resolve().parents[1]


def _index(suite: str) -> Path:
    return cache_folder() / "light" / f"{suite}.json"
