"""The package `my_robot` of docs/extending.md, written to a folder outside the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support import ROOT

PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^```python\n# (my_robot/\w+\.py)\n(.*?)^```$", re.S | re.M)
WORLD = "my_robot.world:ShiftWorld@models/world"
REWARD = "my_robot.reward:MiddleReward"
FLOW = "my_robot.flow:FlowPolicy@models/flow"
TOKENS = "my_robot.policy:TokenPolicy@models/tokens"
SIMULATOR = "my_robot.simulator:DotSimulator"
CORRECTION = "my_robot.correction:Softened"
ENVIRONMENT = ["--world", WORLD, "--reward", REWARD, "--reward-settings", "full=255"]
SMALL = [
    *("--start-states", "starts.h5", "--actor.success-threshold", "0.6", "--actor.slots", "16"),
    *("--algorithm.group-size", "4", "--algorithm.groups-per-update", "4", "--device", "cpu"),
    *("--correction.kind", CORRECTION, "--correction.settings", "width=0.5"),
]


def files_of_page() -> dict[str, str]:
    """The examples of the page by path."""
    return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def write_package(folder: Path) -> Path:
    """Write the package, and initial models with start states as the page makes them."""
    for name, text in files_of_page().items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "my_robot" / "__init__.py").touch()
    page = PAGE.read_text(encoding="utf-8")
    program = page.split('python -c "\n')[1].split('"\n')[0]
    starts = """
import numpy as np
from asyncrl.records import StartState
from asyncrl.worlds.start_states import save_start_states
from my_robot.simulator import TASK, DotSimulator
from asyncrl.simulators.interface import random_start
simulator, none = DotSimulator(), np.zeros((0, 32, 32, 3), np.uint8)
save_start_states(Path("starts.h5"), [
    StartState(name=f"seed-{seed}", task=TASK, frame=seen.images[0, 0], context_frames=none,
               context_actions=np.zeros((0, 7), np.float32))
    for seed in range(64)
    for seen in [simulator.reset([0], [random_start(simulator.spec, seed)])]
])
"""
    subprocess.run([sys.executable, "-c", program + starts], cwd=folder, check=True, timeout=120)
    return folder
