"""Small facts as one line of JSON that notices damage: a dict in, bytes out, and back.

The last member of each line is ``"crc32"``: 8 hexadecimal digits, the CRC-32 of the same line without it. So
a line is plain JSON to every other tool, and a changed one is never believed. In a file of many lines the
CRC-32 covers the digits of the line before, too: a line is believed only behind that one.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Final

MAX_LINE: Final = 2**20
"""Bytes; longer lines are damaged."""
_CHECKSUM: Final = re.compile(rb',"crc32":"([0-9a-f]{8})"}')
_LENGTH: Final = len(b',"crc32":"01234567"}')


def write_line(entry: dict[str, Any], previous: bytes = b"") -> bytes:
    """Write one entry (not empty) without the line feed; `previous`: digits of the line before."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return body[:-1] + b',"crc32":"%08x"}' % zlib.crc32(previous + body)


def read_line(line: bytes, previous: bytes = b"") -> dict[str, Any]:
    """Read one entry, without its checksum.

    Raises:
        ValueError: It was changed, was not written behind the digits `previous`, or is no such line.
    """
    checksum = checksum_of(line)
    if checksum is None or len(line) > MAX_LINE:
        raise ValueError("it does not end with a checksum")
    body = line[:-_LENGTH] + b"}"
    # Not `crc32(body, previous)`: a bit of `previous` would make up for one of the body's first four bytes.
    if zlib.crc32(previous + body) != int(checksum, 16):
        raise ValueError("its checksum does not match")
    entry = json.loads(body)
    if not isinstance(entry, dict):
        raise ValueError(f"it holds a {type(entry).__name__}, expected an object")
    return entry


def checksum_of(line: bytes) -> bytes | None:
    """Return the 8 digits that a line claims, right or wrong; None when it claims none."""
    found = _CHECKSUM.fullmatch(line, max(0, len(line) - _LENGTH))
    return None if found is None else found[1]
