"""Small facts as one line of JSON that notices damage: a dict in, bytes out, and back.

The last member of each line is ``"crc32"``: 8 hexadecimal digits, the CRC-32 of the same line without it. So
a line is plain JSON to every other tool, and a changed one is never believed.
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


def write_line(entry: dict[str, Any]) -> bytes:
    """Write one entry (not empty) without the line feed."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return body[:-1] + b',"crc32":"%08x"}' % zlib.crc32(body)


def read_line(line: bytes) -> dict[str, Any]:
    """Read one entry, without its checksum.

    Raises:
        ValueError: It was changed, or is no such line.
    """
    found = _CHECKSUM.fullmatch(line, max(0, len(line) - _LENGTH))
    if found is None or len(line) > MAX_LINE:
        raise ValueError("it does not end with a checksum")
    body = line[:-_LENGTH] + b"}"
    if zlib.crc32(body) != int(found[1], 16):
        raise ValueError("its checksum does not match")
    entry = json.loads(body)
    if not isinstance(entry, dict):
        raise ValueError(f"it holds a {type(entry).__name__}, expected an object")
    return entry
