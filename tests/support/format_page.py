"""The programs that docs/replay_format.md prints."""

from __future__ import annotations

import re
import subprocess
import sys

from support import ROOT

PAGE = ROOT / "docs" / "replay_format.md"


def program(place: int) -> str:
    """One of the page's Python blocks, and a last line that proves who was not needed."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) == 2
    return blocks[place] + "\nassert not any(name.startswith('asyncrl') for name in sys.modules)\n"


def run_program(*arguments: str, place: int = 0) -> subprocess.CompletedProcess[str]:
    # -I: neither PYTHONPATH nor this folder help the stranger.
    command = [sys.executable, "-I", "-c", program(place), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
