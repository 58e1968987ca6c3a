"""What is said of ManiSkill where it, or a Vulkan device, is not there; and what needs neither."""

import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl import registry
from asyncrl.errors import AssetError
from asyncrl.simulators.interface import skew_part
from asyncrl.simulators.maniskill import tasks
from asyncrl.simulators.maniskill.expert import EXPERTS, axis_angle, matrix
from asyncrl.simulators.maniskill.simulator import GraspReward
from asyncrl.simulators.maniskill.tasks import TASKS
from support import ROOT

PAGE = ROOT / "docs" / "maniskill.md"
TOO_OLD = "GPU: llvmpipe (LLVM 15.0.6, 256 bits)\n  Supported: 0\n  Present:   0\n  cudaId:    -1\n\n"
TWO = f"{TOO_OLD}GPU: NVIDIA H200\n  Supported: 1\n  Present:   0\n  cudaId:    0\n\n"


def test_every_task_has_a_name_on_the_command_line() -> None:
    names = [name for name in registry.BUILT_IN["simulator"] if name.startswith("maniskill_")]
    assert names == [f"maniskill_{task}" for task in TASKS]


def test_every_instruction_is_plain_and_there_is_one_unless_each_episode_says_its_own() -> None:
    for task in TASKS.values():
        assert task.instruction == task.instruction.lower().strip().rstrip(".")
        assert bool(task.instruction) != task.published


def test_the_page_lists_every_task_as_it_is() -> None:
    rows = re.findall(
        r"^\| `(\w+)`.*?\| (.*?) \| .*?\| \d+ \| (yes)? ?\| (yes)? ?\|$", PAGE.read_text(), re.M
    )
    page = {name: (instruction, bool(expert), bool(shaped)) for name, instruction, expert, shaped in rows}
    for name, task in TASKS.items():
        first = re.sub(r"_\d$", "_0", name)
        if not task.published:
            assert page[first] == (task.instruction, first in EXPERTS, bool(task.grasped)), name


def test_without_the_extra_the_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sapien.render", None)
    monkeypatch.setitem(sys.modules, "sapien", None)
    with pytest.raises(AssetError, match=r"package sapien.*pip install 'asyncrl\[maniskill\]'"):
        registry.resolve("simulator", "maniskill_pick_cube")(places=1)


def device_summary(text: str) -> SimpleNamespace:
    return SimpleNamespace(render=SimpleNamespace(get_device_summary=lambda: text))


def test_a_device_that_sapien_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAPIEN_DISABLE_RAY_TRACING", raising=False)
    monkeypatch.setattr(tasks, "load_sapien", lambda: device_summary(TOO_OLD))
    with pytest.raises(AssetError, match=r"there is: llvmpipe \(LLVM 15.*Mesa 24 or newer"):
        tasks.require_device()
    monkeypatch.setenv("SAPIEN_DISABLE_RAY_TRACING", "1")
    with pytest.raises(AssetError, match=r"SAPIEN_DISABLE_RAY_TRACING is set.*unset it"):
        tasks.require_device()


def test_the_first_device_that_sapien_can_use_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "load_sapien", lambda: device_summary(TWO))
    assert tasks.require_device() == "NVIDIA H200"


def test_without_a_vulkan_device_it_is_said_what_to_install() -> None:
    pytest.importorskip("sapien", reason="the extra maniskill is not installed")
    program = (
        "from asyncrl.errors import AssetError\n"
        "from asyncrl.simulators.interface import SimulatorSource\n"
        "try:\n"
        "    SimulatorSource(name='maniskill_push_cube').build()\n"
        "except AssetError as error:\n"
        "    print(error)\n"
    )
    nowhere = {"VK_ICD_FILENAMES": "/nowhere.json", "VK_DRIVER_FILES": "/nowhere.json"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **nowhere},
    )
    assert "There is no Vulkan device here" in done.stdout, done.stderr
    assert "apt-get install mesa-vulkan-drivers" in done.stdout


def test_rotations_agree_with_each_other() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        quaternion = rng.normal(size=4)
        quaternion /= np.linalg.norm(quaternion)
        vector, turn = axis_angle(quaternion), matrix(quaternion)
        np.testing.assert_allclose(turn @ vector, vector, atol=1e-9)  # Its axis stays.
        assert np.linalg.norm(vector) <= np.pi + 1e-9
        assert np.trace(turn) == pytest.approx(1 + 2 * np.cos(np.linalg.norm(vector)))
        np.testing.assert_allclose(axis_angle(-quaternion), vector, atol=1e-9)
    assert axis_angle(np.array([1.0, 0, 0, 0])).tolist() == [0, 0, 0]
    quarter = matrix(np.array([np.cos(0.05), 0, 0, np.sin(0.05)]))
    np.testing.assert_allclose(skew_part(quarter), [0, 0, np.sin(0.1)], atol=1e-12)


def by_definition(success: list[bool], held: list[bool]) -> list[float]:
    """Slow and obvious on purpose: what an episode is worth after each step, minus before it."""
    worth = [0.0]
    for step in range(1, len(held) + 1):
        past = held[:step]
        in_row = any(all(past[i : i + 5]) for i in range(step - 4))
        worth.append(0.1 * any(past) + 0.1 * in_row + 1.0 * (success[step - 1] and any(past)))
    return [after - before for before, after in itertools.pairwise(worth)]


def test_the_shaped_reward_is_its_definition() -> None:
    rng, reward = np.random.default_rng(0), GraspReward()
    for chance in (0.0, 0.3, 0.8):
        success, held = ((rng.random(30) < share).tolist() for share in (0.2, chance))
        reward.begin(held=False)
        paid = [reward.step(success=s, held=h) for s, h in zip(success, held, strict=True)]
        assert paid == pytest.approx(by_definition(success, held))
