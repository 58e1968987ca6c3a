"""Encode a run's numbers for TensorBoard: one record per update, in the format of its event files.

A record is the length of an `Event` message, a checksum of the length, the message, a checksum of it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.observability.metrics import Metric


def event_file(folder: Path) -> Path:
    """Name a new event file in `folder`."""
    return folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"


def beginning(step: int, now: float) -> bytes:
    """Encode the begin of a file: its version, and that what was written from `step` on before is void."""
    version = _messages().Event(wall_time=now, file_version="brain.Event:2")
    start = _messages().Event(wall_time=now, step=step)
    start.session_log.status = _messages().SessionLog.START
    return _record(version) + _record(start)


def scalars(step: int, values: Mapping[Metric, float], now: float) -> bytes:
    """Encode one update's numbers.

    Args:
        step: The update.
        values: Its numbers.
        now: Seconds since 1970.
    """
    event = _messages().Event(wall_time=now, step=step)
    for metric, value in values.items():
        event.summary.value.add(tag=metric.name, simple_value=float(value))
    return _record(event)


def _messages() -> Any:
    """The generated classes, which appear when the module is imported."""
    from tensorboardX.proto import event_pb2

    return event_pb2


def _record(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content)))
    )
