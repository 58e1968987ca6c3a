"""Refuse the episodes that no actor of this run could have produced. Pure; no I/O.

The learner believes every number of an episode, so all are checked against the settings and models of the
run, before an episode is stored and again before the learner gets it. Nothing is computed with the seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from asyncrl.episode_layout import optional_of, problem_with_shapes, version_of
from asyncrl.errors import WireError
from asyncrl.facts import plain_task
from asyncrl.messaging.wire import scalars_of
from asyncrl.records import END_REASONS, UNKNOWN_LENGTH, Episode, SamplingParams
from asyncrl.replay.interface import ANY_FORMAT, EpisodeFormat, RefusalCause

_START: Final = re.compile(r"(/[0-9]{1,9})?/([0-9]{3,9}|seed-[0-9]{1,20})")
"""End of a start's name, after that of its simulator: ``/3/017``, ``/seed-12``, ``/3/seed-12``."""
MAX_NUMBER: Final = 1e6  # Of actions, log-probs (nats), values, rewards, sampled floats: squares stay finite


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Properties that an episode must have."""

    format: EpisodeFormat = ANY_FORMAT
    group_size: int
    sampling: SamplingParams
    newest_version: int  # Newest policy version of any decision
    actor: str | None = None  # Name of the sender; None: any


class Refusal(NamedTuple):
    """Reason why an episode is not admitted."""

    cause: RefusalCause
    reason: str


def problem_with(episode: Episode) -> str | None:
    """Return why an episode is inconsistent in types, shapes, numbers or its end; None if it is sound."""
    return problem_with_shapes(episode) or next(_problems(episode), None)


def _problems(episode: Episode) -> Iterator[str]:
    (decisions, chunk), taken = episode.rewards.shape, episode.steps_taken
    unknown, films = taken == UNKNOWN_LENGTH, len(episode.video)
    if decisions < 1 or films not in (0, decisions * chunk if unknown else taken):
        yield f"{decisions} decisions and {films} video frames do not belong together"
    if not 0 <= episode.member < episode.group_size:
        yield f"member {episode.member} of a group of {episode.group_size}"
    named = {name: getattr(episode, name) for name in ("logprobs", "actions", "rewards")}
    named |= {name: getattr(episode, name) for name in optional_of(episode) if "state" in name}
    named |= {name: array for name, array in episode.sample.items() if array.dtype.kind == "f"}
    for name, array in named.items():
        if not (np.abs(array) <= MAX_NUMBER).all():  # False for nan too.
            yield f"{name} holds a number that is not finite, or beyond {MAX_NUMBER:g}"
    scores, values, tokens = episode.success_scores, episode.values, episode.sample.get("tokens")
    if not ((scores >= 0) & (scores <= 1)).all():
        yield f"success_scores are probabilities, but lie in {scores.min():g}..{scores.max():g}"
    if not (np.isnan(values).all() or (np.abs(values) <= MAX_NUMBER).all()):
        yield f"values must all be finite and at most {MAX_NUMBER:g}, or all nan where there is no critic"
    if tokens is not None and (episode.logprobs > 0).any():
        yield "log-probs of tokens must be at most 0"
    if tokens is not None and ((tokens < 0).any() or (tokens > 255).any()):
        yield "action tokens must lie in 0..255"
    if (episode.policy_versions < 0).any():
        yield "policy versions must not be negative"
    if not (math.isfinite(episode.temperature) and episode.temperature >= 0) or episode.top_k < 0:
        yield f"temperature {episode.temperature} and top_k {episode.top_k} cannot have been sampled with"
    if episode.end_reason not in END_REASONS:
        yield f"end_reason is {episode.end_reason!r}, expected one of {', '.join(END_REASONS)}"
    if unknown and episode.end_reason == "terminated":
        yield "end_reason is 'terminated', but it does not say how many steps were taken"
    if unknown and episode.success and not (episode.rewards[-1] > 0).any():
        yield "end_reason is 'success', but no step of the last decision has a positive reward"
    if not unknown and not (decisions - 1) * chunk < taken <= decisions * chunk:
        yield f"{taken} steps were taken in {decisions} decisions of {chunk}"
    if episode.rewards.reshape(-1)[episode.steps :].any():
        yield "there are rewards behind the step with which the episode ended"


def _outcome(episode: Episode, expected: Expected) -> str | None:
    if episode.steps_taken == UNKNOWN_LENGTH:
        if not episode.success and (episode.rewards > 0).any():
            return "end_reason is 'truncated', but a step has a positive reward"
    else:
        scores = episode.success_scores.reshape(-1)
        fulfilled = np.flatnonzero(scores).tolist()
        last = [episode.steps - 1] if episode.success else []
        if fulfilled != last or any(scores[step] != 1 for step in last):
            end = f"end_reason is {episode.end_reason!r}"
            return f"{end}, but the task was fulfilled at the steps {fulfilled[:8]}"
    if not episode.temperature > 0:
        return f"temperature {episode.temperature}: episodes to learn from are sampled above 0"
    return None


def _texts(episode: Episode, expected: Expected) -> str | None:
    if expected.actor not in (None, episode.actor):
        return f"its actor is {episode.actor[:60]!r}, but {expected.actor!s:.60} sent it"
    try:
        scalars_of(episode)
    except WireError as error:
        return str(error)
    return None


def _settings(episode: Episode, expected: Expected) -> str | None:
    if episode.group_size != expected.group_size:
        return f"group size {episode.group_size}, this run has {expected.group_size}"
    sampling = expected.sampling
    if (episode.temperature, episode.top_k) != (sampling.temperature, sampling.top_k):
        return (
            f"temperature {episode.temperature} and top_k {episode.top_k}, this run has "
            f"{sampling.temperature} and {sampling.top_k}"
        )
    size, found = expected.format.image_size, episode.final_frame.shape[:2]
    if size and found != (size, size):
        return f"pictures of {found[0]} x {found[1]} pixels, this run has {size} x {size}"
    spec, numbers = expected.format.action_spec, list(episode.actions.shape[1:])
    if spec is not None and numbers != [spec.chunk, spec.dim]:
        return f"decisions of {numbers} numbers, this run has {[spec.chunk, spec.dim]}"
    wanted = expected.format.sample
    sample = {name: (array.dtype.name, array.shape[1:]) for name, array in episode.sample.items()}
    if wanted and not (sample.keys() == wanted.keys() and all(_fits(sample[n], wanted[n]) for n in wanted)):
        return f"a sample of {sample!s:.200}, the policy of this run gives {dict(wanted)!s:.200}"
    return None


def _fits(found: tuple[str, tuple[int, ...]], wanted: tuple[str, tuple[int | str, ...]]) -> bool:
    if found[0] != wanted[0] or len(found[1]) != len(wanted[1]):
        return False
    return all(isinstance(w, str) or n == w for n, w in zip(found[1], wanted[1], strict=True))


def _length(episode: Episode, expected: Expected) -> str | None:
    longest = expected.format.max_decisions
    if longest and len(episode.actions) > longest:
        return f"{len(episode.actions)} decisions, an episode of this run has at most {longest}"
    return None


def _played(episode: Episode, expected: Expected) -> str | None:
    simulator, found = expected.format.simulator, optional_of(episode)
    imagined = expected.format.image_size and simulator is None
    if imagined and episode.steps_taken != UNKNOWN_LENGTH:
        return "it has a number of steps, as of a simulator, but this run has a world model"
    if simulator is None:
        return None
    if episode.steps_taken == UNKNOWN_LENGTH:
        return "it does not say how many steps were taken, as episodes of a simulator do"
    more, states = episode.more_frames, episode.states
    sizes = (0 if more is None else more.shape[1], 0 if states is None else states.shape[1])
    empty = any(array is not None and not array.size for array in (more, states))
    if sizes != (simulator.more_cameras, simulator.state_dim) or empty:
        return (
            f"{sizes[0]} further cameras and {sizes[1]} numbers of state ({', '.join(found) or 'no array'}), "
            f"this run has {simulator.more_cameras} and {simulator.state_dim}"
        )
    if simulator.reward == "success" and not np.array_equal(episode.rewards, episode.success_scores):
        return "rewards other than 1 in the step that fulfils the task"
    return None


def _start(episode: Episode, expected: Expected) -> str | None:
    known, simulator = expected.format.tasks, expected.format.simulator
    task, start = plain_task(episode.task), episode.start_state[:60]
    if simulator is not None:
        if simulator.tasks and task not in simulator.tasks:
            return f"task {task[:60]!r} is none of the {len(simulator.tasks)} of {simulator.name}"
        if not is_start_of(simulator.name, episode.start_state):
            return f"start_state {start!r} is no start of {simulator.name}"
    elif known and episode.start_state not in known:
        return f"start state {start!r} is none of the run's {len(known)}"
    elif known and task not in known[episode.start_state]:
        return f"task {task[:60]!r}, but start state {start!r} has another one"
    return None


def is_start_of(simulator: str, name: str) -> bool:
    """True if a start of this simulator can be called `name`."""
    return name.startswith(simulator) and _START.fullmatch(name.removeprefix(simulator)) is not None


def _versions(episode: Episode, expected: Expected) -> str | None:
    newest = int(episode.policy_versions.max())
    if newest > expected.newest_version:
        return f"policy version {newest} made it, the newest there can be is {expected.newest_version}"
    known, found = expected.format.world_version, episode.world_version
    if found < -1 or known not in (None, found):
        return (
            f"world version {found} imagined it, in this run it is {'-1 or more' if known is None else known}"
        )
    return None


_CHECKS: Final[tuple[tuple[RefusalCause, bool, Callable[[Episode, Expected], str | None]], ...]] = (
    ("content", True, lambda episode, _: problem_with(episode)),
    ("content", True, _outcome),
    ("content", False, _texts),
    ("settings", True, _settings),
    ("settings", False, _length),
    ("settings", False, _played),
    ("settings", False, _start),
    ("version", True, _versions),
)  # Cause; also checked in stored episodes?; problem or None. A resume may change start states and lengths


def refusal(episode: Episode, expected: Expected, *, stored: bool = False) -> Refusal | None:
    """Return why an episode is not admitted, or None if it is; `stored`: it was admitted before."""
    for cause, of_stored, check in _CHECKS:
        if (of_stored or not stored) and (problem := check(episode, expected)) is not None:
            return Refusal(cause, problem)
    return None


def problem_for_learner(group: Sequence[Episode], group_id: str, expected: Expected) -> str | None:
    """Return why a learner cannot learn from a stored group, or None if it can."""
    members = sorted(episode.member for episode in group)
    if members != list(range(expected.group_size)):
        return f"it has the members {members}, a group of this run has {expected.group_size}"
    if any(episode.group_id != group_id for episode in group):
        return f"it holds an episode of another group than {group_id}"
    for episode in group:
        if (found := refusal(episode, expected, stored=True)) is not None:
            return f"member {episode.member}: {found.reason}"
    return next(
        (problem for episode in group[1:] if (problem := sibling_difference(group[0], episode))), None
    )


def sibling_difference(sibling: Episode, episode: Episode) -> str | None:
    """Return the difference between two episodes of one group that siblings cannot have, or None."""
    if sibling.final_frame.shape != episode.final_frame.shape:
        return f"images of {episode.final_frame.shape}, its siblings have {sibling.final_frame.shape}"
    if version_of(sibling) != version_of(episode):
        return "its siblings are of another schema version"
    if _decision_layout(sibling) != _decision_layout(episode):
        return "its siblings have decisions of another size, another sample, or other cameras or states"
    if (sibling.task, sibling.start_state) != (episode.task, episode.start_state):
        return "its siblings have another task or start state"
    return None


def _decision_layout(episode: Episode) -> dict[str, tuple[str, tuple[int, ...]]]:
    arrays = {"logprobs": episode.logprobs, **episode.sample}
    arrays |= {n: array for n in ("more_frames", "states") if (array := getattr(episode, n)) is not None}
    return {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}
