"""Asks the operating system about networks: own addresses, interfaces, and whether a port can be reached."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Final

REACH_DEADLINE: Final = 5.0
"""Seconds that another host has to answer when its port is tried."""
NAMES_OF_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Environment variables that say over which interfaces learner ranks talk."""
_SIOCGIFADDR: Final = 0x8915


def addresses_towards(host: str, port: int, deadline: float) -> tuple[str, str]:
    """Connect to a port; returns the IPv4 address of this end, and that of the other."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as link:
        link.settimeout(deadline)
        link.connect(address)
        return str(link.getsockname()[0]), str(link.getpeername()[0])


def listen(address: str, port: int = 0) -> socket.socket:
    """Open a TCP port that answers who tries it, until it is closed; port 0: one that is free."""
    return socket.create_server((address, port), backlog=1024)


def why_unreachable(address: str, port: int) -> str:
    """Say why a port of another host cannot be reached; empty when it can."""
    try:
        socket.create_connection((address, port), timeout=REACH_DEADLINE).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def is_loopback(address: str) -> bool:
    """Whether only its own host can reach an address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.5")
    (True, False)
    """
    return ipaddress.ip_address(address).is_loopback


def interfaces() -> dict[str, str]:
    """Return the name of every network interface of this host, with its first IPv4 address; empty: none."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:  # It has none.
                found[name] = ""
    return found


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty when none has."""
    return next((name for name, own in interfaces().items() if own == address), "")


def bind_gloo(address: str) -> None:
    """Let gloo, unless it was told otherwise, listen where the other hosts reach this one.

    By itself it takes the address of the host's name, which is often one of the loopback device.

    Args:
        address: Of this host; empty: there are no others, and nothing changes.
    """
    if address and (interface := interface_of(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def missing_interface(environ: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Name a variable of `NAMES_OF_INTERFACES` that fits no interface of this host; empty when there is none.

    The variables list beginnings of names; with `=` before them whole names, with `^` what is left out.

    >>> missing_interface({"NCCL_SOCKET_IFNAME": "ib"}, {"lo": "127.0.0.1", "eth0": ""})
    'NCCL_SOCKET_IFNAME=ib'
    >>> missing_interface({"NCCL_SOCKET_IFNAME": "^lo"}, {"lo": "127.0.0.1", "eth0": ""})
    ''
    """
    for variable in NAMES_OF_INTERFACES:
        text = environ.get(variable, "")
        match = re.fullmatch(r"(?P<how>\^?=?)(?P<names>.*)", text)
        assert match is not None  # Everything fits.
        wanted = [name for name in match["names"].split(",") if name]
        exactly = "=" in match["how"] or variable.startswith("GLOO")
        fits = [name for name in names if any(name == w if exactly else name.startswith(w) for w in wanted)]
        left = [name for name in names if name not in fits] if match["how"].startswith("^") else fits
        if wanted and not left:
            return f"{variable}={text}"
    return ""
