"""A recorded run to look into."""

from pathlib import Path

import pytest

from support.recorded_run import make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path)
