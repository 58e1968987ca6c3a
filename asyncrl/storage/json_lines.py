"""Files with one record in every line, each written by one process and read by others while it grows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncrl.storage.atomic import replacing
from asyncrl.storage.bounded_json import check_types, read_rows

Record = TypeVar("Record")
_NUMBER: Final = (int, float)
_TYPES: Final = {"int": int, "float": _NUMBER, "str": str, "bool": bool}


def append(path: Path, record: Any) -> None:
    """Add a line, behind one that was torn too.

    Raises:
        OSError: It cannot be written.
        ValueError: A number is not finite.
    """
    line = json.dumps(asdict(record), allow_nan=False) + "\n"
    with path.open("ab+") as file:
        torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(("\n" if torn else "").encode() + line.encode())


def read(path: Path, kind: type[Record]) -> list[Record]:
    """Return all records that can be read, oldest first; a line that is torn or something else is left out.

    Args:
        kind: A dataclass whose fields are int, float, str or bool.
    """
    if not path.is_file():
        return []
    known = {field.name: _TYPES[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    found = (_checked(row, kind, known) for _, row in read_rows(path) if row is not None)
    return [record for record in found if record is not None]


def keep(path: Path, kind: type[Record], wanted: Callable[[Record], bool]) -> None:
    """Remove the records that are not `wanted`, and whatever is none."""
    if not path.exists():
        return
    kept = [record for record in read(path, kind) if wanted(record)]
    with replacing(path) as part:
        lines = (json.dumps(asdict(record)) + "\n" for record in kept)  # type: ignore[call-overload]
        part.write_text("".join(lines), encoding="utf-8")


def _checked(row: dict[str, Any], kind: type[Record], known: dict[str, Any]) -> Record | None:
    if row.keys() != known.keys():
        return None
    try:
        check_types(row, known)
    except ValueError:
        return None
    numbers = [value for value in row.values() if isinstance(value, float)]
    return kind(**row) if all(map(math.isfinite, numbers)) else None
