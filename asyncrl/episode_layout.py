"""Schema of an episode on the wire and on disk; dimension letters of `records`, and M: video frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import UNKNOWN_LENGTH, Episode

SCHEMA_VERSION: Final = 1  # of messages, and of episodes whose sample is action tokens
COUNTED_SCHEMA_VERSION: Final = 3  # of episodes with `steps_taken`
SCHEMA_VERSIONS: Final = (SCHEMA_VERSION, 2, COUNTED_SCHEMA_VERSION)  # on the wire; 2: not of tokens alone
DROPPED_FIELDS_VERSION: Final = 4  # of files with `world_versions` and `weight`, which are ignored
STORED_SCHEMA_VERSIONS: Final = (*SCHEMA_VERSIONS, DROPPED_FIELDS_VERSION)  # in files


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of an array. Letters are dimensions, numbers are fixed sizes."""

    dtype: str
    shape: tuple[str | int, ...]
    unit: str = "see docs"

    @property
    def joined_by(self) -> str:
        """Axis along which a group's arrays are joined in its file: N, M, or E if they are stacked."""
        return str(self.shape[0]) if self.shape[0] in ("N", "M") else "E"


EPISODE_ARRAYS: Final[dict[str, ArraySpec]] = {
    "frames": ArraySpec("uint8", ("N", "H", "W", 3), "8-bit sRGB"),
    "logprobs": ArraySpec("float32", ("N", "C", "A"), "nat"),
    "values": ArraySpec("float32", ("N",), "return"),
    "actions": ArraySpec("float32", ("N", "C", "A"), "world's action unit per step"),
    "rewards": ArraySpec("float32", ("N", "C"), "1 at the first success"),
    "success_scores": ArraySpec("float32", ("N", "C"), "probability"),
    "policy_versions": ArraySpec("int64", ("N",), "version"),
    "noise_seeds": ArraySpec("int64", ("N",), "seed"),
    "final_frame": ArraySpec("uint8", ("H", "W", 3), "8-bit sRGB"),
    "video": ArraySpec("uint8", ("M", "H", "W", 3), "8-bit sRGB"),
}
"""Arrays of every episode, in wire and file order; those of its sample follow the first."""

OPTIONAL_ARRAYS: Final[dict[str, ArraySpec]] = {
    "more_frames": ArraySpec("uint8", ("N", "V", "H", "W", 3), "8-bit sRGB"),
    "states": ArraySpec("float32", ("N", "Q"), "simulator's unit per number"),
    "final_more_frames": ArraySpec("uint8", ("V", "H", "W", 3), "8-bit sRGB"),
    "final_state": ArraySpec("float32", ("Q",), "simulator's unit per number"),
}
"""Further arrays of `COUNTED_SCHEMA_VERSION`, after all others."""

TOKENS: Final[Mapping[str, ArraySpec]] = {"tokens": ArraySpec("int32", ("N", "C", "A"), "action bin")}
"""Sample of a policy of action tokens. An array `tokens` always has this type and shape."""
SAMPLE_DTYPES: Final = ("uint8", "int32", "int64", "float32")
MAX_SAMPLE_ARRAYS: Final = 16
MAX_SAMPLE_DIMENSIONS: Final = 8

EPISODE_SCALARS: Final[dict[str, type]] = {
    "episode_id": str,
    "group_id": str,
    "member": int,
    "group_size": int,
    "actor": str,
    "task": str,
    "start_state": str,
    "world_version": int,
    "seed": int,
    "temperature": float,
    "top_k": int,
    "end_reason": str,
}
"""Scalars with their types, in wire and file order."""

_FIELDS: Final = tuple(field.name for field in fields(Episode))
_IMAGES, *_OTHERS = EPISODE_ARRAYS
assert (*EPISODE_SCALARS, _IMAGES, "sample", *_OTHERS, "steps_taken", *OPTIONAL_ARRAYS) == _FIELDS
RESERVED: Final = frozenset(
    {*EPISODE_SCALARS, "sample", *EPISODE_ARRAYS, "steps_taken", "group", "episodes", "checksums"}
)
"""Names that no array of a sample can have: fields of `Episode` and tables of its file."""


def version_of(episode: Episode) -> int:
    """Return an episode's schema version."""
    return _version(episode.sample, episode.steps_taken != UNKNOWN_LENGTH)


def _version(sample: Iterable[str], counted: bool) -> int:
    return COUNTED_SCHEMA_VERSION if counted else SCHEMA_VERSIONS[set(sample) != set(TOKENS)]


def scalar_types(version: int) -> dict[str, type]:
    """Return the scalars of a schema version with their types, in wire and file order."""
    return EPISODE_SCALARS | ({"steps_taken": int} if version == COUNTED_SCHEMA_VERSION else {})


def sample_specs(found: Iterable[tuple[Any, Any, Any]]) -> dict[str, ArraySpec]:
    """Check a sample's arrays (name, dtype, shape); return specs with first axis ``N``."""
    specs: dict[str, ArraySpec] = {}
    for name, dtype, shape in found:
        identifier = isinstance(name, str) and re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", name)
        if not identifier or name in RESERVED or name in specs:
            why = "it is taken" if identifier else "it is no identifier of at most 64 letters"
            raise ValueError(f"{name!r:.80} cannot be the name of a sample's array: {why}")
        sized = isinstance(shape, (tuple, list)) and 1 <= len(shape) <= MAX_SAMPLE_DIMENSIONS
        if dtype not in SAMPLE_DTYPES or not sized:
            kinds = f"one of {', '.join(SAMPLE_DTYPES)}, of 1 to {MAX_SAMPLE_DIMENSIONS} dimensions"
            raise ValueError(f"{name} is {dtype!r:.80}, a sample's array is {kinds}")
        specs[name] = TOKENS.get(name) or ArraySpec(dtype=dtype, shape=("N", *shape[1:]))
    if len(specs) > MAX_SAMPLE_ARRAYS:
        raise ValueError(f"a sample of {len(specs)} arrays, at most {MAX_SAMPLE_ARRAYS} are allowed")
    return specs


def _array_specs(sample: Mapping[str, ArraySpec], optional: list[str], counted: bool) -> dict[str, ArraySpec]:
    if [name for name in OPTIONAL_ARRAYS if name in optional] != optional:
        raise ValueError(f"{', '.join(optional)} are not {', '.join(OPTIONAL_ARRAYS)}, or some of them")
    if optional and not counted:
        raise ValueError(f"{optional[0]} belongs to episodes that say how many steps were taken")
    if counted and (taken := sorted(OPTIONAL_ARRAYS.keys() & sample.keys())):
        raise ValueError(f"{taken[0]} cannot be the name of a sample's array: it is taken")
    for one, final in (("more_frames", "final_more_frames"), ("states", "final_state")):
        if (one in optional) != (final in optional):
            raise ValueError(f"{one} and {final} belong together, but one of them is missing")
    first, *others = EPISODE_ARRAYS.items()
    return dict([first, *sample.items(), *others, *((name, OPTIONAL_ARRAYS[name]) for name in optional)])


def parse_specs(found: Sequence[tuple[str, Any, Any]], version: int) -> dict[str, ArraySpec]:
    """Check name, dtype and shape of an episode's arrays, in wire and file order; else raise ValueError."""
    names = [name for name, _, _ in found]
    counted = version == COUNTED_SCHEMA_VERSION
    optional = [name for name in names if counted and name in OPTIONAL_ARRAYS]
    sample = sample_specs(entry for entry in found if entry[0] not in {*EPISODE_ARRAYS, *optional})
    specs = _array_specs(sample, optional, counted)
    if list(specs) != names or version not in (_version(sample, counted), DROPPED_FIELDS_VERSION):
        raise ValueError(f"its arrays {', '.join(names)!s:.500} are not those of its schema version")
    for (name, dtype, _), spec in zip(found, specs.values(), strict=True):
        if dtype != spec.dtype:
            raise ValueError(f"{name} is {dtype!r:.80}, expected {spec.dtype}")
    return specs


def sizes_of(specs: Mapping[str, ArraySpec], shapes: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return the size of each dimension letter; raises ValueError if shapes contradict the specs."""
    sizes: dict[str, int] = {}
    for (name, spec), shape in zip(specs.items(), shapes, strict=True):
        if len(shape) != len(spec.shape):
            raise ValueError(f"{name} has shape {list(shape)!s:.80}, expected {list(spec.shape)}")
        for letter, size in zip(spec.shape, shape, strict=True):
            expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
            if size != expected:
                raise ValueError(f"{name} has shape {list(shape)}, expected {letter} = {expected}")
    return sizes


def optional_of(episode: Episode) -> tuple[str, ...]:
    """Return the names of an episode's optional arrays."""
    return tuple(name for name in OPTIONAL_ARRAYS if getattr(episode, name) is not None)


def specs_of(episode: Episode) -> dict[str, ArraySpec]:
    """Return the arrays of an episode, in wire and file order; or raise ValueError."""
    sample = sample_specs((name, array.dtype.name, array.shape) for name, array in episode.sample.items())
    return _array_specs(sample, list(optional_of(episode)), episode.steps_taken != UNKNOWN_LENGTH)


def episode_arrays(episode: Episode) -> dict[str, NDArray[Any]]:
    """Return all arrays of an episode by name, in wire and file order."""
    others = {name: getattr(episode, name) for name in (*_OTHERS, *optional_of(episode))}
    return {_IMAGES: getattr(episode, _IMAGES), **episode.sample, **others}


def as_fields(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays as arguments of `Episode`; the sample's are one argument."""
    known = EPISODE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys()
    fields = {name: array for name, array in arrays.items() if name in known}
    return fields | {"sample": {name: array for name, array in arrays.items() if name not in known}}


def problem_with_shapes(episode: Episode) -> str | None:
    """Return why the types or shapes of an episode's arrays are inconsistent; None if they are sound."""
    arrays = episode_arrays(episode)
    try:
        specs = specs_of(episode)
        sizes_of(specs, [array.shape for array in arrays.values()])
    except ValueError as error:
        return str(error)
    for (name, array), spec in zip(arrays.items(), specs.values(), strict=True):
        if array.dtype != np.dtype(spec.dtype):
            return f"{name} is {array.dtype}, expected {spec.dtype}"
    return None
