"""Monitor of a run by HTTP: `/metrics` for Prometheus, `/healthz` for a supervisor.

monitor's thread   consumes   connections                  waits for: a connection   ended by: `close`
a thread of each   produces   one answer, then it closes   waits for: the client     ended by: REQUEST_SECONDS
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import ConfigError
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Readings
from asyncrl.observability.process_status import GRACE

REQUEST_SECONDS: Final = 5.0  # longest silence of a client
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Reply = tuple[int, str, bytes]  # Status, type and content of an answer
_log = logging.getLogger(__name__)


# --- address ---


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, :PORT or PORT; the default host is the loopback device."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536) or "/" in host:
        raise ConfigError(
            f"--monitor.listen is {text[:60]!r}, expected HOST:PORT, or PORT alone for the loopback device, "
            "with a port of 1 to 65535. Use 9400, or 0.0.0.0:9400 to be read from other hosts."
        )
    return host or "127.0.0.1", int(port)


def check_free(text: str) -> None:
    """Raise ConfigError if the run's monitor could not listen; an empty address needs none."""
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
        f"{where}\n--monitor.listen is beyond loopback: anyone who reaches it reads, without a key, the "
        "run's name, its metrics and which processes live. Nothing else, and nothing can be changed there"
    )


def family(host: str) -> socket.AddressFamily:
    """Return the kind of an address; two colons make it IPv6."""
    return socket.AF_INET6 if host.count(":") > 1 else socket.AF_INET


# --- answers ---


def stalled(activity: process_status.ThreadActivity) -> bool:
    """Return True if an activity has less than GRACE seconds left (a wait: none until its deadline)."""
    return 0 < activity.allowed - min(GRACE, activity.allowed / 2) < activity.seconds


def unhealthy(processes: Sequence[process_status.Process]) -> list[str]:
    """List the stalled activities of living processes; dead actors and replays are respawned."""
    return [
        f"{process.role}: {activity.what!r} takes {activity.seconds:.0f} s, and may {activity.allowed:.0f} s"
        for process in processes
        if process.alive
        for activity in process.activities
        if stalled(activity)
    ]


def name_of(metric: str) -> str:
    """Return a metric's name in Prometheus."""
    return "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


class Monitor(AbstractContextManager["Monitor"]):
    """Answers for one run, and collects its numbers for prometheus_client."""

    def __init__(
        self,
        address: tuple[str, int],
        run_dir: Path,
        *,
        updates: int,
        resume_step: int = 0,
        clock: Callable[[], float] = time.time,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Listen at an address that is free (`check_free`); port 0 picks a free one, see `address`."""
        self._run_dir, self._updates, self._clock = run_dir, updates, clock
        self._began, self._since = clock(), time.time()
        self._last: tuple[int, float, Readings] = (resume_step, self._began, {})  # replaced as a whole
        self._server = _Server(address, self._answer, request_seconds)
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="monitor", daemon=True
        )
        self._thread.start()

    def note(self, step: int, values: Readings) -> None:
        """Store a row for later requests."""
        self._last = (step, self._clock(), dict(values))

    def close(self) -> None:
        """Stop listening; open connections end at their deadline. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def collect(self) -> Iterator[Any]:
        """Yield the families of `/metrics`: progress, processes and the last row."""
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, about: str, *rows: tuple[float, list[str]], labels: Sequence[str] = ()) -> Any:
            made = GaugeMetricFamily(name_of(name), about, labels=["run", *labels])
            for value, texts in rows:
                made.add_metric([self._run_dir.name, *texts], value)
            return made

        processes, (step, at, values) = self._processes(), self._last
        about = "Constant 1; name and version of the run."
        yield gauge("run_info", about, (1.0, [__version__]), labels=["version"])
        for name, about, value in (
            ("run_healthy", "1 where /healthz answers 200.", float(not unhealthy(processes))),
            ("run_updates", "Updates at which the run ends.", self._updates),
            ("run_update", "Update last written.", step),
            ("run_last_update_timestamp_seconds", "Its time; before the first, the run's start.", at),
            ("run_start_timestamp_seconds", "Time at which this start of the run began.", self._began),
        ):
            yield gauge(name, about, (value, []))
        # Names of activities are no labels: each new one would be a series of its own.
        labels = ["role", "name"]
        named = [(process, [process.role.partition("-")[0], process.role]) for process in processes]
        up = [(float(process.alive), names) for process, names in named]
        busy = [(x.main.seconds, names) for x, names in named if x.alive and x.main is not None]
        yield gauge("process_up", "1 while a process of the run lives.", *up, labels=labels)
        about = "Age of its main thread's activity (`asyncrl status`)."
        yield gauge("process_activity_seconds", about, *busy, labels=labels)
        for metric, value in values.items():
            about = f"{metric.meaning} Unit: {metric.unit}. {metric.advice}"
            yield gauge(metric.name, about, (value, []))

    def _answer(self, path: str) -> Reply:
        from prometheus_client import CollectorRegistry, generate_latest

        if path == "/healthz":
            reasons, (step, at, _) = unhealthy(self._processes()), self._last
            found = {"healthy": not reasons, "update": step, "seconds_since": round(self._clock() - at, 1)}
            text = json.dumps(found | {"reasons": reasons}) + "\n"
            return 503 if reasons else 200, "application/json", text.encode()
        if path == "/metrics":
            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            return 200, CONTENT_TYPE, generate_latest(registry)
        return 404, "text/plain; charset=utf-8", b"There are /metrics and /healthz.\n"

    def _processes(self) -> list[process_status.Process]:
        # Those of this start of the run, without those that died in an earlier one.
        found, folder = [], self._run_dir / process_status.FOLDER
        for process in process_status.read(self._run_dir):
            with suppress(OSError):  # Replaced at this moment: the next look finds the new file.
                if process.alive or (folder / process.role).stat().st_ctime >= self._since:
                    found.append(process)
        return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Reply], seconds: float) -> None:
        self.address_family, self.answer = family(address[0]), answer
        super().__init__(address, type("Handler", (_Handler,), {"timeout": seconds}))

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.info("a monitoring request of %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request of HTTP/1.0: the connection ends with its answer."""

    server_version = f"asyncrl/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        server: Any = self.server
        status, kind, content = server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
