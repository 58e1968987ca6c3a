"""Names of installed packages: found when they are named, and nothing of theirs is imported before."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl import registry
from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import SimulatorSource

SIMULATOR = """
from asyncrl.simulators.interface import SimulatorSpec

class Pouring:
    def __init__(self, places, image_size):
        sizes = dict(trials=0, max_steps=5, image_size=image_size)
        self.spec = SimulatorSpec(name="pouring", tasks=("pour",), **sizes)

    reset = step = look = close = None

    @classmethod
    def describe(cls, places, image_size):
        return cls(places, image_size).spec
"""
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package that registers simulators as pip would: a dist-info folder on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pouring_lab.py").write_text(SIMULATOR)

    def install(package: str, entry_points: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[asyncrl.simulators]\n{entry_points}\n")

    yield install
    sys.modules.pop("pouring_lab", None)


def test_a_name_that_a_package_registers_is_found(install: Install) -> None:
    install("pouring-lab", "pouring = pouring_lab:Pouring\ntabletop = pouring_lab:Pouring")
    source = SimulatorSource(name="pouring", image_size=48)
    assert source.spec().image_size == 48
    assert type(source.build()).__module__ == "pouring_lab"
    built_in = registry.resolve("simulator", "tabletop")
    assert built_in.__module__ == "asyncrl.simulators.tabletop.simulator", "it is not taken over"


def test_packages_are_not_imported_nor_looked_for_before_they_are_named(install, monkeypatch) -> None:
    install("pouring-lab", "pouring = pouring_lab:Pouring")
    with pytest.raises(ConfigError, match="nothing of that kind is called so"):
        registry.check_name("simulator", "pourin")
    registry.check_name("simulator", "pouring")
    assert "pouring_lab" not in sys.modules
    monkeypatch.setattr(registry.metadata, "entry_points", lambda **_: pytest.fail("looked for packages"))
    registry.check_name("simulator", "tabletop")
    registry.check_name("simulator", "my_lab.dot:make")
    with pytest.raises(ConfigError, match="--world"):
        registry.check_name("world", "pouring")


def test_an_unknown_name_lists_what_there_is_and_the_nearest(install: Install) -> None:
    install("pouring-lab", "pouring = pouring_lab:Pouring")
    words = r"meant 'pouring'.*Built in: tabletop.*Of installed packages: .*pouring.*package\.module:Class"
    with pytest.raises(ConfigError, match=words):
        registry.resolve("simulator", "puoring")


def test_a_name_of_two_packages_is_not_guessed(install: Install) -> None:
    install("pouring-lab", "pouring = pouring_lab:Pouring")
    install("other-lab", "pouring = other_lab:Pouring")
    registry.check_name("simulator", "pouring")
    with pytest.raises(ConfigError, match=r"several installed packages.*(pouring|other)_lab:Pouring or"):
        registry.resolve("simulator", "pouring")


def test_an_entry_point_without_a_class_or_module_is_said(install: Install) -> None:
    install("pouring-lab", "whole = pouring_lab\ngone = gone_lab:Pouring\nless = pouring_lab:Cooking")
    with pytest.raises(ConfigError, match=r"'pouring_lab' has no attribute ''.*package\.module:Class"):
        registry.resolve("simulator", "whole")
    with pytest.raises(ConfigError, match="No module named 'gone_lab'"):
        registry.resolve("simulator", "gone")
    with pytest.raises(ConfigError, match="has no attribute 'Cooking'"):
        registry.resolve("simulator", "less")
