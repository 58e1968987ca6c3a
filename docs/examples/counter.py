"""A task of one's own: a tabletop told in other words; and 100 recordings of a clumsy demonstrator.

`python docs/examples/counter.py FOLDER` writes the recordings as LeRobot v3.0; `counter:Counter` is the
simulator that judges policies.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.simulators.interface import Demonstrator, random_start
from asyncrl.simulators.tabletop.simulator import Tabletop

TASK = "move the red block onto the yellow tray"
CAMERA, FILE, RATE = "observation.images.main", "chunk-000/file-000", 10
CLUMSY = Demonstrator(noise=(0.0, 0.04), place_offset=(0.0, 0.04), place_spread=0.02)  # Metres.
ONE, IN_FILE = {"shape": [1], "names": None}, {"chunk_index": 0, "file_index": 0}


class Counter(Tabletop):
    """Starts are the tabletop's in which the red cube belongs on the yellow plate."""

    @classmethod
    def describe(cls, **settings):
        return replace(super().describe(**settings), name="counter", tasks=(TASK,))

    def reset(self, places, starts):
        pairs = zip(places, starts, strict=True)
        starts = [self.fitting(place, start) for place, start in pairs]
        return super().reset(places, starts)._replace(tasks=(TASK,) * len(starts))

    def fitting(self, place, start):
        start = replace(start, seed=1000 * start.seed)
        while self.places[place].reset(start) != "put the red cube on the yellow plate":
            start = replace(start, seed=start.seed + 1)
        return start


def record(simulator, seed):
    """What was seen before each action, the actions, and whether each solved the task."""
    seen = simulator.reset([0], [random_start(simulator.spec, seed)])
    act = simulator.expert(0, CLUMSY, np.random.default_rng(seed))
    pictures, actions, success = [], [], []
    while len(actions) < 48 and not (any(success[:-8]) and len(actions) % 8 == 0):
        pictures.append(seen.images[0, 0])
        actions.append(act())
        done = simulator.step([0], actions[-1][None], draw=True)
        seen = done.seen
        success.append(bool(done.success[0]))
    return pictures, actions, success


def write(folder, episodes):
    """Write LeRobot v3.0: rows and the table of episodes by pyarrow, one movie by PyAV."""
    rows, about = [], []
    for number, (_, actions, success) in enumerate(episodes):
        begin, end = len(rows), len(rows) + len(actions)
        for step, (action, solved) in enumerate(zip(actions, success, strict=True)):
            numbers = {"frame_index": step, "episode_index": number, "index": begin + step, "task_index": 0}
            row = {"action": action.tolist(), "next.success": solved, "timestamp": step / RATE}
            rows.append(row | numbers)
        video = IN_FILE | {"from_timestamp": begin / RATE, "to_timestamp": end / RATE}
        where = {f"data/{key}": value for key, value in IN_FILE.items()}
        where |= {f"videos/{CAMERA}/{key}": value for key, value in video.items()}
        where |= {"dataset_from_index": begin, "dataset_to_index": end}
        about.append({"episode_index": number, "tasks": [TASK], "length": end - begin} | where)
    pictures = np.concatenate([pictures for pictures, _, _ in episodes])
    write_table(folder / f"data/{FILE}.parquet", rows)
    write_table(folder / f"meta/episodes/{FILE}.parquet", about)
    write_table(folder / "meta/tasks.parquet", [{"task_index": 0, "task": TASK}])
    write_movie(folder / f"videos/{CAMERA}/{FILE}.mp4", pictures)
    features = {
        CAMERA: {"dtype": "video", "shape": pictures.shape[1:], "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": [len(rows[0]["action"])], "names": None},
        "next.success": {"dtype": "bool", **ONE},
        "timestamp": {"dtype": "float32", **ONE},
        **{key: {"dtype": "int64", **ONE} for key in numbers},
    }
    info = {"codebase_version": "v3.0", "robot_type": "counter", "fps": RATE, "features": features}
    counts = {"total_episodes": len(episodes), "total_frames": len(rows), "total_tasks": 1}
    (folder / "meta/info.json").write_text(json.dumps(info | counts, indent=2))


def write_table(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_movie(path, pictures):
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"g": "2", "crf": "12"})
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder, simulator = parser.parse_args().folder, Counter(places=1, image_size=64)
    write(folder, [record(simulator, seed) for seed in range(100)])
    print(f"100 recordings in {folder}")
