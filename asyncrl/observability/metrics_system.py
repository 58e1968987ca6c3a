"""Metrics of the replay, of weights on their way, of time, memory, messages and logs."""

from __future__ import annotations

from asyncrl.observability.metrics import LAG_RANGES, define

# --- replay ---

LAG_MEAN = define("""replay/lag_mean, mean, versions: Learner's version minus the decision's, mean. Below
    --replay.max-lag. Always near it: the actors wait (`time/actors_waiting`), so a lower bound costs
    little.""")
LAG_MAX = define("""replay/lag_max, max, versions: Largest lag in the batch. Never above
    --replay.max-lag.""")
LAG_HISTOGRAM = [
    define(f"""replay/lag_{lags.name}, mean, share: Decisions of the batch with a lag of {lags.text}. None is
        beyond --replay.max-lag. Most near it: the learner is slow, so a lower bound costs little.""")
    for lags in LAG_RANGES
]
"""One bar for each of `LAG_RANGES`."""
GROUPS_READY = define("""replay/groups_ready, last, groups: Complete groups waiting to be used. At most
    --algorithm.groups-per-update times (--replay.max-lag + 1); always near that: the learner is the
    bottleneck. 0 while the learner waits: more actors (--placement).""")
GROUPS_IN_FLIGHT = define("""replay/groups_in_flight, last, groups: Groups granted and not yet complete.
    Enough to keep all --actor.slots busy. 0: the actors wait for credit or are gone (their logs).""")
FILTERED_GROUPS = define("""replay/filtered_groups, last, groups: Groups replaced because all returns were
    equal; with --algorithm.filter-groups. Growing faster than the used groups: other --start-states, or a
    larger --algorithm.group-size.""")
REPLAY_SUCCESS = define("""replay/success, mean, share: Successful episodes of all groups completed at the
    learner's last version, with filtered ones. Watch it with --algorithm.filter-groups.""")
SIGNAL_GROUPS = define("""replay/signal_groups, mean, share: Groups of the batch whose episodes differ in
    return. Near 1. Low: use --algorithm.filter-groups, a larger --algorithm.group-size, other start states,
    or a higher --algorithm.temperature.""")
EPISODES = define("""replay/episodes, last, episodes: Episodes acknowledged since the run began. Grows by
    --algorithm.group-size times --algorithm.groups-per-update, plus filtered ones.""")
DROPPED_LAG = define("""replay/dropped_lag, last, episodes: Dropped: older than --replay.max-lag allows.
    Constant. Growing: fewer --actor.slots, or a larger --replay.max-lag.""")
DROPPED_DEADLINE = define("""replay/dropped_deadline, last, episodes: Dropped: their group never became
    complete. Constant. Growing: an actor hangs or restarts (its log), or imagining is slow: raise
    --replay.group-timeout.""")
DROPPED_RESUME = define("""replay/dropped_resume, last, episodes: Dropped on a resume and imagined again:
    incomplete, or of lost versions. Changes only on a resume.""")
DROPPED_INVALID = define("""replay/dropped_invalid, last, episodes: Refused: inconsistent content. 0.
    Otherwise an actor has other settings or code than the learner, or a file is damaged: `asyncrl replay
    verify`.""")
DROPPED_POISONED = define("""replay/dropped_poisoned, last, episodes: Dropped: finished, but a sibling was
    poisoned. 0. Otherwise see `replay/poisoned_*`.""")
DROPPED_OUTDATED = define("""replay/dropped_outdated, last, episodes: Dropped: of a group that was given up
    and granted again. Follows `replay/dropped_lag` and `replay/dropped_deadline`.""")
DROPPED_UNUSABLE = define("""replay/dropped_unusable, last, episodes: Set aside: the learner cannot use their
    stored group (another size, sampling, picture or sample). 0. Otherwise the console names the groups; their
    files are in replay/set_aside/.""")
_DROPPED = (
    *(DROPPED_LAG, DROPPED_DEADLINE, DROPPED_RESUME, DROPPED_INVALID),
    *(DROPPED_POISONED, DROPPED_OUTDATED, DROPPED_UNUSABLE),
)
DROPPED_DECISIONS = {
    episodes: define(
        f"{episodes.name}_decisions, last, decisions: Decisions in `{episodes.name}`. As the episodes."
    )
    for episodes in _DROPPED
}
"""Dropped episodes -> their decisions."""
REFUSED_CONTENT = define("""replay/refused_content, last, episodes: Of `replay/dropped_invalid`: contradictory
    or impossible numbers. 0. Otherwise an actor runs other code, or is hostile.""")
REFUSED_SETTINGS = define("""replay/refused_settings, last, episodes: Of `replay/dropped_invalid`: not the
    run's pictures, sampling, decisions, task or start state. 0. Otherwise an actor has other settings or
    files.""")
REFUSED_VERSION = define("""replay/refused_version, last, episodes: Of `replay/dropped_invalid`: of a version
    that the run does not have yet. 0. Otherwise an actor holds weights of another run, or of a lost part of
    this one.""")
REFUSED_GRANT = define("""replay/refused_grant, last, episodes: Of `replay/dropped_invalid`: their group was
    not granted to their sender. 0. Otherwise a peer fills groups of others.""")
POISONED_POLICY, POISONED_WORLD, POISONED_REWARD = (
    define(f"replay/poisoned_{model}, last, groups: Given up: {numbers} not finite. {advice}")
    for model, numbers, advice in (
        (
            "policy",
            "a log-prob, action or value of the policy was",
            "0. In one start state (the actor's log): replace it. In many: the model is broken, or its "
            "precision too low.",
        ),
        ("world", "frames of the world model were", "As `replay/poisoned_policy`."),
        ("reward", "a score of the reward model was", "As `replay/poisoned_policy`."),
    )
)
POISONED_RAISED = define("""replay/poisoned_raised, last, groups: Given up: imagining an episode raised an
    error. 0. The actor's log has the traceback, once per start state.""")
POISONED_QUARANTINED = define("""replay/poisoned_quarantined, last, groups: Not begun: their start state is
    quarantined. 0. Grows at each turn of a quarantined start state.""")
QUARANTINED = define("""replay/quarantined, last, start states: Unused after failures in two groups. 0. The
    actors' logs name them.""")
DUPLICATES = define("""replay/duplicates, last, episodes: Received again and recognised. 0, or a few after a
    broken connection.""")
DISK_WAITING = define("""replay/disk_waiting, last, s: Time that complete groups waited for disk space. 0.
    Growing: free space, or lower --replay.max-gigabytes; nothing is lost.""")
REPLAY_BYTES = define("""replay/bytes, last, bytes: Size of the HDF5 files. Levels off near
    --replay.max-gigabytes, or above if waiting groups need more. Fewer videos: --replay.keep-video-every.""")

# --- weights ---

WEIGHTS_VERSION = define("""weights/version, last, versions: Version last published. Equals the update's
    number.""")
WEIGHTS_BYTES = define("""weights/bytes, last, bytes: Size of one broadcast. Constant. Large: train adapters
    (--lora.rank).""")
WEIGHTS_SECONDS = define("""weights/seconds, last, s: Duration of the last broadcast, for which the learner
    does not wait. Below `time/update`. Near --weights.timeout: actors drop out; see --weights.transport.""")
WEIGHTS_MEMBERS = define("""weights/members, last, actors: Actors that took part in the last broadcast, joined
    ones with a version, and other hosts. The number of actors. Fewer: one restarts or timed out
    (--weights.timeout).""")
WEIGHTS_HOSTS = define("""weights/hosts, last, hosts: Other hosts that took part in the last broadcast; absent
    with --weights.between-hosts tcp. All with actors. Fewer: one is lost or slow (--weights.timeout).""")
WEIGHTS_HOSTS_SECONDS = define("""weights/hosts_seconds, last, s: Duration of the last broadcast between
    hosts. As `weights/pull_seconds`.""")
WEIGHTS_JOINED = define("""weights/joined, last, actors: Actors that joined and hold a version. Those of
    `asyncrl actor`.""")
WEIGHTS_PULL_SECONDS = define("""weights/pull_seconds, last, s: Time of the slowest joined actor to fetch its
    last version. Below the time between two updates. Above: actors skip versions; train adapters
    (--lora.rank), or raise --replay.max-lag.""")
WEIGHTS_PULLED_BYTES = define("""weights/pulled_bytes, last, bytes: Bytes of weights that joined actors
    fetched. Grows by `weights/bytes` for each version and joined actor.""")
WRONG_ENTRIES = define("""weights/wrong_entries, last, messages: Messages about weights that the learner
    refused, since it began. 0. Otherwise another program or version of asyncrl writes to its socket (its
    log).""")

# --- time ---

GROUPS_PER_MINUTE = define("""time/groups_per_minute, mean, 1/min: Groups used by the learner per minute.
    Compare --placement choices by it.""")
LEARNER_WAITING = define("""time/learner_waiting, mean, share: Time the learner waited for episodes. Low.
    High: add actors (--placement), or raise --actor.slots.""")
CHECKPOINT_WAITING = define("""time/checkpoint_waiting, sum, s: Time the learner waited for the previous
    checkpoint to be written. 0. Otherwise raise --checkpoint-every.""")
CHECKPOINT_COPYING = define("""time/checkpoint_copying, sum, s: Time the learner copied weights and optimizer
    to host memory for a checkpoint. Large: raise --checkpoint-every.""")
ACTORS_WAITING = define("""time/actors_waiting, mean, share: Time the actors waited for credit or newer
    weights. Low. High: raise --algorithm.micro-batch, add learner ranks (--placement), or use
    --learner.precision bf16.""")
ACTOR_POLICY, ACTOR_WORLD, ACTOR_REWARD = (
    define(f"""time/actor_{name}, mean, share: Actors' time in which their device computed the
        {model}. {advice}""")
    for name, model, advice in (
        ("policy", "policy", "Together with world and reward near 1: the GPU is always busy."),
        (
            "world",
            "world model",
            "Usually the largest. All three far below 1 although the actors do not wait: use "
            "--actor.pipeline-stages 2 or more --actor.slots.",
        ),
        ("reward", "reward model", "Small compared with the world's."),
    )
)
ACTOR_SIMULATORS = define("""time/actor_simulators, mean, share: Actors' time waiting for simulators; with a
    simulator as --world. Near 1: more --simulator.workers, or --actor.pipeline-stages 2. Near 0: the policy
    is the bottleneck.""")
ACTOR_HOST = define("""time/actor_host, mean, share: Actors' time in which their thread worked. Hidden by the
    devices with --actor.pipeline-stages 2. Includes launches that wait for CUDA's full queue; excludes models
    on the CPU.""")
ACTOR_OFFLOAD = define("""time/actor_parking, mean, share: Actors' time moving models to host memory and back;
    with --actor.offload. Well below `time/actors_waiting`; otherwise omit --actor.offload.""")
LEARNER_OFFLOAD = define("""time/learner_parking, sum, s: Time rank 0 spent moving its tensors to host memory
    and back; with --learner.offload. Well below the learner's waiting; otherwise omit --learner.offload.""")
UPDATE_SECONDS = define("""time/update, mean, s: Duration of one update without the waiting. Steady. Excludes
    publishing and checkpoints; the first one compiles, with --learner.compile.""")
DECISIONS_PER_SECOND = define("""time/decisions_per_second, mean, 1/s: Decisions with a gradient, of all ranks
    and epochs, per second of the update. Steady. Low: raise --algorithm.micro-batch, or use
    --learner.precision bf16.""")
MFU = define("""time/mfu, mean, share: Model FLOPs of those decisions per second, of the GPUs' peak; absent
    where that is unknown. Comparable on one machine. Low: raise --algorithm.micro-batch. Passes without
    gradient and recomputation do not count; --learner.gradient-checkpointing-every 2 saves half of the
    latter.""")
RESPAWNS = define("""time/respawns, last, processes: Actors and replays that were restarted, since torchrun
    last started the ranks. 0. Otherwise read the log that the console names.""")
PEAK_MEMORY = define("""time/peak_memory, sum, bytes: Peak resident host memory of rank 0, without its
    children. Levels off after the first checkpoints; steady growth is a leak.""")
# --- actors and learner ---

LIVE_SLOTS = define("""actor/live_slots, mean, share: Slots with an episode, at each decision of an actor. At
    least 0.95 while `time/actors_waiting` is near 0. Lower: fewer --actor.slots, or a larger --replay.max-lag
    or --algorithm.groups-per-update.""")
USEFUL_STEPS = define("""actor/useful_steps, mean, share: Imagined steps before their episode's end. Near 1
    where episodes have many decisions.""")
ACTOR_MEMORY = define("""actor/peak_memory, max, bytes: Peak memory of an actor's tensors on a GPU (CPU: of
    its process), the largest of all actors. Levels off early. Near the device's size: fewer --actor.slots, or
    --actor.pipeline-stages 2.""")
ACTOR_DECISIONS = define("""actor/decisions, sum, decisions: Decisions imagined by the present actors since
    their starts. Grows by a batch per update. While it grows the learner waits on (--batch-timeout).""")
ACTOR_RESTARTED = define("""actor/restarted_episodes, sum, episodes: Episodes restarted because a simulator's
    worker was lost, since the present actors began. 0. Otherwise read the actor's log; signal 9 often means a
    lack of memory.""")
ACTOR_OFFLOADED = define("""actor/parked_bytes, max, bytes: Device memory that an actor had freed when it last
    reported; with --actor.offload. 0 while the actor imagines; else about its models.""")
LEARNER_MEMORY = define("""learner/peak_memory, max, bytes: Peak memory of rank 0's tensors on its GPU. Levels
    off after the first update. Near the device's size: a smaller --algorithm.micro-batch,
    --learner.gradient-checkpointing, --lora.rank, or more learner ranks.""")
LEARNER_OFFLOADED = define("""learner/parked_bytes, max, bytes: Device memory that rank 0 freed while it
    waited for this batch; with --learner.offload. About weights, gradient and both moments. 0: the batch was
    there at once.""")

# --- logs and messages ---

LOST_ROWS = define("""log/lost_rows, last, updates: Updates whose row of metrics.jsonl was lost, since the
    learner began. 0. Otherwise the disk stalled too long: free space.""")
LOST_CURVES = define("""log/lost_curves, last, updates: Updates missing in TensorBoard, since the learner
    began. 0. Otherwise as `log/lost_rows`; metrics.jsonl is complete unless that counts too.""")
LOST_TRACKED = define("""log/lost_tracked, last, updates: Updates that the trackers of --log-with did not
    accept, since the learner began. 0. Otherwise read logs/tracker-NAME.log; metrics.jsonl is complete.""")
DROPPED_LINES = define("""log/dropped_lines, last, lines: Lines that a closed console or a log did not accept.
    0. Those of the console are in logs/learner-0.log (--inline: logs/inline.log).""")
WIRE_BYTES = define("""wire/bytes, last, bytes: Episode bytes received by the replay. Grows steadily; 0 with
    --inline.""")
WIRE_ERRORS = define("""wire/errors, last, messages: Messages refused because they broke the wire format. 0.
    Otherwise another program connects to the replay's port, or versions differ.""")
DISCONNECTED = define("""wire/disconnected, last, connections: Connections closed by the replay or the learner
    because there were too many. 0. Otherwise another program connects to their ports.""")
