"""Read JSON that anybody may have written: bounded in size, depth and numbers, of the types asked for.

Python's own reader takes NaN and Infinity, whole numbers of 4,300 digits, text with half a character, and as
many levels as there is stack. What comes out of here can be written again, put in a C integer, and printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from asyncrl.storage.regular_files import LINES_BYTES, TEXT_BYTES, read_bytes, read_lines, reading

DEEPEST: Final = 64
"""Levels of lists and objects within each other."""
LARGEST: Final = 2**63
"""No whole number is this large or, below zero, larger."""
Kind = TypeVar("Kind")


def parse_json(raw: bytes, kind: type[Kind]) -> Kind:
    """Read one JSON value.

    Raises:
        ValueError: It is no JSON, of another type, too deep, or has a number that is too large or none.
    """
    text = raw.decode("utf-8")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if "\\u" in text:  # Half of a character outside of the first plane can be read, but not written.
        json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, kind):
        raise ValueError(f"it holds a {type(value).__name__}, expected a {kind.__name__}")
    return value


def load_json(path: Path, kind: type[Kind], limit: int = TEXT_BYTES) -> Kind:
    """Read a file with one JSON value of type `kind`.

    Raises:
        OSError: The file cannot be read, is no regular file, or has more than `limit` bytes.
        ValueError: See `parse_json`.
    """
    return parse_json(read_bytes(path, limit), kind)


def check_types(found: Mapping[str, Any], expected: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check the types of an object's values. A whole number is a float too; true and false are no numbers.

    Raises:
        ValueError: A key is missing or its value is of another type; names it.
    """
    for key, kind in expected.items():
        if key not in found:
            raise ValueError(f"{key} is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        kinds += (int,) if float in kinds else ()
        if type(found[key]) not in kinds:
            wanted = " or ".join(one.__name__ for one in kinds)
            raise ValueError(f"{key} is {shortened(found[key])}, expected {wanted}")


def check_sizes(model: Mapping[str, Any], most: int = 2**24, most_layers: int = 1024) -> None:
    """Check the sizes of a model that a file describes: layers are made before their weights are looked for.

    Raises:
        ValueError: One is larger, or below zero; names it.
    """
    for name, value in model.items():
        for size in value if isinstance(value, list | tuple) else (value,):
            limit = most_layers if name in ("layers", "res_blocks", "llm_layers", "depth") else most
            if type(size) is int and not 0 <= size <= limit:
                raise ValueError(f"{name} is {shortened(size)}, expected a whole number of 0 to {limit}")


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Read a file with a JSON object in every line, such as metrics.jsonl, one line after the other.

    Yields:
        Each line as it stands, and its object; None for a line that is torn, too long (the line is empty
        then), or anything else than an object in JSON. Whoever leaves those out counts them.

    Raises:
        OSError: The file cannot be read, is no regular file, or has more than `LINES_BYTES`.
    """
    with reading(path, LINES_BYTES) as file:
        for _, line in read_lines(file):
            try:
                row = parse_json(line, dict) if line is not None and line.endswith(b"\n") else None
            except ValueError:
                row = None
            yield line or b"", row


def shortened(value: object) -> str:
    """Write a value for people, on one line of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -LARGEST < (number := int(digits)) < LARGEST:
        raise ValueError(f"it has the number {digits[:20]}{'...' * (len(digits) > 20)}, which is too large")
    return number


def _fraction(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {digits[:20]}, which is too large")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not in JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels")
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [below for part in parts for below in (part.values() if isinstance(part, dict) else part)]
