"""How much host memory `asyncrl fit` takes, and how much of that grows with the recordings.

    python benchmarks/fit_memory.py                                        some minutes on two cores
    python benchmarks/fit_memory.py --episodes 400 --only policy           what needs no autoencoder
    python benchmarks/fit_memory.py --episodes 2000 --frames 107 --device cuda

Recordings are drawn by a program, of 128 pixels. Each fit runs a few steps in a process of its own, once on
a third of the episodes and once on all. What is printed is the peak of resident memory, and how much it grew
per byte of pictures that were added, which means something only where a third of them fills the batches that
are encoded and drawn side by side (48 MiB on a CPU). Unpacked pictures lie in a temporary file (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

EPISODES_PER_PART = 20


def write_one(folder: Path, part: int, episodes: int, frames: int, image_size: int) -> None:
    """Write one file of episodes."""
    from support.recorded import recorded_spec, write_recorded

    write_recorded(folder, recorded_spec(image_size), (frames,) * episodes, part=part)


def write(folder: Path, options: argparse.Namespace, episodes: int) -> int:
    """Write recordings on all cores; return the bytes of their pictures."""
    parts = [range(episodes)[i : i + EPISODES_PER_PART] for i in range(0, episodes, EPISODES_PER_PART)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(write_one, folder, number, len(part), options.frames, options.image_size)
            for number, part in enumerate(parts)
        ]
        for job in jobs:
            job.result()
    return episodes * options.frames * options.image_size**2 * 3


def calls(data: Path, work: Path, device: str) -> dict[str, list[str]]:
    """Say what is run, by name."""
    common = ["--data", str(data), "--device", device, "--steps", "3"]
    world = str(work / "world")
    return {
        "policy": ["policy", *common, "--batch", "16", "--out", str(work / "policy")],
        "world": ["world", *common, "--batch", "16", "--vae-steps", "2", "--vae-batch", "2", "--out", world],
        "reward": ["reward", *common, "--batch", "16", "--world", world],
    }


def measure(arguments: list[str]) -> dict[str, float]:
    """Fit in a process of its own; return its peak of resident memory in bytes and its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--fit", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {"peak": json.loads(done.stdout.splitlines()[-1]), "seconds": time.monotonic() - began}


def fit(arguments: list[str]) -> None:
    """Fit, and print the peak of resident memory in bytes."""
    from asyncrl.commands.fit import main as command

    command(arguments)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))


def main() -> None:
    """Write, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=45)
    parser.add_argument("--frames", type=int, default=41)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=["policy", "world", "reward"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
        pictures = []
        for number, episodes in enumerate((max(1, options.episodes // 3), options.episodes)):
            data, work = Path(folder) / f"data{number}", Path(folder) / f"work{number}"
            pictures.append(write(data, options, episodes))
            for name in options.only:
                rows[name].append(measure(calls(data, work, options.device)[name]))
        added = pictures[1] - pictures[0]
        print(f"pictures of {options.episodes} episodes: {pictures[1] / 1e9:.2f} GB unpacked")
        print(f"{'fit':<8} {'peak, a third':>14} {'peak, all':>10} {'growth per byte':>16} {'seconds':>8}")
        for name, (third, whole) in rows.items():
            growth = (whole["peak"] - third["peak"]) / added
            print(
                f"{name:<8} {third['peak'] / 1e9:>11.2f} GB {whole['peak'] / 1e9:>7.2f} GB {growth:>16.3f} "
                f"{whole['seconds']:>8.0f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        fit(sys.argv[2:])
    else:
        main()
