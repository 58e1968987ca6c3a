"""Import ManiSkill, find out what a task lacks, and make its environments."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from asyncrl.errors import AssetError, ConfigError
from asyncrl.simulators.maniskill.tasks import ManiSkillTask
from asyncrl.simulators.maniskill.vulkan import PIP, load_sapien, require_device


def load_maniskill(name: str, task: ManiSkillTask, module: str) -> Any:
    """Import ManiSkill and return gymnasium, where the environment is registered."""
    require_device()
    logging.getLogger("mani_skill").setLevel(logging.ERROR)  # It warns of how its own tasks are written.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("mani_skill.envs")
            gym = importlib.import_module("gymnasium")
            root = importlib.import_module("mani_skill").ASSET_DIR
    except ModuleNotFoundError as error:
        raise AssetError(f"{name} needs the package {error.name}. Install the extra: {PIP}") from error
    missing = []
    if task.published:
        folders = (root / "tasks" / "bridge_v2_real2sim_dataset", root / "robots" / "widowx")
        missing = [str(folder) for folder in folders if not folder.is_dir()]
    if module and not missing:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--simulator-settings module={module} cannot be imported: {error}. Put its folder on "
                "PYTHONPATH."
            ) from error
    if task.environment not in gym.registry:
        missing.append(
            f"a module that registers {task.environment} with ManiSkill (--simulator-settings module=...)"
        )
    if missing:
        raise AssetError(
            f"{name} is not part of mani-skill and lacks: {'; '.join(missing)}. docs/maniskill.md."
        )
    return gym


def make_environment(gym: Any, environment: str, count: int, settings: dict[str, Any]) -> Any:
    """Make one environment of `count` rows, without wrappers, which hides nothing from pictures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = gym.make(environment, num_envs=count, **settings).unwrapped
    # ManiSkill keeps what is to be hidden in a list of the class, across environments.
    made._hidden_objects.clear()
    made._hidden_objects = []
    return made


def reward_mode(name: str, environment: str, reward: str) -> str:
    """Return ManiSkill's name of what its environments compute as a reward."""
    registered = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    modes = registered[environment].cls.SUPPORTED_REWARD_MODES
    if reward == "dense":
        if "normalized_dense" not in modes:
            raise ConfigError(f"--simulator-settings reward=dense: {name} has none. Use reward=success.")
        return "normalized_dense"
    return "none" if "none" in modes else "sparse"


def renderer(render: str) -> str:
    """Return ManiSkill's name of what draws."""
    if render != "auto":
        return render
    try:
        return "gpu" if load_sapien().Device("cuda").can_render() else "cpu"
    except RuntimeError:  # It finds no such device.
        return "cpu"
