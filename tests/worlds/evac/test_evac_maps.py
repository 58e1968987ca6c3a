"""Maps against drawing them pixel by pixel."""

import math

import numpy as np
import pytest
import torch

from asyncrl.worlds.evac.poses import Camera, MapDrawer

GREENS = ["f7fcf5", "e5f5e0", "c7e9c0", "a1d99b", "74c476", "41ab5d", "238b45", "006d2c", "00441b"]
REDS = ["fff5f0", "fee0d2", "fcbba1", "fc9272", "fb6a4a", "ef3b2c", "cb181d", "a50f15", "67000d"]


def quaternion_matrix(q: tuple[float, ...]) -> np.ndarray:
    x, y, z, w = np.array(q) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def palette(words: list[str], share: float) -> np.ndarray:
    table = np.array([[int(w[i : i + 2], 16) / 255 for i in (0, 2, 4)] for w in words])
    return np.array([np.interp(share * 8, range(9), table[:, channel]) for channel in range(3)])


def distance_to_segment(p: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.sum((b - a) ** 2))
    share = 0.0 if length < 1e-12 else min(max(float(np.dot(p - a, b - a)) / length, 0.0), 1.0)
    return float(np.linalg.norm(p - a - share * (b - a)))


def slow_map(pose: np.ndarray, camera: Camera, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw one map; also say which pixels lie so near to an edge that rounding may decide."""
    to_world, scale, pixel = quaternion_matrix(camera.quaternion), size / camera.size, size / 256
    axes = quaternion_matrix(tuple(pose[3:7]))
    hand = pose[:3] + 0.23 * axes[:, 2]
    points, depths = [], []
    for point in (hand, *(hand + 0.1 * axes[:, i] for i in range(3))):
        x, y, z = to_world.T @ (point - np.array(camera.position))
        u, v = (camera.focal * x / z + camera.centre) * scale, (camera.focal * y / z + camera.centre) * scale
        points.append(np.array([size - 1 - u, size - 1 - v] if camera.flipped else [u, v]))
        depths.append(z)
    picture, edge = np.full((3, size, size), 50 / 255), np.zeros((size, size), dtype=bool)
    share = min(max(pose[7], -1.0), 1.0) / 2 + 0.5
    for words in (GREENS, REDS):
        for row in range(size):
            for column in range(size):
                at = np.array([column, row], dtype=float)
                away = float(np.linalg.norm(at - points[0]))
                edge[row, column] |= abs(away - 50 * pixel) < 1e-3
                if depths[0] > 1e-3 and away <= 50 * pixel:
                    picture[:, row, column] = palette(words, share)
                for axis in range(3):
                    away = distance_to_segment(at, points[0], points[axis + 1])
                    edge[row, column] |= abs(away - 4 * pixel) < 1e-3
                    if min(depths[0], depths[axis + 1]) > 1e-3 and away <= 4 * pixel:
                        picture[:, row, column] = np.eye(3)[axis]
    return picture * 2 - 1, edge


def facing(rng: np.random.Generator, camera: Camera) -> np.ndarray:
    """A pose in front of the camera."""
    to_world = quaternion_matrix(camera.quaternion)
    local = np.array([rng.uniform(-0.4, 0.4), rng.uniform(-0.4, 0.4), rng.uniform(0.7, 1.2)])
    quaternion = rng.normal(size=4)
    return np.array([*(np.array(camera.position) + to_world @ local), *quaternion, rng.uniform(-1.2, 1.2)])


@pytest.mark.parametrize("flipped", [True, False])
def test_every_pixel_is_what_drawing_it_alone_gives(flipped: bool) -> None:
    camera, size = Camera(flipped=flipped), 28
    rng = np.random.default_rng(0)
    poses = np.array([[facing(rng, camera) for _ in range(3)] for _ in range(2)])
    behind = np.array(camera.position) - 2 * quaternion_matrix(camera.quaternion)[:, 2]
    poses[1, 2, :3] = behind  # of the camera: not drawn
    got = MapDrawer(camera, size, 4)(torch.tensor(poses, dtype=torch.float32)).double().numpy()
    drawn = 0
    for b in range(2):
        for f in range(3):
            expected, edge = slow_map(poses[b, f], camera, size)
            assert edge.mean() < 0.02
            np.testing.assert_allclose(got[b, f][:, ~edge], expected[:, ~edge], atol=1e-5)
            drawn += int((np.abs(expected[0] - (100 / 255 - 1)) > 1e-6).sum())
    assert drawn > 5 * 20  # there is something to see


def test_a_pose_that_is_not_finite_spoils_its_own_map_only() -> None:
    rng = np.random.default_rng(1)
    poses = torch.tensor(np.array([[facing(rng, Camera())] for _ in range(3)]), dtype=torch.float32)
    clean = MapDrawer(Camera(), 16, 4)(poses)
    poses[1, 0, 2] = math.nan
    drawn = MapDrawer(Camera(), 16, 4)(poses)
    assert torch.equal(drawn[[0, 2]], clean[[0, 2]])


def test_rays_go_through_the_centres_of_the_pixels() -> None:
    camera, size = Camera(), 6
    rays = MapDrawer(camera, 8, size).rays.double().numpy()
    to_world, scale = quaternion_matrix(camera.quaternion), size / 128
    for row in range(size):
        for column in range(size):
            local = np.array(
                [(column + 0.5 - 64 * scale) / (64 * scale), (row + 0.5 - 64 * scale) / (64 * scale), 1.0]
            )
            expected = to_world @ local / np.linalg.norm(local)
            np.testing.assert_allclose(rays[:3, row, column], expected, atol=1e-6)
            np.testing.assert_allclose(rays[3:, row, column], camera.position, atol=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"focal": 0.0}, {"size": 0}, {"position": (1.0, 2.0)}, {"quaternion": (1.0,)}]
)
def test_an_impossible_camera_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"camera|position|quaternion"):
        Camera(**wrong)
