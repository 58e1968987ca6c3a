"""A complete group in, its file out: `pwritev` puts the values between the pieces of structure from libhdf5.

The values go from the episodes' own memory into the file, neither joined nor copied before.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messaging.episode_codec import as_bytes
from asyncrl.records import EPISODE_ARRAYS, EPISODE_SCALARS, SCHEMA_VERSION, Episode
from asyncrl.replay.footer import make_footer
from asyncrl.replay.schema import (
    CHECKSUMS,
    CONSTANT,
    FORMAT,
    FORMAT_VERSION,
    GROUP,
    ROOT,
    TABLE,
    TABLES,
    Written,
)
from asyncrl.replay.structure import (
    CHECKSUMS_TYPE,
    TEXT_STEP,
    Dimensions,
    Structure,
    group_type,
    structure_of,
    table_type,
)

Part = bytes | memoryview
MOST_PARTS: Final = 1000
"""Parts that one `pwritev` is given; Linux takes 1024."""


def write_group(path: Path, number: int, episodes: Sequence[Episode]) -> Written:
    """Write a complete group into a new file and sync its content. The caller syncs its name.

    Space for all of it is asked for before any of it is written.

    Args:
        path: Must not exist.
        number: Of the group's grant.
        episodes: All members, in the order of `Episode.member`, of one image size.

    Returns:
        What stands in the file and where.

    Raises:
        OSError: There is no space, or the disk does not take it.
        ValueError: The episodes do not fit together.
    """
    attributes = _attributes(number, episodes)
    values = {name: [as_bytes(getattr(episode, name)) for episode in episodes] for name in EPISODE_ARRAYS}
    checksums = np.array(
        [tuple(map(zlib.crc32, member)) for member in zip(*values.values(), strict=True)], CHECKSUMS_TYPE
    )
    group, table, widths = _tables(attributes, episodes)
    structure = structure_of(Dimensions(*_sizes(episodes), *widths))
    values |= {GROUP: [as_bytes(group)], TABLE: [as_bytes(table)], CHECKSUMS: [as_bytes(checksums)]}
    found = _write_file(path, _in_file_order(structure, values))
    return Written(
        attributes=attributes, table=table, checksums=checksums, places=structure.places, found=found
    )


def _in_file_order(structure: Structure, values: dict[str, list[memoryview]]) -> list[Part]:
    """The whole file: structure, values, and the footer with the checksum of what libhdf5 interprets."""
    parts, checksum, begin = list[Part](), 0, structure.gaps[0]
    for (name, place), gap in zip(structure.places.items(), structure.gaps[1:], strict=True):
        if sum(map(len, values[name])) != place.nbytes:
            raise ValueError(f"{name} of the episodes does not make up {place.dtype}{list(place.shape)}")
        parts += [begin, *values[name]]
        checksum = zlib.crc32(begin, checksum)
        if name in TABLES:
            checksum = zlib.crc32(values[name][0], checksum)
        begin = gap
    arrays = [place for name, place in structure.places.items() if name not in TABLES and place.nbytes]
    extents = [(place.offset, place.nbytes) for place in arrays]
    footer = make_footer(extents, zlib.crc32(begin, checksum), structure.length)
    return [part for part in (*parts, begin, footer) if len(part)]


def _write_file(path: Path, parts: list[Part]) -> os.stat_result:
    """Write and sync a new file; return what the file system says of it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(handle, 0, sum(map(len, parts)))
        offset = 0
        while parts:
            written = os.pwritev(handle, parts[:MOST_PARTS], offset)
            offset += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
        os.fsync(handle)
        return os.fstat(handle)
    finally:
        os.close(handle)


def _attributes(number: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The facts of `schema.ROOT`, in its order."""
    first = episodes[0]
    found = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "group_number": number,
        "oldest_version": min(episode.oldest_version for episode in episodes),
        "newest_version": max(int(episode.policy_versions.max()) for episode in episodes),
        "successes": sum(episode.success for episode in episodes),
    }
    return {name: found[name] if name in found else getattr(first, name) for name in ROOT}


def _tables(
    attributes: dict[str, Any], episodes: Sequence[Episode]
) -> tuple[NDArray[Any], NDArray[Any], tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows of `/group` and `/episodes`, and the widths of their texts."""
    row = [_plain(attributes[name]) for name in ROOT if name not in CONSTANT]
    rows = [
        [_plain(kind(getattr(episode, name))) for name, kind in EPISODE_SCALARS.items()]
        for episode in episodes
    ]
    for letter in ("frames", "video"):
        ends = list(accumulate(len(getattr(episode, letter)) for episode in episodes))
        for member, begin, end in zip(rows, [0, *ends], ends, strict=False):
            member += [begin, end]
    widths = _widths([row]), _widths(rows)
    group = np.array([tuple(row)], group_type(widths[0]))
    table = np.array([tuple(member) for member in rows], table_type(widths[1]))
    return group, table, widths


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _widths(rows: list[list[Any]]) -> tuple[int, ...]:
    """Bytes that each column of text needs, rounded up."""
    columns = [column for column in zip(*rows, strict=True) if isinstance(column[0], bytes)]
    return tuple(max(1, -(-max(map(len, column)) // TEXT_STEP)) * TEXT_STEP for column in columns)


def _sizes(episodes: Sequence[Episode]) -> tuple[int, int, int, int, int]:
    """E, N, M, H, W."""
    height, width, _ = episodes[0].final_frame.shape
    decisions, drawn = (sum(len(getattr(e, name)) for e in episodes) for name in ("frames", "video"))
    return len(episodes), decisions, drawn, height, width
