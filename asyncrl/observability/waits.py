"""Every wait and every count of a run, defined once: a wait with its owner, its deadline and its end.

The table in `docs/waits.md` is generated from here. Waits and counts are totals of `process_status`: shared
memory, which outlives the process that added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.observability import metrics_system, process_status
from asyncrl.observability.metrics import Metric, define
from asyncrl.observability.process_status import Wait

_PREFIX: Final = "wait/"


@dataclass(frozen=True, kw_only=True)
class Count:
    """One kind of event that all processes of a run count."""

    total: int  # index among the totals of `process_status`
    metric: Metric


WAITS: dict[str, Wait] = {}
COUNTS: list[Count] = []


def _define(text: str, metric: Metric | None = None) -> Wait:
    # The text is ``key | name | owner | deadline | ended by | at the deadline``.
    key, name, owner, deadline, ended_by, then = " ".join(text.split()).split(" | ")
    about = f"At most {deadline}. Ended by {ended_by}. At the deadline: {then}."
    WAITS[key] = Wait(
        name=name,
        owner=owner,
        deadline=deadline,
        ended_by=ended_by,
        then=then,
        total=len(WAITS),
        metric=metric or define(f"{_PREFIX}{key}, last, s: {owner.capitalize()}: {name}. {about}"),
    )
    return WAITS[key]


def _counted(metric: Metric) -> Count:
    # Their totals are numbered from the last one down, those of waits from 0.
    COUNTS.append(Count(total=process_status.TOTALS - 1 - len(COUNTS), metric=metric))
    return COUNTS[-1]


MEETING = _define("""meeting | waiting for rank 0 to publish the run | every rank but 0 |
    --startup-timeout | rank 0, with loaded models | the rank ends with an error that names rank 0's
    address""")
HOSTS = _define("""hosts | meeting the other hosts | every rank of several hosts | --startup-timeout | the
    ranks of all hosts | the rank ends with an error that names the rank that did not come""")
FOLDER = _define("""folder | waiting to see the run folder | every rank but 0 | 60 | the file system | the
    rank ends with an error that names the host and --run-dir""")
OWNER = _define("""owner | waiting for the processes of an earlier owner of the run folder | learner | 20 s |
    their end | the run is refused""")
FIRST_ACTOR = _define("""first_actor | waiting for an actor to receive the first weights | learner |
    --startup-timeout | the first actor that loaded its models | the run ends with an error that names the
    registered receivers""")
BATCH = _define("""batch | waiting for a batch | learner | --batch-timeout since the last sign of progress |
    the actors; a stop request; too many filtered groups | the run ends with a checkpoint and an error that
    lists the replay's content""")
PART = _define("""part | waiting for rank 0 to announce a batch | learner ranks but 0 | --batch-timeout +
    --startup-timeout since rank 0's last message | rank 0, which sends one every 5 s; its end | the rank ends
    with an error""")
FETCH = _define("""fetch | fetching its shard of a batch | learner, each rank | --batch-timeout since the last
    episode that came | the replay; the other ranks | all ranks save; the run ends with an error""")
REPLAY_STATUS = _define("""replay_status | waiting for the replay's status | learner | 60 | the replay | the
    run ends with an error""")
CHECKPOINT = _define("""checkpoint | waiting for a checkpoint to be written | learner | 1800; 300 after a
    failure | the writer's thread | the run ends with an error that names the checkpoint""")
READY = _define("""ready | waiting for the members' answer to an offer | learner's publisher | 2 | the
    members; the death of one | the others continue; silent members may register again""")
FORMING = _define("""forming | forming the weight group | learner's publisher | --weights.timeout | all
    members; the death of one; a new registration | the group is formed again""")
BROADCAST = _define("""broadcast | broadcasting weights | learner's publisher | --weights.timeout | the
    transport; the death of a member | the group is formed again with those that answer""")
RECEIPTS = _define("""receipts | waiting for the members' receipts | learner's publisher | --weights.timeout |
    the members; the death of one | the group is formed again with those that answer""")
FIRST_WEIGHTS = _define("""first_weights | waiting for the first weights | actor | --startup-timeout | the
    learner's first version, or its end | the actor ends with an error and is respawned""")
JOINING = _define("""joining | forming the weight group | actor's receiver | --weights.timeout | all members;
    a newer offer | the actor waits for the next group""")
RECEIVING = _define("""receiving | receiving weights | actor's receiver | --weights.timeout | the transport; a
    newer offer | the actor keeps its weights and waits for the next group""")
HOST_WEIGHTS = _define("""host_weights | waiting for the host's weights | ranks with an actor on another host
    than rank 0's, but its lowest | --startup-timeout | the host's lowest rank with an actor | the rank ends
    with an error""")
CREDIT = _define("""credit | waiting for credit | actor | none; polls every 0.2 s | the learner's next
    batch; the run's end | nothing""")
NEWER_WEIGHTS = _define("""newer_weights | waiting for the weights that its group needs | actor | none;
    polls every 0.2 s | the learner's next version; the run's end | nothing: the learner's own deadline
    applies""")
DECISION = _define("""decision | waiting for the devices to finish a decision | actor | --hang-timeout | the
    devices | the actor ends with an error and is respawned""")
SIMULATORS = _define("""simulators | waiting for simulators to answer | actor, evaluator, evaluate, collect |
    120, without any answer of a worker; 300 until it is ready | a worker's answer; its death | the worker is
    replaced, its episodes are played again; after five, the command ends with an error""")
DEVICE_MEMORY = _define("""device_memory | waiting for device memory to return to | actor and learner with
    --actor.offload, --learner.offload | 60 | the other role on that device, once it waits too | the process
    ends with an error""")
FAREWELL = _define("""farewell | handing over the last episodes | actor | 5 | the replay's receipts | the
    actor ends; the episodes are imagined again after a resume""")
EVALUATION = _define("""evaluation | waiting for the last version's true success | learner, at the run's end,
    with --evaluate-every | --hang-timeout since the last episode that was played | the evaluator; a stop
    request | the run ends without that number, with a message""")
ROW = _define("""row | waiting for metrics.jsonl to be written | learner | 1, and not at all while rows are
    late | the disk | the learner continues; rows wait in memory, lost ones are counted""")
DISK = _define(
    """disk | waiting for disk space | replay | none; retries every second | free space, or a free file
    descriptor | nothing is granted; nothing acknowledged is lost""",
    metrics_system.DISK_WAITING,
)
TRACKERS = _define("""trackers | waiting for the trackers to finish | learner with --log-with, at the end | 20
    | their processes | they are ended; a message counts the updates that may be missing""")

RESPAWNS: Final = _counted(metrics_system.RESPAWNS)
WRONG_ENTRIES: Final = _counted(metrics_system.WRONG_ENTRIES)
LOST_ROWS: Final = _counted(metrics_system.LOST_ROWS)
LOST_CURVES: Final = _counted(metrics_system.LOST_CURVES)
DISCONNECTED: Final = _counted(metrics_system.DISCONNECTED)
DROPPED_LINES: Final = _counted(metrics_system.DROPPED_LINES)
LOST_TRACKED: Final = _counted(metrics_system.LOST_TRACKED)


def count(event: Count, amount: float = 1.0) -> None:
    """Count an event of this process."""
    process_status.count(event.total, amount)


def wait_metrics() -> dict[Metric, float]:
    """Read the seconds of every wait, and all counts, of this host's processes since each of them began."""
    totals = process_status.totals()
    known = [wait for wait in WAITS.values() if wait.metric.name.startswith(_PREFIX)]
    return {x.metric: totals[x.total] for x in (*known, *COUNTS)} if totals else {}


def as_markdown() -> str:
    """Write the reference page of all waits."""
    lines = [
        "# Waits",
        "",
        "Generated from `asyncrl/observability/waits.py`; `asyncrl metrics --waits` prints it.",
        "",
        "| wait | who | at most (s) | at the deadline | metric |",
        "|---|---|---|---|---|",
    ]
    for wait in WAITS.values():
        cells = (wait.name, wait.owner, wait.deadline, wait.then, f"`{wait.metric.name}`")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
