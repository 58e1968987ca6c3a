"""The hand's poses and motions against formulas, and maps against drawing them pixel by pixel."""

import math

import numpy as np
import pytest
import torch

from asyncrl.worlds.evac.poses import Camera, MapDrawer, Motions, MotionStatistics, PoseModel, roll_pitch_yaw
from support.evac import randomised


def turned(axis: tuple[float, float, float], angle: float) -> list[float]:
    length = math.sqrt(sum(a * a for a in axis))
    return [a / length * math.sin(angle / 2) for a in axis] + [math.cos(angle / 2)]


def some_pose(rng: np.random.Generator) -> list[float]:
    quaternion = rng.normal(size=4)
    return [*rng.normal(size=3), *(quaternion * rng.uniform(0.5, 2)), rng.uniform(-1, 1)]


def matrix(quaternion: list[float]) -> np.ndarray:
    """Rodrigues' formula."""
    q = np.array(quaternion) / np.linalg.norm(quaternion)
    sine, cosine = np.linalg.norm(q[:3]), q[3]
    angle = 2 * math.atan2(sine, cosine)
    x, y, z = q[:3] / sine
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def about(axis: int, angle: float) -> np.ndarray:
    unit = [0.0, 0.0, 0.0]
    unit[axis] = 1.0
    return matrix(turned((unit[0], unit[1], unit[2]), angle)) if angle else np.eye(3)


def test_roll_pitch_and_yaw_rebuild_the_rotation() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        quaternion = rng.normal(size=4).tolist()
        roll, pitch, yaw = roll_pitch_yaw(torch.tensor(quaternion, dtype=torch.float64)).tolist()
        rebuilt = about(2, yaw) @ about(1, pitch) @ about(0, roll)
        np.testing.assert_allclose(rebuilt, matrix(quaternion), atol=1e-9)


def test_the_pose_model_normalises_and_takes_it_back() -> None:
    model = randomised(PoseModel(), 1)
    rng = np.random.default_rng(2)
    mean, std = rng.normal(size=8), rng.uniform(0.5, 2, size=8)
    model.abs_action_mean.copy_(torch.tensor(mean))
    model.abs_action_std.copy_(torch.tensor(std))
    actions, pose = rng.normal(size=(2, 3, 7)), np.array([some_pose(rng) for _ in range(2)])
    got = model.follow(torch.tensor(actions).float(), torch.tensor(pose).float())
    layers = [(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in model.net[::2]]
    for b in range(2):
        present = pose[b]
        for c in range(3):
            y = np.concatenate([actions[b, c], (present - mean) / std])
            for number, (weight, bias) in enumerate(layers):
                y = weight @ y + bias
                y = np.maximum(y, 0) if number < 2 else y
            present = y * std + mean
            np.testing.assert_allclose(got[b, c].detach().numpy(), present, atol=1e-5)
    assert [tuple(m.weight.shape) for m in model.net[::2]] == [(64, 15), (64, 64), (8, 64)]


def wrapped(angle: float) -> float:
    while angle >= math.pi:
        angle -= 2 * math.pi
    while angle < -math.pi:
        angle += 2 * math.pi
    return angle


def test_motions_follow_the_formula() -> None:
    statistics = MotionStatistics()
    rng = np.random.default_rng(3)
    poses = np.array([[some_pose(rng) for _ in range(4)] for _ in range(2)])
    before = np.array([[some_pose(rng) for _ in range(4)] for _ in range(2)])
    got = Motions(statistics)(torch.tensor(poses).float(), torch.tensor(before).float()).double().numpy()
    assert got.shape == (2, 4, 14)
    for b in range(2):
        for f in range(4):
            now, then = poses[b, f], before[b, f]
            turns = [roll_pitch_yaw(torch.tensor(p[3:7])).tolist() for p in (now, then)]
            raw = [*(now[:3] - then[:3]), *(wrapped(x - y) for x, y in zip(*turns, strict=True))]
            expected = []
            for arm in range(2):
                for i in range(6):
                    mean, std = statistics.mean[6 * arm + i], statistics.std[6 * arm + i]
                    expected.append((raw[i] - 3 * mean) / (3 * std))
                expected.append(now[7])
            np.testing.assert_allclose(got[b, f], expected, rtol=2e-5, atol=1e-3)


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
