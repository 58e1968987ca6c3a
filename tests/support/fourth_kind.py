"""A further kind of world models, which only a test knows of."""

from __future__ import annotations

from pathlib import Path

from asyncrl.storage.weight_files import names_in
from asyncrl.worlds.opensora.world import OpenSoraWorld

MARK = "fourth.weight"


class FourthWorld(OpenSoraWorld):
    """Draws as OpenSora does."""


def lacks(folder: Path) -> str:
    return "" if MARK in names_in(folder) else f"no tensor {MARK} in its *.safetensors"
