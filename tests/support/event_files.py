"""Reads TensorBoard's event files record by record, with their lengths and checksums."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c


def events_in(content: bytes) -> list:
    """Every `Event` of a file."""
    found, at = [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        assert struct.unpack_from("<I", content, at + 8)[0] == masked_crc32c(content[at : at + 8])
        message = content[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", content, at + 12 + length)[0] == masked_crc32c(message)
        found.append(event_pb2.Event.FromString(message))
        at += 16 + length
    return found


def _values_in(folder: Path, kind: str) -> Iterator[tuple[int, Any]]:
    for path in sorted(folder.iterdir()):
        for event in events_in(path.read_bytes()):
            yield from (
                (event.step, value) for value in event.summary.value if value.WhichOneof("value") == kind
            )


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of every point of a run's curves, in the order of the file."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, value in _values_in(folder, "simple_value"):
        points.setdefault(value.tag, []).append((step, value.simple_value))
    return points


def pictures_in(folder: Path) -> list[tuple[int, Any]]:
    """(step, image) of every picture of a run."""
    return [(step, value.image) for step, value in _values_in(folder, "image")]
