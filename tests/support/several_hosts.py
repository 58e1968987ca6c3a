"""Several hosts on one machine: namespaces with a name and a network device each, joined by a switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from support.chaos_run import ENTRY
from support.whole_runs import Program

PORT = 29511
"""At which the hosts' torchruns meet, on the first one."""
PATIENCE = 30.0
_SETUP = """
set -e
names=$(mktemp)
echo 127.0.0.1 localhost > "$names"
for number in $(seq 1 "$1"); do echo "10.77.1.$number node-$number" >> "$names"; done
mount --bind "$names" /etc/hosts
rm "$names"
ip link add switch type bridge
ip link set switch up
ip link set lo up
hosts=()
trap 'kill "${hosts[@]}"' EXIT
for number in $(seq 1 "$1"); do
    unshare -nu sleep 3600 & host=$!
    hosts+=("$host")
    until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
    nsenter -t "$host" -u hostname "node-$number"
    ip link add "port$number" type veth peer name eth0 netns "$host"
    ip link set "port$number" master switch up
    nsenter -t "$host" -n ip addr add "10.77.1.$number/24" dev eth0
    nsenter -t "$host" -n ip link set eth0 up
    nsenter -t "$host" -n ip link set lo up
done
echo $$ "${hosts[@]}"
while read -r cut number; do ip link set "port$number" "$cut" && echo done || echo failed; done
"""


def address(number: int) -> str:
    """Of host `number`, counted from 1, towards the others."""
    return f"10.77.1.{number}"


def no_namespaces() -> str:
    """Why several hosts cannot be played here; empty when they can."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"there is no {missing[0]}"
    script = "unshare -n true && ip link add near type veth peer name far"
    done = subprocess.run(["unshare", "-Urn", "bash", "-c", script], capture_output=True, text=True)
    return f"network namespaces: {done.stderr.strip()}" if done.returncode else ""


class SeveralHosts:
    """Hosts node-1, node-2 ... that live as long as the `with` block. All see the same files."""

    def __init__(self, count: int) -> None:
        command = ["unshare", "-Urnum", "bash", "-c", _SETUP, "bash", str(count)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._network, *self._pids = self._answer()
        assert len(self._pids) == count, "the namespaces could not be made"
        self._programs: list[Program] = []

    def on(self, number: int) -> list[str]:
        """Put before a command, runs it on host `number`, counted from 1."""
        return ["nsenter", "--preserve-credentials", "-t", self._pids[number - 1], "-U", "-n", "-u", "-m"]

    def torchrun(
        self, folder: Path, number: int, arguments: list[str], ranks: int = 1, name: str = "", **more: str
    ) -> Program:
        """Start `asyncrl train` by torchrun on host `number`; it takes notes in `folder` (`chaos_entry`).

        `more`: variables of the environment, and `nnodes`, `max_restarts` and `rdzv_conf` of torchrun.
        """
        options = {
            "nnodes": more.pop("nnodes", str(len(self._pids))),
            "nproc-per-node": str(ranks),
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{address(1)}:{PORT}",
            "rdzv-id": "job",
            "local-addr": address(number),
            "max-restarts": more.pop("max_restarts", "0"),
            "rdzv-conf": more.pop("rdzv_conf", "join_timeout=300"),
        }
        start = [sys.executable, "-m", "torch.distributed.run"]
        start += [text for flag, value in options.items() for text in (f"--{flag}", value)]
        command = [*self.on(number), *start, str(ENTRY), *arguments]
        (folder / "gate").write_text("1000000000")  # Nobody holds the learner up.
        notes = {"CHAOS_NOTES": str(folder / "notes.jsonl"), "CHAOS_SILENCE": "5"}
        self._programs.append(Program(folder, name or f"node-{number}", command, more=notes | more))
        return self._programs[-1]

    def command(self, number: int, command: list[str]) -> None:
        """Run a short command on a host, as its root."""
        subprocess.run([*self.on(number), *command], check=True, timeout=PATIENCE)

    def connect(self, number: int, *, up: bool) -> None:
        """Plug a host's cable into the switch, or pull it out."""
        assert self._holder.stdin is not None
        self._holder.stdin.write(f"{'up' if up else 'down'} {number}\n")
        self._holder.stdin.flush()
        assert self._answer() == ["done"]

    def kill(self, number: int) -> None:
        """End all processes of a host at once, as when its power fails."""
        for pid in self.processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, number: int) -> list[int]:
        """Those that were started on a host."""
        holder = self._pids[number - 1]
        network = _network_of(holder)
        found = (path.name for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [int(pid) for pid in found if pid != holder and _network_of(pid) == network]

    def __enter__(self) -> SeveralHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(1, 1 + len(self._pids)):
            self.kill(number)  # What a test that failed left behind.
        for program in self._programs:
            program.process.wait(PATIENCE)
        assert self._holder.stdin is not None
        self._holder.stdin.close()  # Ends its `read`.
        self._holder.wait(PATIENCE)
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def _answer(self) -> list[str]:
        assert self._holder.stdout is not None
        return self._holder.stdout.readline().split()


def _network_of(pid: str) -> str:
    """Empty: the process has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
