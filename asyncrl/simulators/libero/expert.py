"""A scripted expert of LIBERO's pick-and-place tasks, which reads the true state.

Bowls are grasped at the rim, at an angle where nothing is in the way; other objects across their middle.
Lengths are metres, angles degrees, positions in the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulators.interface import CLOSE, OPEN, Flaws, Phase, skew_part
from asyncrl.simulators.libero.scene import Scene

TRANSLATION: Final = 0.05  # Metres of the controller's target at action 1.
ROTATION: Final = 0.5  # Radians at action 1.
GAIN: Final = 2.0  # The controller covers only a part of its way before the next action.
_HAND_DOWN = np.diag([1.0, -1.0, -1.0])
_CLEARANCE = 0.1  # Height above the grip at which the hand arrives.
_ROOM = 0.018
_CLOSING_STEPS = 10
_OPENING_STEPS = 6
_PATIENCE = 60  # Steps after which a phase ends in any case.


@dataclass(frozen=True, kw_only=True)
class Grasp:
    """Grasp of an object."""

    radius: float = 0.0  # Distance of the rim from the object's axis; 0: across its middle.
    height: float = 0.0  # Of the grip above the object's origin.
    angles: tuple[float, ...] = (90.0,)
    """Directions in which the fingers close, in the world (0: x, 90: y), from axis to rim: the next one
    after a miss."""
    inside: str = ""
    """Region around the object with room on one side only; empty: none. Angles whose rim is nearer to the
    region's middle, by at least `_ROOM`, come first."""


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """Move an object to a goal."""

    item: str
    goal: str  # An object, fixture or region.
    grasp: Grasp
    drop: float = 0.008  # Height of the object's origin above the goal's when the fingers open.
    over: float = 0.16  # Least height of the hand above the goal's origin on the way there.


class Expert:
    """Acts on privileged state, for one episode that was just reset."""

    def __init__(self, scene: Scene, plan: MovePlan, flaws: Flaws) -> None:
        self._scene, self._plan, self._flaws = scene, plan, flaws
        self._tries = 0
        self._angles = self._in_order(plan.grasp)
        self._start_height = float(scene.hand()[0][2])
        self._aim()

    def act(self) -> NDArray[np.float32]:
        """Choose the next action: ``[7]`` float32 in [-1, 1], gripper exactly -1 or 1."""
        hand, axes = self._scene.hand()
        self._steps += 1
        target, done = self._target(hand, axes)
        if done or self._steps > _PATIENCE:
            self._next(hand)
        action = np.zeros(7)
        action[:3] = np.clip((target - hand) / TRANSLATION * GAIN, -1.0, 1.0)
        action[3:6] = np.clip(rotation_between(axes, self._wanted) / ROTATION, -1.0, 1.0)
        action[:6] += self._flaws.noise()
        action[6] = self._gripper
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _in_order(self, grasp: Grasp) -> tuple[float, ...]:
        if not grasp.inside:
            return grasp.angles
        out = (self._scene.position(self._plan.item) - self._scene.position(grasp.inside))[:2]

        def from_middle(place: int) -> float:
            angle = np.radians(grasp.angles[place])
            rim = out + grasp.radius * np.array([np.cos(angle), np.sin(angle)])
            return float(np.linalg.norm(rim)) + _ROOM * place

        return tuple(grasp.angles[place] for place in sorted(range(len(grasp.angles)), key=from_middle))

    def _aim(self) -> None:
        grasp = self._plan.grasp
        angle = np.radians(self._angles[self._tries % len(self._angles)])
        rim = grasp.radius * np.array([np.cos(angle), np.sin(angle), 0.0])
        self._grip_offset = rim + np.array([0.0, 0.0, grasp.height])
        # The fingers are alike, so the hand turns by at most 90 degrees.
        yaw = (angle - np.pi / 2 + np.pi / 2) % np.pi - np.pi / 2
        self._wanted = turned_about_z(yaw) @ _HAND_DOWN
        grip = self._scene.position(self._plan.item) + self._grip_offset
        self._travel = max(self._start_height, grip[2] + _CLEARANCE)
        self._enter(Phase.REACH, self._scene.hand()[0])

    def _enter(self, phase: Phase, hand: NDArray[np.float64]) -> None:
        self._phase, self._steps, self._from = phase, 0, hand.copy()
        self._item_from = self._scene.position(self._plan.item)
        self._gripper = CLOSE if phase in _HOLDING else OPEN

    def _next(self, hand: NDArray[np.float64]) -> None:
        phase = self._phase
        if phase is Phase.WITHDRAW:
            return
        lifted = self._scene.position(self._plan.item)[2] - self._item_from[2]
        if phase is Phase.LIFT and self._flaws.retry and lifted < 0.5 * (hand[2] - self._from[2]):
            self._tries += 1
            self._aim()
            return
        self._enter(Phase(phase.value + 1), hand)

    def _target(
        self, hand: NDArray[np.float64], axes: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], bool]:
        item, goal = self._scene.position(self._plan.item), self._scene.position(self._plan.goal)
        phase = self._phase
        if phase is Phase.REACH:
            grip = item + self._grip_offset + self._flaws.grasp
            away = float(np.linalg.norm((grip - hand)[:2]))
            turned = float(np.linalg.norm(rotation_between(axes, self._wanted)))
            height = self._travel if away > 0.05 else grip[2] + _CLEARANCE
            return np.array([*grip[:2], height]), away < 0.012 and turned < 0.12
        if phase is Phase.SINK:
            grip = item + self._grip_offset + self._flaws.grasp
            return grip, float(np.linalg.norm(grip - hand)) < 0.008
        if phase is Phase.GRASP:
            return self._from, self._steps >= _CLOSING_STEPS
        if phase is Phase.LIFT:
            height = max(self._from[2] + 0.1, goal[2] + self._plan.over)
            return np.array([*self._from[:2], height]), abs(height - hand[2]) < 0.03
        put = goal + self._flaws.place
        if phase is Phase.CARRY:
            way = put - item
            return np.array([*(hand + way)[:2], self._from[2]]), float(np.linalg.norm(way[:2])) < 0.018
        if phase is Phase.LOWER:
            way = put + np.array([0.0, 0.0, self._plan.drop]) - item
            return hand + way, float(np.linalg.norm(way)) < 0.012
        if phase is Phase.RELEASE:
            return self._from, self._steps >= _OPENING_STEPS
        return self._from + np.array([0.0, 0.0, 0.12]), False


_HOLDING: Final = (Phase.GRASP, Phase.LIFT, Phase.CARRY, Phase.LOWER)


def turned_about_z(angle: float) -> NDArray[np.float64]:
    """Return the rotation by an angle (rad) about the vertical: ``[3, 3]``."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def rotation_between(now: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation vector ``[3]`` (rad) that turns axes ``[3, 3]``, as columns, into others."""
    turn = wanted @ now.T
    axis = skew_part(turn)
    sine = float(np.linalg.norm(axis))
    angle = np.arctan2(sine, (np.trace(turn) - 1) / 2)
    return axis * (angle / sine) if sine > 1e-9 else axis
