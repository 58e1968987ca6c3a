"""Whether ManiSkill can be played in here."""

import pytest

from asyncrl.errors import AssetError
from asyncrl.simulators.maniskill.tasks import require_device


def require_maniskill() -> None:
    """Skip a test, or the tests of a module, by name, where the extra or a Vulkan device is missing."""
    pytest.importorskip("mani_skill", reason="the extra maniskill is not installed")
    try:
        require_device()
    except AssetError as error:
        pytest.skip(str(error), allow_module_level=True)
