"""Address of a run's monitor: parsing, checks before a run begins, and the console's line about it."""

from __future__ import annotations

import importlib
import socket
from typing import Final

from asyncrl.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, :PORT or PORT; the default host is the loopback device.

    Raises:
        ConfigError: It is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536) or "/" in host:
        raise ConfigError(
            f"--monitor.listen is {text[:60]!r}, expected HOST:PORT, or PORT alone for the loopback device, "
            "with a port of 1 to 65535. Use 9400, or 0.0.0.0:9400 to be read from other hosts."
        )
    return host or LOOPBACK, int(port)


def check_free(text: str) -> None:
    """Check before a run begins that its monitor can listen; an empty address needs none.

    Raises:
        ConfigError: The address is in use or not of this host, or prometheus_client is missing.
    """
    if not text:
        return
    try:
        importlib.import_module("prometheus_client")
    except ImportError:
        raise ConfigError(
            f"--monitor.listen is {text}, but prometheus_client is not installed. Install it with: pip "
            "install 'asyncrl[monitor]'. Or leave --monitor.listen out."
        ) from None
    try:
        with socket.create_server(parse_address(text), family=family(text)):
            pass
    except OSError as error:
        raise ConfigError(
            f"--monitor.listen is {text}, but it cannot be opened ({error.strerror or error}): perhaps "
            "another run has it. Choose another port. Nothing was started."
        ) from None


def line_about(text: str) -> str:
    """Write the console's line: the monitor's address, and a warning if other hosts can read it."""
    host, port = parse_address(text)
    shown = f"[{host}]" if ":" in host else host
    where = f"monitor:                http://{shown}:{port}/metrics and /healthz"
    if host in ("localhost", "::1") or host.startswith("127."):
        return where
    return (
        f"{where}\n--monitor.listen is beyond loopback: whoever reaches it reads, without a key, the run's "
        "name, its metrics and which processes live. Nothing else, and nothing can be changed there"
    )


def family(host: str) -> socket.AddressFamily:
    """Return the kind of an address; two colons make it IPv6."""
    return socket.AF_INET6 if host.count(":") > 1 else socket.AF_INET
