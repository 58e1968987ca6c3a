"""Play LIBERO as its own code does: the reference that the adapter is compared with, in a process of its own.

    python official_libero.py REQUEST.npz ANSWER.npz

The request has ``suite task trial size settle``, ``actions [T, 7]`` and ``pos:BODY``, ``quat:BODY`` of every
fixture. The answer has ``pictures [T+1, 2, size, size, 3]``, ``states [T+1, 8]``, ``success [T]``,
``positions`` and ``velocities``.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("LP_NUM_THREADS", "0")
os.environ["LIBERO_CONFIG_PATH"] = "/nonexistent"

import numpy as np


def quaternion_to_axis_angle(quaternion):
    """As in the evaluation scripts: angle in [0, 2 pi], the axis as it is."""
    w = min(max(quaternion[3], -1.0), 1.0)
    if np.isclose(np.sqrt(1.0 - w * w), 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * np.arccos(w) / np.sqrt(1.0 - w * w)


def main(request_file, answer_file):
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv

    request = np.load(request_file)
    suite = benchmark.get_benchmark(str(request["suite"]))()
    number, size = int(request["task"]), int(request["size"])
    task = suite.get_task(number)
    bddl = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
    env = OffScreenRenderEnv(bddl_file_name=str(bddl), camera_heights=size, camera_widths=size)
    env.seed(0)
    env.reset()  # hard_reset is on: model and simulation are made anew.
    for name in request.files:
        kind, _, body = name.partition(":")
        if kind in ("pos", "quat"):
            getattr(env.sim.model, f"body_{kind}")[env.sim.model.body_name2id(body)] = request[name]
    seen = env.set_init_state(suite.get_task_init_states(number)[int(request["trial"])])
    for _ in range(int(request["settle"])):
        seen, *_ = env.step([0, 0, 0, 0, 0, 0, -1])
    pictures, states, success, positions, velocities = [], [], [], [], []

    def keep(seen):
        names = ("agentview_image", "robot0_eye_in_hand_image")
        pictures.append(np.stack([seen[name][::-1, ::-1] for name in names]))
        rotation = quaternion_to_axis_angle(seen["robot0_eef_quat"])
        states.append(np.concatenate([seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"]]))
        positions.append(env.sim.data.qpos.copy())
        velocities.append(env.sim.data.qvel.copy())

    keep(seen)
    for action in request["actions"]:
        seen, _, done, _ = env.step(action.tolist())
        keep(seen)
        success.append(bool(done))
    np.savez(
        answer_file,
        pictures=np.array(pictures),
        states=np.array(states),
        success=np.array(success, bool),
        positions=np.array(positions),
        velocities=np.array(velocities),
        language=task.language,
    )
    env.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
