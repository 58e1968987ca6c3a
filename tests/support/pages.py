"""The packages that pages of docs/ let a reader write: read from the page, written to a folder."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

DOT = "my_lab.dot:make"
"""Of own_environment.md."""
PAINTER = "my_lab.painter:PainterWorld@models/painter"
"""Of own_world.md."""
_FILE = re.compile(r"^```python\n# (my_\w+/\w+\.py)\n(.*?)^```$", re.S | re.M)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def files_of(page: str) -> dict[str, str]:
    """Path -> text of the page's examples."""
    return dict(_FILE.findall(text_of(page)))


def write_files(page: str, folder: Path) -> Path:
    """Write the examples; returns the folder from which they can be imported."""
    for name, text in files_of(page).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder whose packages can be imported, and forget them at the end."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_lab", "my_robot", "wrong")]:
        del sys.modules[name]


def commands_of_own_world() -> list[list[str]]:
    """The arguments of the page's commands, one list for each."""
    found = re.search(r"^```bash\n(.*?)^```$", text_of("own_world.md"), re.S | re.M)
    assert found
    return [line.split() for line in found[1].replace("\\\n", " ").splitlines()]


def write_painter(folder: Path) -> Path:
    """Write the world of own_world.md, and its model by the page's first command."""
    write_files("own_world.md", folder)
    _, *arguments = commands_of_own_world()[0]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, timeout=60)
    return folder


def replay_program(place: int) -> str:
    """One of the programs of replay_format.md, and a last line that proves who was not needed."""
    blocks = re.findall(r"```python\n(.*?)```", text_of("replay_format.md"), flags=re.S)
    assert len(blocks) == 2
    return blocks[place] + "\nassert not any(name.startswith('asyncrl') for name in sys.modules)\n"


def run_program(*arguments: str, place: int = 0) -> subprocess.CompletedProcess[str]:
    # -I: neither PYTHONPATH nor this folder help the stranger.
    command = [sys.executable, "-I", "-c", replay_program(place), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
