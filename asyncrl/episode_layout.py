"""Schema of an episode on the wire and on disk: arrays and scalars of `records.Episode`, types and shapes.

Dimension letters are those of `records`, and M: frames of the video.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import END_REASONS, UNKNOWN_LENGTH, Episode

SCHEMA_VERSION: Final = 1
"""Version of messages, and of episodes whose sample is action tokens."""
COUNTED_SCHEMA_VERSION: Final = 3
"""Version of episodes with `steps_taken`."""
SCHEMA_VERSIONS: Final = (SCHEMA_VERSION, 2, COUNTED_SCHEMA_VERSION)
"""Versions on the wire; 2: the sample has other arrays than action tokens alone."""
DROPPED_FIELDS_VERSION: Final = 4
"""Version of files with the array `world_versions` and the scalar `weight`, which are ignored."""
STORED_SCHEMA_VERSIONS: Final = (*SCHEMA_VERSIONS, DROPPED_FIELDS_VERSION)
"""Versions in files."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Type and shape of an array. Letters are dimensions, numbers are fixed sizes."""

    dtype: str
    shape: tuple[str | int, ...]


EPISODE_ARRAYS: Final[dict[str, ArraySpec]] = {
    "frames": ArraySpec(dtype="uint8", shape=("N", "H", "W", 3)),
    "logprobs": ArraySpec(dtype="float32", shape=("N", "C", "A")),
    "values": ArraySpec(dtype="float32", shape=("N",)),
    "actions": ArraySpec(dtype="float32", shape=("N", "C", "A")),
    "rewards": ArraySpec(dtype="float32", shape=("N", "C")),
    "success_scores": ArraySpec(dtype="float32", shape=("N", "C")),
    "policy_versions": ArraySpec(dtype="int64", shape=("N",)),
    "noise_seeds": ArraySpec(dtype="int64", shape=("N",)),
    "final_frame": ArraySpec(dtype="uint8", shape=("H", "W", 3)),
    "video": ArraySpec(dtype="uint8", shape=("M", "H", "W", 3)),
}
"""Arrays of every episode, in wire and file order; those of its sample follow the first."""

OPTIONAL_ARRAYS: Final[dict[str, ArraySpec]] = {
    "more_frames": ArraySpec(dtype="uint8", shape=("N", "V", "H", "W", 3)),
    "states": ArraySpec(dtype="float32", shape=("N", "Q")),
    "final_more_frames": ArraySpec(dtype="uint8", shape=("V", "H", "W", 3)),
    "final_state": ArraySpec(dtype="float32", shape=("Q",)),
}
"""Further arrays of `COUNTED_SCHEMA_VERSION`, after all others."""

TOKENS: Final[Mapping[str, ArraySpec]] = MappingProxyType(
    {"tokens": ArraySpec(dtype="int32", shape=("N", "C", "A"))}
)
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


def schema_version(sample: Iterable[str], *, counted: bool = False) -> int:
    """Return the schema version of an episode.

    Args:
        sample: Names of the sample's arrays.
        counted: Whether it has `steps_taken`.
    """
    return COUNTED_SCHEMA_VERSION if counted else SCHEMA_VERSIONS[set(sample) != set(TOKENS)]


def version_of(episode: Episode) -> int:
    """Return an episode's schema version."""
    return schema_version(episode.sample, counted=episode.steps_taken != UNKNOWN_LENGTH)


def optional_arrays(version: int) -> tuple[str, ...]:
    """Return the names of the optional arrays of a schema version."""
    return tuple(OPTIONAL_ARRAYS) if version == COUNTED_SCHEMA_VERSION else ()


def scalar_types(version: int) -> dict[str, type]:
    """Return the scalars of a schema version with their types, in wire and file order."""
    return EPISODE_SCALARS | ({"steps_taken": int} if version == COUNTED_SCHEMA_VERSION else {})


def sample_specs(found: Iterable[tuple[Any, Any, Any]]) -> dict[str, ArraySpec]:
    """Check names, types and ranks of a sample's arrays from any source.

    Args:
        found: Name, dtype and shape of each array, in order.

    Returns:
        Name -> type and shape, the first dimension ``N``.

    Raises:
        ValueError: A name, type or rank is invalid, or there are too many arrays.
    """
    specs: dict[str, ArraySpec] = {}
    for name, dtype, shape in found:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", name):
            raise ValueError(
                f"{name!r:.80} is no name of a sample's array: an identifier, at most 64 letters"
            )
        if name in RESERVED or name in specs:
            raise ValueError(f"{name} cannot be the name of a sample's array: it is taken")
        if dtype not in SAMPLE_DTYPES:
            raise ValueError(
                f"{name} is {dtype!r:.80}, a sample's array is one of {', '.join(SAMPLE_DTYPES)}"
            )
        if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= MAX_SAMPLE_DIMENSIONS:
            raise ValueError(f"{name} does not have 1 to {MAX_SAMPLE_DIMENSIONS} dimensions")
        specs[name] = TOKENS.get(name) or ArraySpec(dtype=dtype, shape=("N", *shape[1:]))
    if len(specs) > MAX_SAMPLE_ARRAYS:
        raise ValueError(f"a sample of {len(specs)} arrays, at most {MAX_SAMPLE_ARRAYS} are allowed")
    return specs


def array_specs(
    sample: Mapping[str, ArraySpec], optional: Iterable[str] = (), *, counted: bool = False
) -> dict[str, ArraySpec]:
    """Return the arrays of an episode, in wire and file order.

    Args:
        optional: Names of its `OPTIONAL_ARRAYS`.
        counted: Whether it may have any.

    Raises:
        ValueError: The optional arrays do not belong together, or one has the name of a sample's.
    """
    others = {name: EPISODE_ARRAYS[name] for name in _OTHERS}
    named = list(optional)
    if named or counted:
        _check_optional(sample, named, counted)
    return {_IMAGES: EPISODE_ARRAYS[_IMAGES], **sample, **others} | {n: OPTIONAL_ARRAYS[n] for n in named}


def _check_optional(sample: Iterable[str], named: list[str], counted: bool) -> None:
    known = [name for name in OPTIONAL_ARRAYS if name in named]
    if known != named:
        raise ValueError(
            f"{', '.join(map(str, named))} are not {', '.join(OPTIONAL_ARRAYS)}, or some of them"
        )
    if named and not counted:
        raise ValueError(f"{named[0]} belongs to episodes that say how many steps were taken")
    if taken := sorted(OPTIONAL_ARRAYS.keys() & set(sample)):
        raise ValueError(f"{taken[0]} cannot be the name of a sample's array: it is taken")
    for one, final in (("more_frames", "final_more_frames"), ("states", "final_state")):
        if (one in named) != (final in named):
            raise ValueError(f"{one} and {final} belong together, but one of them is missing")


def optional_of(episode: Episode) -> tuple[str, ...]:
    """Return the names of an episode's optional arrays."""
    return tuple(name for name in OPTIONAL_ARRAYS if getattr(episode, name) is not None)


def specs_of(episode: Episode) -> dict[str, ArraySpec]:
    """Return the arrays of an episode, in wire and file order; raises as `array_specs`."""
    sample = sample_specs((name, array.dtype.name, array.shape) for name, array in episode.sample.items())
    return array_specs(sample, optional_of(episode), counted=episode.steps_taken != UNKNOWN_LENGTH)


def episode_arrays(episode: Episode) -> dict[str, NDArray[Any]]:
    """Return all arrays of an episode by name, in wire and file order, as in `array_specs`."""
    others = {name: getattr(episode, name) for name in (*_OTHERS, *optional_of(episode))}
    return {_IMAGES: getattr(episode, _IMAGES), **episode.sample, **others}


def decision_layout(episode: Episode) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of a decision's log-probs, sample and optional arrays, constant in a group."""
    arrays = {"logprobs": episode.logprobs, **episode.sample}
    arrays |= {n: array for n in ("more_frames", "states") if (array := getattr(episode, n)) is not None}
    return {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}


def problem_with(episode: Episode) -> str | None:
    """Return why an episode is inconsistent in types, shapes, numbers or its end; None if it is sound."""
    try:
        specs = specs_of(episode)
    except ValueError as error:
        return str(error)
    return (
        _problem_with_shapes(episode, specs) or _problem_with_numbers(episode) or _problem_with_end(episode)
    )


def _problem_with_shapes(episode: Episode, specs: Mapping[str, ArraySpec]) -> str | None:
    sizes: dict[str, int] = {}
    for (name, array), spec in zip(episode_arrays(episode).items(), specs.values(), strict=True):
        if array.dtype != np.dtype(spec.dtype) or array.ndim != len(spec.shape):
            return (
                f"{name} is {array.dtype}{list(array.shape)}, expected {spec.dtype} with shape {spec.shape}"
            )
        for letter, size in zip(spec.shape, array.shape, strict=True):
            expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
            if size != expected:
                return f"{name} has shape {list(array.shape)}, expected {letter} = {expected}"
    drawn = sizes["N"] * sizes["C"] if episode.steps_taken == UNKNOWN_LENGTH else episode.steps_taken
    if sizes["N"] < 1 or sizes["M"] not in (0, drawn):
        return f"{sizes['N']} decisions and {sizes['M']} video frames do not belong together"
    if not 0 <= episode.member < episode.group_size:
        return f"member {episode.member} of a group of {episode.group_size}"
    return None


def _problem_with_numbers(episode: Episode) -> str | None:
    tokens = episode.sample.get("tokens")
    if not np.isfinite(episode.logprobs).all() or (tokens is not None and (episode.logprobs > 0).any()):
        return "behaviour log-probs must be finite, and those of tokens at most 0"
    if tokens is not None and ((tokens < 0).any() or (tokens > 255).any()):
        return "action tokens must lie in 0..255"
    if (episode.policy_versions < 0).any():
        return "policy versions must not be negative"
    for name in ("actions", "rewards", "success_scores", "states", "final_state"):
        array = getattr(episode, name)
        if array is not None and not np.isfinite(array).all():
            return f"{name} must be finite"
    if not (math.isfinite(episode.temperature) and episode.temperature >= 0) or episode.top_k < 0:
        return f"temperature {episode.temperature} and top_k {episode.top_k} cannot have been sampled with"
    return None


def _problem_with_end(episode: Episode) -> str | None:
    decisions, chunk = episode.rewards.shape
    if episode.end_reason not in END_REASONS:
        return f"end_reason is {episode.end_reason!r}, expected one of {', '.join(END_REASONS)}"
    if episode.steps_taken == UNKNOWN_LENGTH:
        if episode.end_reason == "terminated":
            return "end_reason is 'terminated', but it does not say how many steps were taken"
        if episode.success and not (episode.rewards[-1] > 0).any():
            return "end_reason is 'success', but no step of the last decision has a positive reward"
    elif not (decisions - 1) * chunk < episode.steps_taken <= decisions * chunk:
        return f"{episode.steps_taken} steps were taken in {decisions} decisions of {chunk}"
    if episode.rewards.reshape(-1)[episode.steps :].any():
        return "there are rewards behind the step with which the episode ended"
    return None
