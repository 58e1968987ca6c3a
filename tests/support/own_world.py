"""The package `my_lab` of docs/own_world.md, written to a folder outside the repository, with its model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support import ROOT

PAGE = ROOT / "docs" / "own_world.md"
PAINTER = "my_lab.painter:PainterWorld@models/painter"
_BLOCK = re.compile(r"^```python\n# (my_lab/\w+\.py)\n(.*?)^```$", re.S | re.M)


def files_of_page() -> dict[str, str]:
    """The examples of the page by path."""
    return dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def commands_of_page() -> list[list[str]]:
    """The arguments of the page's commands, one list for each."""
    found = re.search(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert found
    return [line.split() for line in found[1].replace("\\\n", " ").splitlines()]


def write_painter(folder: Path) -> Path:
    """Write the package, and its model by the page's first command; returns `folder`."""
    for name, text in files_of_page().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    python, *arguments = commands_of_page()[0]
    assert python == "python"
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, timeout=60)
    return folder
