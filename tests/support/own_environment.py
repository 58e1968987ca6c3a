"""The package `my_lab` of docs/own_environment.md, written to a folder outside the repository."""

from __future__ import annotations

import re
from pathlib import Path

from support import ROOT

PAGE = ROOT / "docs" / "own_environment.md"
DOT = "my_lab.dot:make"
_BLOCK = re.compile(r"^```python\n# (my_lab/\w+\.py)\n(.*?)^```$", re.S | re.M)


def write_my_lab(folder: Path) -> Path:
    """Write the example; returns the folder from which `my_lab` can be imported."""
    for name, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
