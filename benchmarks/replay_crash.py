"""Whether the replay loses what it acknowledged: kills, cuts at every write, and lost power.

    python benchmarks/replay_crash.py --kills 300 --losses 300

kills    a process that writes is ended with SIGKILL at a random moment, again and again, in one folder;
         every other one writes its files in a thread, as the replay's service does
cuts     the system calls of a writing process are recorded (strace), and its folder is rebuilt as it was
         after every one of them and in the middle of every write
losses   the same, but what was not yet synced is lost at random: single writes of a file, and the newest
         renames and deletions

Each folder is opened as a run would open it. Every episode that was acknowledged before must be there with
its content, every group that is served must be whole, and nothing may need a hand.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from zlib import crc32

import tyro
from replay_episodes import make_episode
from tqdm import tqdm

from asyncrl.config.loading import overlay
from asyncrl.config.run import TrainConfig
from asyncrl.launch.roles import open_run_replay
from asyncrl.records import Episode
from asyncrl.replay.replay import Replay

SETTINGS = {"algorithm": {"group_size": 2, "groups_per_update": 2}, "replay": {"max_lag": 1000}}
TRACED = (
    "openat,write,pwrite64,writev,pwritev,pwritev2,lseek,ftruncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,"
    "fsync,fdatasync,close,dup,dup2"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Try to lose an acknowledged episode."""

    kills: int = 300
    groups: int = 12
    """Groups of the recorded run."""
    losses: int = 300
    """Moments at which power is lost."""
    seed: int = 0


@dataclass
class Verdict:
    """What was found in the folders that were opened."""

    folders: int = 0
    acknowledged: int = 0
    lost: int = 0
    torn: int = 0
    """Groups that were served with another content than was written."""
    failed: int = 0
    """Folders that could not be opened."""
    reasons: list[str] = field(default_factory=list)


def episode(group: int, member: int) -> Episode:
    """An episode whose numbers follow from its place alone."""
    return make_episode(group, member, size=2, decisions=2, image=24, success=member == 1)


def content(of: Episode) -> int:
    """A checksum of what must come back."""
    return crc32(
        b"".join(
            x.tobytes() for x in (of.frames, of.sample["tokens"], of.logprobs, of.actions, of.final_frame)
        )
    )


def open_again(folder: Path) -> Replay:
    """Open a folder as a run does."""
    return open_run_replay(folder, overlay(TrainConfig(), SETTINGS, "crash"), warn=lambda line: None)


def write(folder: str, groups: str, thread: str = "") -> None:
    """The process that is killed: grants, episodes, batches; says the id of each acknowledged episode.

    With a `thread` the files are written beside, as the replay's service does it.
    """
    core = open_again(Path(folder))
    if thread:
        core.write_in_background()
    core.begin(os.urandom(4).hex(), core.state.limiter.version)
    core.hello("writer", os.urandom(4).hex())
    for _ in range(int(groups)):
        grant = core.grant("writer")
        assert grant is not None
        for member in range(2):
            receipt = core.admit(episode(grant.number, member))
            receipts = [receipt, *(other for _, other in core.take_receipts())]
            said = "".join(f"{r.episode_id}\n" for r in receipts if r.status == "stored")
            os.write(1, said.encode())
        core.maintain()
        core.sample(2, core.state.limiter.version + 1, request=f"{grant.number}-{os.getpid()}")
    core.close()


def check(folder: Path, acknowledged: set[str], verdict: Verdict) -> None:
    """Open a folder and compare it with what was acknowledged."""
    verdict.folders += 1
    verdict.acknowledged += len(acknowledged)
    try:
        core = open_again(folder)
    except Exception as error:
        verdict.failed += 1
        verdict.reasons.append(repr(error))
        return
    served: set[str] = set()
    for number in list(core.store.group_files):
        for found in core.store.load(number) or []:
            served.add(found.episode_id)
            verdict.torn += content(found) != content(episode(number, found.member))
    core.close()
    if missing := acknowledged - served:
        verdict.lost += len(missing)
        verdict.reasons.append(f"{len(missing)} lost, for example {min(missing)}")


def kill_often(settings: Settings, folder: Path) -> Verdict:
    """Kill the writer of one folder again and again, and look after each kill."""
    moments, verdict, acknowledged = random.Random(settings.seed), Verdict(), set[str]()
    for turn in tqdm(range(settings.kills), desc="kills"):
        command = [sys.executable, __file__, "write", str(folder), "1000000", *["thread"] * (turn % 2)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(moments.randint(1, 8)):
            acknowledged.add(writer.stdout.readline().strip())
        time.sleep(moments.uniform(0, 0.02))
        writer.kill()
        acknowledged |= {line.strip() for line in writer.stdout if line.endswith("\n")}
        writer.stdout.close()
        writer.wait(10)
        check(folder, acknowledged - {""}, verdict)
        trim(folder, acknowledged)
    return verdict


def trim(folder: Path, acknowledged: set[str]) -> None:
    """Start afresh now and then, so that looking stays quick."""
    if len(acknowledged) > 400:
        shutil.rmtree(folder)
        acknowledged.clear()


@dataclass(frozen=True)
class Call:
    """A system call that changed the folder, or acknowledged."""

    kind: Literal["open", "write", "truncate", "rename", "unlink", "mkdir", "sync", "say"]
    path: str = ""
    data: bytes = b""
    offset: int = 0
    """-1: at the end."""


def record(settings: Settings, folder: Path) -> list[Call]:
    """Write some groups under strace (one thread does it all); returns the calls in their order."""
    trace = folder.with_suffix(".trace")
    strace = ["strace", "-v", "-o", str(trace), "-xx", "-s", "10000000", "-e", f"trace={TRACED}"]
    command = [sys.executable, __file__, "write", str(folder), str(settings.groups)]
    subprocess.run([*strace, *command], check=True, stdout=subprocess.DEVNULL)
    return list(parse(trace, str(folder)))


def text_of(quoted: str) -> bytes:
    """The bytes that strace wrote as hexadecimal escapes."""
    return bytes.fromhex(quoted.replace("\\x", ""))


def parse(trace: Path, root: str) -> Iterator[Call]:
    """Understand a trace: files below `root` by their names, and what was said on standard output."""
    line_of = re.compile(r"^(\w+)\((.*)\)\s+=\s+(-?\d+)")
    quoted, files = re.compile(r'"((?:\\x[0-9a-f]{2})*)"'), dict[int, str]()
    offsets, appends = dict[int, int](), set[int]()
    for line in trace.read_text().splitlines():
        if not (match := line_of.match(line)) or int(match[3]) < 0:
            continue
        name, arguments, result = match[1], match[2], int(match[3])
        texts = [text_of(x) for x in quoted.findall(arguments)]
        number = int(arguments.split(",")[0]) if arguments.split(",")[0].strip().isdigit() else -1
        if name == "openat":
            path = texts[0].decode(errors="replace")
            files.pop(result, None)
            if path.startswith(root):
                files[result], offsets[result] = path, 0
                appends.discard(result)
                appends |= {result} if "O_APPEND" in arguments else set()
                if "O_CREAT" in arguments or "O_TRUNC" in arguments:
                    yield Call("open", path, b"trunc" if "O_TRUNC" in arguments else b"")
        elif name == "write" and number == 1:
            yield Call("say", data=texts[0])
        elif number in files and name in ("write", "pwrite64"):
            numbers = arguments.rpartition('"')[2].split(",")
            at = int(numbers[2]) if name == "pwrite64" else -1 if number in appends else offsets[number]
            offsets[number] += result if name == "write" else 0
            yield Call("write", files[number], texts[0][:result], at)
        elif number in files and name in ("pwritev", "pwritev2"):
            at = int(arguments.rpartition("]")[2].split(",")[2])
            assert len(b"".join(texts)) == result
            for text in texts:  # Each may reach the disk without the others.
                yield Call("write", files[number], text, at)
                at += len(text)
        elif number in files and name == "lseek":
            offsets[number] = result
        elif number in files and name == "ftruncate":
            yield Call("truncate", files[number], offset=int(arguments.split(",")[1]))
        elif number in files and name in ("fsync", "fdatasync"):
            yield Call("sync", files[number])
        elif name == "close":
            files.pop(number, None)
        elif name.startswith(("rename", "unlink", "mkdir")) and texts[0].decode().startswith(root):
            target = texts[1] if name.startswith("rename") else b""
            yield Call({"r": "rename", "u": "unlink", "m": "mkdir"}[name[0]], texts[0].decode(), target)  # type: ignore[arg-type]
        elif number in files:
            raise ValueError(f"the trace has a call that is not understood: {name}")


class Disk:
    """A folder as its writer sees it, and as it would be after power is lost."""

    def __init__(self) -> None:
        self.names: dict[str, list[Call]] = {}
        """Name -> the writes of its file, in their order."""
        self.synced: dict[int, int] = {}
        """Identity of a file's list -> how many of its writes are on the disk."""
        self.durable: dict[str, list[Call]] = {}
        """Names on the disk."""
        self.steps: list[dict[str, list[Call]]] = []
        """Names after each change since the folder was last synced."""
        self.folders: list[str] = []

    def apply(self, call: Call) -> None:
        """Do what the call did."""
        if call.kind == "open":
            self.names.setdefault(call.path, [])
            if call.data:
                self.names[call.path].append(Call("truncate", call.path))
        elif call.kind in ("write", "truncate"):
            self.names[call.path].append(call)
        elif call.kind == "rename":
            self.names[call.data.decode()] = self.names.pop(call.path)
        elif call.kind == "unlink":
            self.names.pop(call.path, None)
        elif call.kind == "mkdir":
            self.folders.append(call.path)
        if call.kind in ("open", "rename", "unlink"):
            self.steps.append(dict(self.names))
        elif call.kind == "sync" and call.path in self.names:
            self.synced[id(self.names[call.path])] = len(self.names[call.path])
            if call.path not in self.durable:
                # A new file that was synced has its name on the disk too (as on ext4, xfs and btrfs).
                self.durable[call.path] = self.names[call.path]
        elif call.kind == "sync":
            self.durable, self.steps = dict(self.names), []

    def build(self, folder: Path, root: str, luck: random.Random | None = None) -> None:
        """Make the folder: as its writer saw it, or with luck as the disk has it after power was lost."""
        folder.mkdir()
        names = self.names
        if luck is not None:
            kept = luck.randint(0, len(self.steps))
            names = self.steps[kept - 1] if kept else self.durable
        for made in self.folders:
            (folder / Path(made).relative_to(root)).mkdir(parents=True, exist_ok=True)
        for name, calls in names.items():
            synced = self.synced.get(id(calls), 0)
            kept_calls = [c for i, c in enumerate(calls) if luck is None or i < synced or luck.random() < 0.5]
            (folder / Path(name).relative_to(root)).write_bytes(bytes_of(kept_calls))


def bytes_of(calls: list[Call]) -> bytes:
    """The content that writes make up; what is left out is zeros."""
    data = bytearray()
    for call in calls:
        if call.kind == "truncate":
            data = data[: call.offset].ljust(call.offset, b"\0")
            continue
        at = len(data) if call.offset < 0 else call.offset
        data = data.ljust(at, b"\0")
        data[at : at + len(call.data)] = call.data
    return bytes(data)


def half(call: Call) -> Call:
    """A write of which only the first half arrived."""
    return Call(call.kind, call.path, call.data[: len(call.data) // 2], call.offset)


def cut_everywhere(
    calls: list[Call], root: str, scratch: Path, settings: Settings
) -> tuple[Verdict, Verdict]:
    """Rebuild and open the folder after every call and within every write; lose power at some of them."""
    cuts, losses, luck = Verdict(), Verdict(), random.Random(settings.seed)
    disk, acknowledged = Disk(), set[str]()
    often = settings.losses / max(1, len(calls))
    for number, call in enumerate(tqdm(calls, desc="cuts")):
        if call.kind == "say":
            acknowledged |= set(call.data.decode().split())
            continue
        states = [half(call), call] if call.kind == "write" else [call]
        for part, state in enumerate(states):
            if part + 1 < len(states):
                disk.names[call.path].append(state)
            else:
                disk.apply(state)
            folder = scratch / f"cut-{number}-{part}"
            disk.build(folder, root)
            check(folder, acknowledged, cuts)
            shutil.rmtree(folder)
            if part + 1 < len(states):
                disk.names[call.path].pop()
        for turn in range(int(often) + (luck.random() < often % 1)):
            folder = scratch / f"loss-{number}-{turn}"
            disk.build(folder, root, luck)
            check(folder, acknowledged, losses)
            shutil.rmtree(folder)
    return cuts, losses


def row(name: str, verdict: Verdict) -> str:
    """One line of the table."""
    numbers = (verdict.folders, verdict.acknowledged, verdict.lost, verdict.torn, verdict.failed)
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |"


def main() -> None:
    """Try all three, print a table."""
    settings = tyro.cli(Settings, description=__doc__)
    print(f"{' '.join(sys.argv)}\n")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        killed = kill_often(settings, scratch / "killed")
        root = scratch / "recorded"
        calls = record(settings, root)
        cuts, losses = cut_everywhere(calls, str(root), scratch, settings)
    kinds = {kind: sum(call.kind == kind for call in calls) for kind in ("write", "sync", "rename", "say")}
    print(f"recorded: {json.dumps(kinds)}\n")
    print("| | folders opened | acknowledged before | lost | torn | not opened |\n|---|---|---|---|---|---|")
    print("\n".join((row("kill -9", killed), row("cut at every write", cuts), row("power lost", losses))))
    for reason in [*killed.reasons, *cuts.reasons, *losses.reasons][:5]:
        print(reason)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(*sys.argv[2:])
    else:
        main()
