"""Two hosts on one machine: namespaces with a name and a network device each, joined by a cable."""

from __future__ import annotations

import shutil
import subprocess
from types import TracebackType

NEAR_ADDRESS = "10.77.0.1"
"""Of the first host; that of the second is 10.77.0.2."""
NAMES = ("node-1", "node-2")
"""What the hosts are called. No name server knows them."""
PATIENCE = 30.0
_SETUP = """
set -e
hostname "$1"
unshare -nu sleep 3600 & FAR=$!
trap 'kill $FAR' EXIT
until [ "$(readlink /proc/$FAR/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
nsenter -t $FAR -u hostname "$2"
ip link add near type veth peer name far
ip link set far netns $FAR
ip addr add 10.77.0.1/24 dev near
ip link set near up
ip link set lo up
nsenter -t $FAR -n ip addr add 10.77.0.2/24 dev far
nsenter -t $FAR -n ip link set far up
nsenter -t $FAR -n ip link set lo up
echo $$ $FAR
read -r || true
"""


def no_namespaces() -> str:
    """Why two hosts cannot be played here; empty when they can."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"there is no {missing[0]}"
    script = "unshare -n true && ip link add near type veth peer name far"
    done = subprocess.run(["unshare", "-Urn", "bash", "-c", script], capture_output=True, text=True)
    return f"network namespaces: {done.stderr.strip()}" if done.returncode else ""


class TwoHosts:
    """Hosts that live as long as the `with` block."""

    def __init__(self) -> None:
        command = ["unshare", "-Urnu", "bash", "-c", _SETUP, "bash", *NAMES]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().split()
        assert len(said) == 2, "the namespaces could not be made"
        near, far = said
        self.near = ["nsenter", "--preserve-credentials", "-t", near, "-U", "-n", "-u"]
        """Put before a command, runs it on the first host."""
        self.far = ["nsenter", "--preserve-credentials", "-t", far, "-U", "-n", "-u"]
        """Put before a command, runs it on the second host."""
        self.far_from_near = f"nsenter -t {far} -n -u"
        """Put before a command of the first host, runs it on the second."""

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()  # Ends its `read`.
        self._holder.wait(PATIENCE)
        assert self._holder.stdout is not None
        self._holder.stdout.close()
