"""The hand's poses and motions against the formulas, in Python's own numbers."""

import math

import numpy as np
import torch

from asyncrl.worlds.evac.poses import Motions, MotionStatistics, PoseModel, roll_pitch_yaw
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
