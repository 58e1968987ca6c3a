"""Answer monitoring by HTTP: `/metrics` for Prometheus, `/healthz` for whoever restarts what hangs.

monitor's thread   consumes   connections                  waits for: a connection   ended by: `close`
a thread of each   produces   one answer, then it closes   waits for: the client     ended by: REQUEST_SECONDS

It reads what the run publishes anyway (`process_status`) and the last row it was told, and changes nothing.
There are at most CONNECTIONS at once; one more is closed unanswered.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from asyncrl import __version__
from asyncrl.errors import ConfigError
from asyncrl.observability import process_status
from asyncrl.observability.exposition import CONTENT_TYPE, Progress, exposition
from asyncrl.observability.metrics import Readings
from asyncrl.observability.monitor_address import family
from asyncrl.observability.waits import GRACE

CONNECTIONS: Final = 16
REQUEST_SECONDS: Final = 5.0
"""From a connection's begin to its end, whatever the client does."""
FRESH_SECONDS: Final = 1.0
"""An answer is given again for so long: however many ask, training is held up no more."""
Reply = tuple[int, str, str]
"""Status, type and text of an answer."""
_POLL: Final = 0.2
_log = logging.getLogger(__name__)


def stalled(activity: process_status.ThreadActivity) -> bool:
    """Whether an activity shows no progress: nearly all of the time it may take without a sign is over.

    That time is each activity's and wait's own, renewed by each sign (`process_status.progress`).
    Of a wait its last GRACE seconds lie behind its deadline already; then the watchdog ends the process.
    """
    return 0 < activity.allowed - min(GRACE, activity.allowed / 2) < activity.seconds


def unhealthy(processes: Sequence[process_status.Process]) -> list[str]:
    """Say which living processes make no progress.

    A dead actor or replay is respawned; that it stays away, the learner's wait for a batch shows.
    """
    return [
        f"{process.role}: {activity.what!r} takes {activity.seconds:.0f} s, and may {activity.allowed:.0f} s"
        for process in processes
        if process.alive
        for activity in process.activities
        if stalled(activity)
    ]


class Monitor:
    """Answers for one run. It hears of rows by `note`."""

    def __init__(
        self,
        address: tuple[str, int],
        run_dir: Path,
        *,
        updates: int,
        resume_step: int = 0,
        clock: Callable[[], float] = time.time,
        request_seconds: float = REQUEST_SECONDS,
        connections: int = CONNECTIONS,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        """Begin to listen.

        Args:
            address: Host and port; port 0: one that is free (`address`).
            run_dir: Of the run.
            updates: At which it ends.
            resume_step: Update that it goes on from.
            clock: Seconds since 1970.
            request_seconds: See `REQUEST_SECONDS`.
            connections: See `CONNECTIONS`.
            fresh_seconds: See `FRESH_SECONDS`.

        Raises:
            ConfigError: It cannot listen there.
        """
        self._run_dir, self._updates, self._clock = run_dir, updates, clock
        self._began, self._since = clock(), time.time()
        self._fresh_seconds = fresh_seconds
        self._answers = dict[str, tuple[float, Reply]]()
        """Path -> until when, and what is answered."""
        self._lock = threading.Lock()
        """Around them: an answer is made by one thread at a time."""
        self._last: tuple[int, float, Readings] = (resume_step, self._began, {})
        """Replaced as a whole, so that no lock is needed."""
        try:
            self._server = _Server(address, self._answer, request_seconds, connections)
        except OSError as error:
            raise ConfigError(
                f"--monitor.listen is {address[0]}:{address[1]}, but it cannot be opened "
                f"({error.strerror or error}). Choose another port."
            ) from None
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL,), name="monitor", daemon=True
        )
        self._thread.start()

    def note(self, step: int, values: Readings) -> None:
        """Hear of a row; see `RowReader`."""
        self._last = (step, self._clock(), dict(values))

    def close(self) -> None:
        """Stop listening, and end what is under way. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Monitor:
        """Close at the end of a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()

    def _answer(self, path: str) -> Reply:
        if path not in ("/healthz", "/metrics"):
            return 404, "text/plain; charset=utf-8", "There are /metrics and /healthz.\n"
        with self._lock:
            until, reply = self._answers.get(path, (0.0, None))
            if reply is None or time.monotonic() >= until:
                reply = self._health() if path == "/healthz" else self._metrics()
                self._answers[path] = (time.monotonic() + self._fresh_seconds, reply)
            return reply

    def _health(self) -> Reply:
        reasons, (step, at, _) = unhealthy(self._processes()), self._last
        told = {"healthy": not reasons, "update": step, "seconds_since": round(self._clock() - at, 1)}
        text = json.dumps(told | {"reasons": reasons}) + "\n"
        return 503 if reasons else 200, "application/json", text

    def _metrics(self) -> Reply:
        processes, (step, at, values) = self._processes(), self._last
        progress = Progress(
            run=self._run_dir.name, updates=self._updates, step=step, at=at, began=self._began
        )
        return 200, CONTENT_TYPE, exposition(progress, values, processes, healthy=not unhealthy(processes))

    def _processes(self) -> list[process_status.Process]:
        """Those of this start of the run, and what else lives; not the dead ones of an earlier start."""
        folder = self._run_dir / process_status.FOLDER
        return [
            process
            for process in process_status.read(self._run_dir)
            if process.alive or _changed_at(folder / process.role) >= self._since
        ]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0  # It was replaced at this moment, and the next look finds the new one.


class _Server(ThreadingHTTPServer):
    """Threads for a bounded number of connections, each for a bounded time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[str], Reply],
        request_seconds: float,
        connections: int,
    ) -> None:
        self.address_family = family(address[0])
        self.answer, self._seconds, self._most = answer, request_seconds, connections
        self._open = dict[socket.socket, float]()
        """Connection -> when it must be over."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server what this host is called."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, unless there are too many."""
        with self._lock:
            if fits := len(self._open) < self._most:
                self._open[request] = time.monotonic() + self._seconds
        if fits:
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut what takes too long; called several times a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._open.items() if now > until]
        self._cut(late)

    def server_close(self) -> None:
        """Stop listening and cut what is open."""
        super().server_close()
        with self._lock:
            left = list(self._open)
        self._cut(left)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that broke, which is the client's matter."""
        _log.info("a monitoring request of %s broke off", client_address, exc_info=True)

    def _cut(self, requests: Sequence[socket.socket]) -> None:
        for request in requests:
            try:
                request.shutdown(socket.SHUT_RDWR)  # Its thread wakes up and closes it.
            except OSError:
                continue  # It is over already.


class _Handler(BaseHTTPRequestHandler):
    """One request of HTTP/1.0: the connection ends with its answer."""

    timeout = REQUEST_SECONDS
    server_version = f"asyncrl/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        self._reply(with_text=True)

    def do_HEAD(self) -> None:
        """Answer without the text."""
        self._reply(with_text=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a request every few seconds is no news."""

    def _reply(self, *, with_text: bool) -> None:
        server: Any = self.server
        status, kind, text = server.answer(self.path.partition("?")[0])
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_text:
            self.wfile.write(content)
