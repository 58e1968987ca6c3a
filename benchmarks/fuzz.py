"""Damaged messages and replay files in, a table of what became of them out. Bounded; one seed, one result.

    python benchmarks/fuzz.py --messages 100000 --files 2000

A message must end in the one error, or be accepted with a content that is allowed: that of a genuine message,
or, when the damage made the checksum right again, exactly what its header says. Decoding may take twice the
message's bytes plus 16 MiB. A file must end in the one error, or have its content unchanged. A ledger gives
only lines that were written; unless it says that it skipped some, all of them up to where it ends. Files are
read in a process of its own with a limit on memory and a deadline, because libhdf5 may crash; --unguarded
shows what happens without the footer, which is checked before libhdf5 opens a file.
"""

from __future__ import annotations

import json
import random
import resource
import selectors
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from asyncrl.errors import ReplayError
from asyncrl.messaging.wire import decode
from asyncrl.replay.files import format, reader
from asyncrl.replay.files.format import read_group_file
from asyncrl.replay.files.reader import read_group, read_layout
from asyncrl.replay.ledger import read_entries
from asyncrl.replay.store import read_meta
from support.mutations import (
    FORGED,
    checksum_of_group,
    content,
    damaged_file,
    judge,
    mutated,
    valid_files,
    valid_messages,
)

DEADLINE = 20.0
"""Seconds to read one file."""
MEMORY = 4 * 2**30
"""Bytes of address space of the reading process."""
KINDS = ("group",) * 6 + ("ledger", "ledger", "meta", "meta")
OUTCOMES = ("refused", "accepted", "other error", "altered", "crashed", "hung")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fuzz the wire format and the replay's files."""

    messages: int = 100_000
    """Damaged messages to decode."""
    files: int = 2_000
    """Damaged files to read."""
    seed: int = 0
    """Decides every damage."""
    unguarded: bool = False
    """Let libhdf5 open group files whose footer was not checked: to see what that is worth."""


class Reader:
    """A process that reads one file after another and is replaced when it dies or hangs."""

    def __init__(self, unguarded: bool) -> None:
        self._command = [sys.executable, __file__, "--reader", *(["--unguarded"] if unguarded else [])]
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> str:
        """Return 'refused', 'content TEXT', 'other error WHAT', 'crashed SIGNAL' or 'hung'."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            answered = ready.select(DEADLINE)
        if answered and (line := process.stdout.readline()):
            return line.strip()
        outcome = f"crashed {process.wait(DEADLINE)}" if answered else "hung"
        self.close()
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def read_files(unguarded: bool) -> None:
    """Be the reading process: a path per line in, an outcome per line out."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if unguarded:
        format.check_footer = reader.check_footer = lambda handle: None
    for line in sys.stdin:
        try:
            outcome = f"content {_content(Path(line.strip()))}"
        except ReplayError:
            outcome = "refused"
        except Exception as error:  # The boundary of this process: what is not the one error is the finding.
            outcome = f"other error {type(error).__name__}: {str(error)[:100]!r}"
        print(outcome, flush=True)


def _content(path: Path) -> str:
    if path.suffix == ".h5":
        read_group_file(path)
        read_layout(path)
        return str(checksum_of_group(read_group(path)))
    if path.suffix == ".json":
        return json.dumps(read_meta(path.parent))
    warnings = list[str]()
    return json.dumps({"entries": list(read_entries(path, warnings.append)), "reported": len(warnings)})


def fuzz_messages(settings: Settings) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Decode damaged messages; count outcomes per damage, and describe findings."""
    pool, rng = valid_messages(), random.Random(settings.seed)
    genuine = {content(decode(frames)) for frames in pool}
    seen: Counter[tuple[str, str]] = Counter()
    findings: list[str] = []
    tracemalloc.start()
    for number in range(settings.messages):
        name, frames = mutated(rng, pool)
        try:
            outcome = judge(frames, genuine, forged=name in FORGED)
        except AssertionError as error:
            outcome = "altered"
            findings.append(f"message {number} ({name}): {error}")
        except Exception as error:  # Whatever it is, it is the finding.
            outcome = "other error"
            findings.append(f"message {number} ({name}): {type(error).__name__}: {str(error)[:200]}")
        seen[name, outcome] += 1
    tracemalloc.stop()
    return seen, findings


def fuzz_files(settings: Settings, folder: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Read damaged files; count outcomes per kind and damage, and describe findings."""
    files, rng = valid_files(folder), random.Random(settings.seed)
    (folder / "replay.json").write_bytes(files["meta"][0])
    targets = {"group": "damaged.h5", "ledger": "damaged.log", "meta": "replay.json"}
    genuine = {
        "group": {_content(path) for path in folder.glob("group-*.h5")},
        "meta": {_content(folder / "replay.json")},
    }
    written = list(read_entries(folder / "ledger.log", print))
    seen: Counter[tuple[str, str]] = Counter()
    findings: list[str] = []
    reader = Reader(settings.unguarded)
    for number in range(settings.files):
        kind = rng.choice(KINDS)
        name, whole = damaged_file(rng, kind, files)
        path = folder / targets[kind]
        path.write_bytes(whole)
        said = reader.read(path)
        outcome = next(known for known in (*OUTCOMES, "content") if said.startswith(known))
        if outcome == "content":
            text = said.removeprefix("content ")
            sound = _sound(json.loads(text), written) if kind == "ledger" else text in genuine[kind]
            outcome = "accepted" if sound else "altered"
        if outcome not in ("refused", "accepted"):
            findings.append(f"file {number} ({kind}, {name}): {said[:200]}")
        seen[f"{kind} {name}", outcome] += 1
    reader.close()
    return seen, findings


def _sound(read: dict[str, Any], written: list[dict[str, Any]]) -> bool:
    """Whether a damaged ledger gave nothing else than was written, and kept no change to itself."""
    entries = read["entries"]
    if read["reported"]:
        return all(entry in written for entry in entries)
    return entries == written[: len(entries)]


def show(title: str, seen: Counter[tuple[str, str]], findings: list[str], seconds: float) -> None:
    """Print outcomes per damage, and the first findings."""
    print(f"\n{title:<22}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for name in sorted({name for name, _ in seen}):
        print(f"{name:<22}" + "".join(f"{seen[name, outcome]:>12}" for outcome in OUTCOMES))
    sums = [sum(n for (_, found), n in seen.items() if found == outcome) for outcome in OUTCOMES]
    print(f"{'all ' + str(sum(sums)):<22}" + "".join(f"{n:>12}" for n in sums) + f"   in {seconds:.0f} s")
    for finding in findings[:10]:
        print(f"  {finding}")


def main() -> int:
    """Run both parts; exit code 1 when anything but a refusal or unchanged content was seen."""
    if sys.argv[1:2] == ["--reader"]:
        read_files("--unguarded" in sys.argv)
        return 0
    settings = tyro.cli(Settings)
    began = time.monotonic()
    messages = fuzz_messages(settings)
    show("messages", *messages, time.monotonic() - began)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = fuzz_files(settings, Path(folder))
    show("files", *files, time.monotonic() - began)
    return 1 if messages[1] or files[1] else 0


if __name__ == "__main__":
    raise SystemExit(main())
