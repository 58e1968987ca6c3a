"""Define what a run reports of its replay: lag, what waits, what was dropped, which start states failed."""

from __future__ import annotations

from asyncrl.observability.metrics import LAG_RANGES, Reduction, define

LAG_MEAN = define(
    "replay/lag_mean",
    Reduction.MEAN,
    "versions",
    "Learner's version minus the decision's, mean.",
    "Below --replay.max-lag, 0 with --synchronous. Near the bound all the time: the actors are ahead and "
    "wait (`time/actors_waiting`), so a lower bound costs little.",
)
LAG_MAX = define(
    "replay/lag_max",
    Reduction.MAX,
    "versions",
    "The same, largest in the batch.",
    "At most --replay.max-lag, always: the replay guarantees it.",
)
WORLD_LAG_MEAN = define(
    "replay/world_lag_mean",
    Reduction.MEAN,
    "versions",
    "Newest world that drew a decision of the batch minus the decision's own, mean; with --pace.every only.",
    "0 but for the updates after a new world. A world has no importance weight, only a bound.",
)
WORLD_LAG_MAX = define(
    "replay/world_lag_max",
    Reduction.MAX,
    "versions",
    "The same, largest in the batch.",
    "At most --replay.max-world-lag, always.",
)
LAG_HISTOGRAM = [
    define(
        f"replay/lag_{lags.name}",
        Reduction.MEAN,
        "share",
        f"Decisions of the batch with a lag of {lags.text}.",
        "The bars add up to 1, and none is beyond --replay.max-lag. Most of it on the right: finished "
        "groups wait for a slow learner, so a lower --replay.max-lag costs little.",
    )
    for lags in LAG_RANGES
]
"""One bar for each of `LAG_RANGES`."""
GROUPS_READY = define(
    "replay/groups_ready",
    Reduction.LAST,
    "groups",
    "Complete groups waiting to be used.",
    "At most --algorithm.groups-per-update times (--replay.max-lag + 1). Always near that: the learner is "
    "the bottleneck (`time/actors_waiting`). 0 while the learner waits: more actors (--placement).",
)
GROUPS_IN_FLIGHT = define(
    "replay/groups_in_flight",
    Reduction.LAST,
    "groups",
    "Groups granted and not yet complete.",
    "Enough to keep all --actor.slots busy. It falls to 0 only when the actors wait for credit, or are gone: "
    "read their logs.",
)
FILTERED_GROUPS = define(
    "replay/filtered_groups",
    Reduction.LAST,
    "groups",
    "Groups replaced because all their episodes had the same return; with --algorithm.filter-groups.",
    "Grows. When it outgrows the groups that are used, most start states are too easy or too hard: choose "
    "others with --start-states, or raise --algorithm.group-size.",
)
REPLAY_SUCCESS = define(
    "replay/success",
    Reduction.MEAN,
    "share",
    "Successful episodes of all groups completed at the learner's last version, filtered ones included.",
    "As `env/success_once`, but of everything that was imagined: the success to watch with "
    "--algorithm.filter-groups. Absent when no group was completed in the version before.",
)
SIGNAL_GROUPS = define(
    "replay/signal_groups",
    Reduction.MEAN,
    "share",
    "Groups of the batch whose episodes differ in return.",
    "As near to 1 as possible; exactly 1 with --algorithm.filter-groups. Low: grpo learns from few groups. "
    "Use the filter, a larger --algorithm.group-size, other start states, or a higher "
    "--algorithm.temperature.",
)
EPISODES = define(
    "replay/episodes",
    Reduction.LAST,
    "episodes",
    "Episodes acknowledged since the run began.",
    "Grows by --algorithm.group-size times --algorithm.groups-per-update per update, plus what is filtered.",
)
DROPPED_LAG = define(
    "replay/dropped_lag",
    Reduction.LAST,
    "episodes",
    "Dropped: their policy is older than --replay.max-lag allows.",
    "Constant. Growing: episodes take longer than the bound allows. Fewer --actor.slots, or a larger "
    "--replay.max-lag.",
)
DROPPED_WORLD = define(
    "replay/dropped_world",
    Reduction.LAST,
    "episodes",
    "Dropped: drawn by a world older than --replay.max-world-lag allows, by a policy that was not too old.",
    "0 without --pace.every. Grows a little with each accepted world where the bound is 0. Growing between "
    "them: an actor does not get new worlds (its log says why), or worlds follow faster than episodes end: "
    "a larger --pace.every or --replay.max-world-lag.",
)
DROPPED_DEADLINE = define(
    "replay/dropped_deadline",
    Reduction.LAST,
    "episodes",
    "Dropped: their group never became complete.",
    "Constant. Growing: an actor is stuck or restarts (its log says why); raise --replay.group-timeout when "
    "imagining is only slow.",
)
DROPPED_RESUME = define(
    "replay/dropped_resume",
    Reduction.LAST,
    "episodes",
    "Dropped on a resume and imagined again: incomplete, or of versions that were lost.",
    "Changes only when a run is resumed; those groups are imagined again.",
)
DROPPED_INVALID = define(
    "replay/dropped_invalid",
    Reduction.LAST,
    "episodes",
    "Refused: inconsistent content.",
    "0. Otherwise an actor runs other settings or other code than the learner, or a file is damaged: "
    "`asyncrl replay verify`.",
)
DROPPED_POISONED = define(
    "replay/dropped_poisoned",
    Reduction.LAST,
    "episodes",
    "Dropped: finished, but a sibling was poisoned. Episodes that had not ended are not counted.",
    "0. Otherwise see `replay/poisoned_*`.",
)
DROPPED_OUTDATED = define(
    "replay/dropped_outdated",
    Reduction.LAST,
    "episodes",
    "Dropped: imagined for a group that was given up and is granted again.",
    "As `replay/dropped_lag`, `replay/dropped_world` and `replay/dropped_deadline`, of which it follows.",
)
DROPPED_UNUSABLE = define(
    "replay/dropped_unusable",
    Reduction.LAST,
    "episodes",
    "Set aside: stored, but the learner cannot use their group (another size, sampling, picture or sample).",
    "0. Otherwise the console and the ledger name the groups; their files are in replay/set_aside/.",
)
DROPPED_UNRECORDED = define(
    "replay/dropped_unrecorded",
    Reduction.LAST,
    "episodes",
    "Given up on a resume because the ledger that said whether they were used was lost or changed.",
    "0. Otherwise somebody deleted or damaged `replay/ledger.log`; new groups are imagined instead.",
)
(
    DROPPED_LAG_DECISIONS,
    DROPPED_WORLD_DECISIONS,
    DROPPED_DEADLINE_DECISIONS,
    DROPPED_RESUME_DECISIONS,
    DROPPED_INVALID_DECISIONS,
    DROPPED_POISONED_DECISIONS,
    DROPPED_OUTDATED_DECISIONS,
    DROPPED_UNUSABLE_DECISIONS,
    DROPPED_UNRECORDED_DECISIONS,
) = (
    define(
        f"{dropped.name}_decisions",
        Reduction.LAST,
        "decisions",
        f"Decisions in `{dropped.name}`.",
        "As the episodes.",
    )
    for dropped in (
        DROPPED_LAG,
        DROPPED_WORLD,
        DROPPED_DEADLINE,
        DROPPED_RESUME,
        DROPPED_INVALID,
        DROPPED_POISONED,
        DROPPED_OUTDATED,
        DROPPED_UNUSABLE,
        DROPPED_UNRECORDED,
    )
)
REFUSED_CONTENT, REFUSED_SETTINGS, REFUSED_VERSION, REFUSED_GRANT = (
    define(
        f"replay/refused_{cause}",
        Reduction.LAST,
        "episodes",
        f"Of `replay/dropped_invalid`: {what}.",
        f"0. Otherwise {why}; the actor's log has every reason.",
    )
    for cause, what, why in (
        (
            "content",
            "they contradict themselves, or hold numbers that no model gives",
            "an actor runs other code, or is hostile",
        ),
        (
            "settings",
            "pictures, sampling, decisions, task or start state are not the run's",
            "an actor has other settings or files than the learner",
        ),
        (
            "version",
            "made by a policy or world version that the run does not have yet",
            "an actor holds weights of another run, or of a lost part of this one",
        ),
        ("grant", "their group was not granted to who sent them", "a peer fills the groups of others"),
    )
)
POISONED_POLICY, POISONED_WORLD, POISONED_REWARD = (
    define(
        f"replay/poisoned_{model}",
        Reduction.LAST,
        "groups",
        f"Given up: {what} not finite.",
        "0. The actor's log names the start state. In one: replace it (--start-states). In many: the model "
        "is broken, or its precision too low.",
    )
    for model, what in (
        ("policy", "a log-prob, action or value of the policy was"),
        ("world", "what the world model drew was"),
        ("reward", "a score of the reward model was"),
    )
)
POISONED_RAISED = define(
    "replay/poisoned_raised",
    Reduction.LAST,
    "groups",
    "Given up: imagining one of its episodes raised an error.",
    "0. The actor's log has the traceback, once per start state.",
)
POISONED_QUARANTINED = define(
    "replay/poisoned_quarantined",
    Reduction.LAST,
    "groups",
    "Not begun: their start state is quarantined.",
    "0. Grows by one whenever the turn of a quarantined start state comes.",
)
QUARANTINED = define(
    "replay/quarantined",
    Reduction.LAST,
    "start states",
    "Not used any more: they failed in --replay.quarantine-after groups.",
    "0. The actors' logs name them; when it reaches their number the run ends.",
)
DUPLICATES = define(
    "replay/duplicates",
    Reduction.LAST,
    "episodes",
    "Received again and recognised.",
    "0, or a few after a broken connection: an episode was sent again and recognised.",
)
DISK_WAITING = define(
    "replay/disk_waiting",
    Reduction.LAST,
    "s",
    "Time that complete groups waited for disk space.",
    "0. Growing: the disk is full. Nothing is lost and nothing is granted; free space, or lower "
    "--replay.max-gigabytes.",
)
REPLAY_BYTES = define(
    "replay/bytes",
    Reduction.LAST,
    "bytes",
    "Size of the HDF5 files.",
    "Levels off near --replay.max-gigabytes. Above it: only used groups are deleted, and those that wait "
    "need more. Fewer videos: --replay.keep-video-every.",
)
