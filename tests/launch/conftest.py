"""What the tests of whole runs share."""

import pytest

from support.tiny_models import write_models


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a small run of tiny random models."""
    return write_models(tmp_path_factory.mktemp("models"))
