"""Refuse the episodes that nobody of this run can have imagined: one table of checks. Pure; no I/O.

An episode comes from a peer, or from a file that anybody may have put there, and the learner believes every
number of it. So every array and scalar is held against what the settings and models of the run say, before
an episode is stored and again before a stored one is given to the learner. The table is `CHECKS`.

Dimension letters, as in `records`: N decisions, C steps per decision, A numbers per step, H, W pixels, V
cameras beside the first, Q numbers of state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from asyncrl.episode_layout import decision_layout, optional_of, problem_with, version_of
from asyncrl.records import REWARDED, Episode, Sampling
from asyncrl.replay.episode_format import ANY_FORMAT, EpisodeFormat, SimulatorFormat

RefusalCause = Literal["content", "settings", "version", "grant"]
"""Why an episode is refused: it contradicts itself or holds numbers that no model gives; it was made with
other settings or models than the run's; a version that is not published yet made it; its group was not
granted to who sent it."""
REFUSAL_CAUSES: Final = get_args(RefusalCause)

MAX_NUMBER: Final = 1e6
"""Largest size of an action, log-prob (nats), value, reward or float of a sample. No model comes near it, and
sums and squares of such numbers stay finite in float32."""
MAX_TASK: Final = 1024
"""Letters of an instruction."""
MAX_NAME: Final = 255
"""Letters of the name of a start state or of an actor."""
_START: Final = re.compile(r"(/[0-9]{1,9})?/([0-9]{3,9}|seed-[0-9]{1,20})")
"""What follows the name of a simulator in that of a start: ``/3/017``, ``/seed-12``, ``/3/seed-12``."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an episode is held against."""

    format: EpisodeFormat = ANY_FORMAT
    group_size: int
    sampling: Sampling | None = None
    """How the run draws actions; None: any."""
    newest_version: int
    """No decision was sampled by a later policy than this."""
    actor: str | None = None
    """Name of who sent it; None: any."""


class Refusal(NamedTuple):
    """Why an episode is not taken."""

    cause: RefusalCause
    reason: str


class Check(NamedTuple):
    """One line of the table."""

    of: str
    """The fields that it looks at."""
    cause: RefusalCause
    problem: Callable[[Episode, Expected], str | None]
    """Says what is wrong, or None."""
    of_stored: bool = True
    """Whether a stored episode is held against it too: not where a learner can learn from it all the same, as
    after a resume with other start states or shorter episodes."""


def _soundness(episode: Episode, expected: Expected) -> str | None:
    return problem_with(episode)


def _numbers(episode: Episode, expected: Expected) -> str | None:
    named: dict[str, NDArray[Any]] = {
        "actions": episode.actions,
        "logprobs": episode.logprobs,
        "rewards": episode.rewards,
        **{
            name: getattr(episode, name) for name in ("states", "final_state") if name in optional_of(episode)
        },
        **{name: array for name, array in episode.sample.items() if array.dtype.kind == "f"},
    }
    for name, array in named.items():
        if not (np.abs(array) <= MAX_NUMBER).all():  # Nor is it with a nan.
            return f"{name} holds a number that is not finite, or beyond {MAX_NUMBER:g}"
    return None


def _scores(episode: Episode, expected: Expected) -> str | None:
    scores_NC = episode.success_scores
    if not ((scores_NC >= 0) & (scores_NC <= 1)).all():
        return f"success_scores are probabilities, but lie in {scores_NC.min():g}..{scores_NC.max():g}"
    return None


def _values(episode: Episode, expected: Expected) -> str | None:
    values_N = episode.values
    if np.isnan(values_N).all() or (np.abs(values_N) <= MAX_NUMBER).all():
        return None
    return f"values must all be finite and at most {MAX_NUMBER:g}, or all nan where there is no critic"


def _outcome(episode: Episode, expected: Expected) -> str | None:
    """Hold the end against the rewards of a world model, and against the success of a simulator."""
    if episode.steps_taken == REWARDED:
        if not episode.success and (episode.rewards > 0).any():
            return "end_reason is 'truncated', but a step has a positive reward"
        return None
    fulfilled = np.flatnonzero(episode.success_scores).tolist()
    if fulfilled != ([episode.steps - 1] if episode.success else []) or (
        episode.success and episode.success_scores.reshape(-1)[episode.steps - 1] != 1
    ):
        return (
            f"end_reason is {episode.end_reason!r}, but the task was fulfilled at the steps {fulfilled[:8]}"
        )
    return None


def _played(episode: Episode, expected: Expected) -> str | None:
    """Hold what only simulators tell against the simulator of the run."""
    simulator, found = expected.format.simulator, optional_of(episode)
    if expected.format.imagined and episode.steps_taken != REWARDED:
        return "it says how many steps were taken, as of a simulator, but this run has a world model"
    if simulator is None:
        return None
    if episode.steps_taken == REWARDED:
        return "it does not say how many steps were taken, as episodes of a simulator do"
    more, states = episode.more_frames, episode.states
    sizes = (0 if more is None else more.shape[1], 0 if states is None else states.shape[1])
    if sizes != (simulator.more_cameras, simulator.state_dim) or 0 in (
        x.size for x in (more, states) if x is not None
    ):
        return (
            f"{sizes[0]} further cameras and {sizes[1]} numbers of state ({', '.join(found) or 'no array'}), "
            f"this run has {simulator.more_cameras} and {simulator.state_dim}"
        )
    if simulator.reward == "success" and not np.array_equal(episode.rewards, episode.success_scores):
        return "rewards other than 1 in the step that fulfils the task"
    return None


def _temperature(episode: Episode, expected: Expected) -> str | None:
    if not episode.temperature > 0:
        return f"temperature {episode.temperature}: episodes to learn from are sampled above 0"
    return None


def _task(episode: Episode, expected: Expected) -> str | None:
    known = expected.format.tasks
    if expected.format.simulator is not None:
        return _simulated_start(episode, expected.format.simulator)
    if episode.start_state in known:
        if episode.task in known[episode.start_state]:
            return None
        return f"task {episode.task[:60]!r}, but start state {episode.start_state[:60]!r} has another one"
    if known:
        return f"start state {episode.start_state[:60]!r} is none of the run's {len(known)}"
    return _instruction(episode.task) or _start_name(episode)


def _simulated_start(episode: Episode, simulator: SimulatorFormat) -> str | None:
    if simulator.tasks and episode.task not in simulator.tasks:
        return f"task {episode.task[:60]!r} is none of the {len(simulator.tasks)} of {simulator.name}"
    if not is_start_of(simulator.name, episode.start_state):
        return f"start_state {episode.start_state[:60]!r} is no start of {simulator.name}"
    return _instruction(episode.task)


def is_start_of(simulator: str, name: str) -> bool:
    """Tell whether a start of this simulator can be called `name`."""
    return name.startswith(simulator) and _START.fullmatch(name.removeprefix(simulator)) is not None


def _instruction(task: str) -> str | None:
    if not 1 <= len(task) <= MAX_TASK or not task.strip() or not task.isprintable():
        return f"a task is 1 to {MAX_TASK} printable letters, this one has {len(task)}"
    return None


def _start_name(episode: Episode) -> str | None:
    """Check the name of a start where nothing is known of the run: of either kind."""
    simulator, mark, _ = episode.start_state.partition("/")
    if mark and _START.fullmatch(episode.start_state.removeprefix(simulator)):
        return _name("start_state", simulator)
    return _name("start_state", episode.start_state)


def _actor(episode: Episode, expected: Expected) -> str | None:
    if expected.actor is not None and episode.actor != expected.actor:
        return f"it says that {episode.actor[:60]!r} imagined it, but {expected.actor[:60]!r} sent it"
    return _name("actor", episode.actor)


def _name(what: str, name: str) -> str | None:
    plain = 1 <= len(name) <= MAX_NAME and name.isprintable() and name.strip(". ")
    if not plain or "/" in name or "\\" in name:
        return f"{what} {name[:60]!r} is no plain name: 1 to {MAX_NAME} printable letters, no path"
    return None


def _group_size(episode: Episode, expected: Expected) -> str | None:
    if episode.group_size != expected.group_size:
        return f"group size {episode.group_size}, this run has {expected.group_size}"
    return None


def _sampling(episode: Episode, expected: Expected) -> str | None:
    wanted = expected.sampling
    if wanted is not None and (episode.temperature, episode.top_k) != wanted:
        return (
            f"temperature {episode.temperature} and top_k {episode.top_k}, this run has "
            f"{wanted.temperature} and {wanted.top_k}"
        )
    return None


def _pictures(episode: Episode, expected: Expected) -> str | None:
    size, found = expected.format.image_size, episode.final_frame.shape[:2]
    if size and found != (size, size):
        return f"pictures of {found[0]} x {found[1]} pixels, this run has {size} x {size}"
    return None


def _decisions(episode: Episode, expected: Expected) -> str | None:
    spec = expected.format.action_spec
    if spec is not None and episode.actions.shape[1:] != (spec.chunk, spec.dim):
        return (
            f"decisions of {list(episode.actions.shape[1:])} numbers, this run has {[spec.chunk, spec.dim]}"
        )
    return None


def _length(episode: Episode, expected: Expected) -> str | None:
    longest = expected.format.max_decisions
    if longest and len(episode.actions) > longest:
        return f"{len(episode.actions)} decisions, an episode of this run has at most {longest}"
    return None


def _sample(episode: Episode, expected: Expected) -> str | None:
    wanted = expected.format.sample
    found = {name: (array.dtype.name, array.shape[1:]) for name, array in episode.sample.items()}
    if wanted and not (found.keys() == wanted.keys() and all(_fits(found[n], wanted[n]) for n in wanted)):
        return f"a sample of {found!s:.200}, the policy of this run gives {dict(wanted)!s:.200}"
    return None


def _fits(found: tuple[str, tuple[int, ...]], wanted: tuple[str, tuple[int | str, ...]]) -> bool:
    (dtype, shape), (wanted_dtype, wanted_shape) = found, wanted
    sizes = zip(shape, wanted_shape, strict=False)
    same = len(shape) == len(wanted_shape) and all(isinstance(w, str) or n == w for n, w in sizes)
    return dtype == wanted_dtype and same


def _policy_versions(episode: Episode, expected: Expected) -> str | None:
    newest = int(episode.policy_versions.max())
    if newest > expected.newest_version:
        return f"policy version {newest} made it, the newest there can be is {expected.newest_version}"
    return None


def _world_version(episode: Episode, expected: Expected) -> str | None:
    known, found = expected.format.world_version, episode.world_version
    if found < -1 or (known is not None and found != known):
        return (
            f"world version {found} imagined it, in this run it is {'-1 or more' if known is None else known}"
        )
    return None


CHECKS: Final[tuple[Check, ...]] = (
    Check("every array's dtype, rank and sizes; member; versions from 0 on", "content", _soundness),
    Check("actions, logprobs, rewards, floats of the sample", "content", _numbers),
    Check("success_scores", "content", _scores),
    Check("values", "content", _values),
    Check("rewards, success_scores, end_reason", "content", _outcome),
    Check("temperature", "content", _temperature),
    Check("actor", "content", _actor, of_stored=False),
    Check("group_size", "settings", _group_size),
    Check("temperature, top_k", "settings", _sampling),
    Check("frames, final_frame, video", "settings", _pictures),
    Check("actions, logprobs, rewards, success_scores", "settings", _decisions),
    Check("sample", "settings", _sample),
    Check("every array's number of decisions", "settings", _length, of_stored=False),
    Check("steps_taken, further cameras, states, rewards", "settings", _played, of_stored=False),
    Check("task, start_state", "settings", _task, of_stored=False),
    Check("policy_versions", "version", _policy_versions),
    Check("world_version", "version", _world_version),
)
"""All that an episode must be, in this order. The ids are checked with the message (`episode_codec`) and with
the grant; `seed` and `noise_seeds` may be any numbers: nothing is computed with them."""


def refusal(episode: Episode, expected: Expected, *, stored: bool = False) -> Refusal | None:
    """Say why an episode is not taken, or None when it is sound and of this run.

    Args:
        episode: Of any content.
        expected: What it is held against.
        stored: It was admitted before: see `Check.of_stored`.
    """
    for check in CHECKS:
        problem = check.problem(episode, expected) if check.of_stored or not stored else None
        if problem is not None:
            return Refusal(check.cause, problem)
    return None


def unusable(group: Sequence[Episode], group_id: str, expected: Expected) -> str | None:
    """Say why a learner cannot learn from a stored group, or None when it can.

    Args:
        group: As it was read, in any order.
        group_id: That of its number.
        expected: `newest_version` is the learner's own.
    """
    members = sorted(episode.member for episode in group)
    if members != list(range(expected.group_size)):
        return f"it has the members {members}, a group of this run has {expected.group_size}"
    if any(episode.group_id != group_id for episode in group):
        return f"it holds an episode of another group than {group_id}"
    for episode in group:
        found = refusal(episode, expected, stored=True)
        if found is not None:
            return f"member {episode.member}: {found.reason}"
    first = group[0]
    for episode in group[1:]:
        if (problem := unlike(first, episode)) is not None:
            return problem
    return None


def unlike(sibling: Episode, episode: Episode) -> str | None:
    """Say what two episodes of one group do not share although siblings do, or None."""
    if sibling.final_frame.shape != episode.final_frame.shape:
        return f"images of {episode.final_frame.shape}, its siblings have {sibling.final_frame.shape}"
    if version_of(sibling) != version_of(episode):
        return "its siblings are of another schema version"
    if decision_layout(sibling) != decision_layout(episode):
        return "its siblings have decisions of another size, another sample, or other cameras or states"
    if (sibling.task, sibling.start_state) != (episode.task, episode.start_state):
        return "its siblings have another task or start state"
    return None
