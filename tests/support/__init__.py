"""What several test files share."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def child_environment() -> dict[str, str]:
    """Return the environment with which a child process imports what this one can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
