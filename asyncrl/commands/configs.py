"""`asyncrl configs`: list the shipped configuration files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tyro

import asyncrl
from asyncrl.observability.console import hanging


@dataclass(frozen=True, kw_only=True)
class ConfigsConfig:
    """List the shipped configuration files."""


ARGUMENTS: Final = ConfigsConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str]) -> int:
    """Print each file with its first comment line."""
    tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl configs")
    folder = Path(asyncrl.__file__).parents[1] / "configs"
    files = sorted(folder.glob("*.toml"))
    if not files:
        print(f"There are no configuration files in {folder}: they come with the repository, not with the")
        print("installed package. `asyncrl train` without a file uses the defaults of tabletop.toml.")
        return 0
    width = max(len(_shown(file)) for file in files)
    for file in files:
        print(hanging(f"{_shown(file):<{width}}  ", _about(file)))
    print("\nUse one with `asyncrl train FILE`; flags after it win.")
    return 0


def _about(file: Path) -> str:
    return file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
