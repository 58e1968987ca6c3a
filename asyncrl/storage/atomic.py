"""Files of policies: names and JSON in, errors that name the file out; written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointError

_NAMES_SHOWN = 5


def compare_names(source: Path, found: Set[str], required: Set[str], *, allowed: Set[str]) -> None:
    """Check the tensors found in a checkpoint.

    Raises:
        CheckpointError: some that are required are missing, or some are not allowed.
    """
    missing, unknown = sorted(required - found), sorted(found - allowed)
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise CheckpointError(
                f"{source} {problem} {len(names)} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}. It is "
                "not a complete checkpoint of this policy: copy it again, or use its own config.json."
            )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing. Give the folder of a policy, with all of its files.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}). Copy it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object. Copy it again.")
    return content


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Let `writer` write a file that appears under its name when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    writer(partial)
    partial.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write(path, lambda p: p.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))
