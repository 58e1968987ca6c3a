"""Metrics of the replay, of weights on their way, of time, memory, messages and logs."""

from __future__ import annotations

from asyncrl.observability.metrics import LAG_RANGES, define

# --- replay ---

LAG_MEAN = define("""replay/lag_mean, mean, versions: Learner's version minus the decision's, mean. Below
    --replay.max-lag. Near the bound all the time: the actors are ahead and wait
    (`time/actors_waiting`), so a lower bound costs little.""")
LAG_MAX = define("""replay/lag_max, max, versions: The same, largest in the batch. At most --replay.max-lag,
    always: the replay guarantees it.""")
LAG_HISTOGRAM = [
    define(f"""replay/lag_{lags.name}, mean, share: Decisions of the batch with a lag of {lags.text}. The bars
        add up to 1, and none is beyond --replay.max-lag. Most of it on the right: finished groups wait for a
        slow learner, so a lower --replay.max-lag costs little.""")
    for lags in LAG_RANGES
]
"""One bar for each of `LAG_RANGES`."""
GROUPS_READY = define("""replay/groups_ready, last, groups: Complete groups waiting to be used. At most
    --algorithm.groups-per-update times (--replay.max-lag + 1). Always near that: the learner is the
    bottleneck (`time/actors_waiting`). 0 while the learner waits: more actors (--placement).""")
GROUPS_IN_FLIGHT = define("""replay/groups_in_flight, last, groups: Groups granted and not yet complete.
    Enough to keep all --actor.slots busy. 0 only while the actors wait for credit, or are gone: read their
    logs.""")
FILTERED_GROUPS = define("""replay/filtered_groups, last, groups: Groups replaced because all their episodes
    had the same return; with --algorithm.filter-groups. Grows. Faster than the used groups: most start states
    are too easy or too hard; choose others (--start-states), or raise --algorithm.group-size.""")
REPLAY_SUCCESS = define("""replay/success, mean, share: Successful episodes of all groups completed at the
    learner's last version, filtered ones included. As `env/success_once`, of all imagined groups: the success
    to watch with --algorithm.filter-groups. Absent if no group was completed in the version before.""")
SIGNAL_GROUPS = define("""replay/signal_groups, mean, share: Groups of the batch whose episodes differ in
    return. As near to 1 as possible; exactly 1 with --algorithm.filter-groups. Low: grpo learns from few
    groups; use
    --algorithm.filter-groups, a larger --algorithm.group-size, other start states, or a higher
    --algorithm.temperature.""")
EPISODES = define("""replay/episodes, last, episodes: Episodes acknowledged since the run began. Grows by
    --algorithm.group-size times --algorithm.groups-per-update per update, plus the filtered ones.""")
DROPPED_LAG = define("""replay/dropped_lag, last, episodes: Dropped: their policy is older than
    --replay.max-lag allows. Constant. Growing: episodes take longer than the bound allows; fewer
    --actor.slots, or a larger --replay.max-lag.""")
DROPPED_DEADLINE = define("""replay/dropped_deadline, last, episodes: Dropped: their group never became
    complete. Constant. Growing: an actor is stuck or restarts (read its log); if imagining is only slow,
    raise --replay.group-timeout.""")
DROPPED_RESUME = define("""replay/dropped_resume, last, episodes: Dropped on a resume and imagined again:
    incomplete, or of versions that were lost. Changes only when a run is resumed.""")
DROPPED_INVALID = define("""replay/dropped_invalid, last, episodes: Refused: inconsistent content. 0.
    Otherwise an actor runs other settings or other code than the learner, or a file is damaged: `asyncrl
    replay verify`.""")
DROPPED_POISONED = define("""replay/dropped_poisoned, last, episodes: Dropped: finished, but a sibling was
    poisoned; episodes that had not ended are not counted. 0. Otherwise see `replay/poisoned_*`.""")
DROPPED_OUTDATED = define("""replay/dropped_outdated, last, episodes: Dropped: imagined for a group that was
    given up and is granted again. Follows `replay/dropped_lag` and
    `replay/dropped_deadline`.""")
DROPPED_UNUSABLE = define("""replay/dropped_unusable, last, episodes: Set aside: stored, but the learner
    cannot use their group (another size, sampling, picture or sample). 0. Otherwise the console and the
    ledger name the groups; their files are in replay/set_aside/.""")
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
    content, or numbers that no model gives. 0. Otherwise an actor runs other code, or is hostile; its log has
    every reason.""")
REFUSED_SETTINGS = define("""replay/refused_settings, last, episodes: Of `replay/dropped_invalid`: pictures,
    sampling, decisions, task or start state are not the run's. 0. Otherwise an actor has other settings or
    files than the learner; its log has every reason.""")
REFUSED_VERSION = define("""replay/refused_version, last, episodes: Of `replay/dropped_invalid`: made by a
    policy or world version that the run does not have yet. 0. Otherwise an actor holds weights of another
    run, or of a lost part of this one; its log has every reason.""")
REFUSED_GRANT = define("""replay/refused_grant, last, episodes: Of `replay/dropped_invalid`: their group was
    not granted to their sender. 0. Otherwise a peer fills the groups of others; its log has every reason.""")
POISONED_POLICY, POISONED_WORLD, POISONED_REWARD = (
    define(f"""replay/poisoned_{model}, last, groups: Given up: {numbers} not finite. 0. The actor's log names
        the start state. In one: replace it (--start-states). In many: the model is broken, or its precision
        too low.""")
    for model, numbers in (
        ("policy", "a log-prob, action or value of the policy was"),
        ("world", "frames of the world model were"),
        ("reward", "a score of the reward model was"),
    )
)
POISONED_RAISED = define("""replay/poisoned_raised, last, groups: Given up: imagining one of its episodes
    raised an error. 0. The actor's log has the traceback, once per start state.""")
POISONED_QUARANTINED = define("""replay/poisoned_quarantined, last, groups: Not begun: their start state is
    quarantined. 0. Grows by one at each turn of a quarantined start state.""")
QUARANTINED = define("""replay/quarantined, last, start states: Not used any more: they failed in
    two groups. 0. The actors' logs name them; when all start states are quarantined the
    run ends.""")
DUPLICATES = define("""replay/duplicates, last, episodes: Received again and recognised. 0, or a few after a
    broken connection.""")
DISK_WAITING = define("""replay/disk_waiting, last, s: Time that complete groups waited for disk space. 0.
    Growing: the disk is full. Nothing is lost and nothing is granted; free space, or lower
    --replay.max-gigabytes.""")
REPLAY_BYTES = define("""replay/bytes, last, bytes: Size of the HDF5 files. Levels off near
    --replay.max-gigabytes. Above it: waiting groups, which are never deleted, need more. Fewer videos:
    --replay.keep-video-every.""")

# --- weights ---

WEIGHTS_VERSION = define("""weights/version, last, versions: Version last published. Equals the update's
    number.""")
WEIGHTS_BYTES = define("""weights/bytes, last, bytes: Size of one broadcast. Constant. Large: train adapters
    (--lora.rank).""")
WEIGHTS_SECONDS = define("""weights/seconds, last, s: Duration of the last broadcast. Below `time/update`: the
    learner does not wait for it, but actors act on older weights. Near --weights.timeout: actors drop out;
    look at --weights.transport.""")
WEIGHTS_MEMBERS = define("""weights/members, last, actors: Actors that took part in the last broadcast, joined
    ones that hold a version, and other hosts. The number of actors. Fewer: one is restarting or timed out
    (--weights.timeout).""")
WEIGHTS_HOSTS = define("""weights/hosts, last, hosts: Other hosts that took part in the last broadcast; absent
    with --weights.between-hosts tcp. The number of other hosts with actors. Fewer: one is lost, cut off or
    slow (--weights.timeout).""")
WEIGHTS_HOSTS_SECONDS = define("""weights/hosts_seconds, last, s: Duration of the last broadcast between
    hosts. Below the time between two updates. Above it other hosts skip versions and their lag grows: train
    adapters (--lora.rank), or raise --replay.max-lag.""")
WEIGHTS_JOINED = define("""weights/joined, last, actors: Actors that joined and hold a version. The number of
    actors that joined (`asyncrl actor`); docs/joining.md.""")
WEIGHTS_PULL_SECONDS = define("""weights/pull_seconds, last, s: Time the slowest joined actor needed to fetch
    its last version. Below the time between two updates. Above it actors skip versions and their lag grows:
    train adapters (--lora.rank), or raise --replay.max-lag.""")
WEIGHTS_PULLED_BYTES = define("""weights/pulled_bytes, last, bytes: Bytes of weights that joined actors
    fetched. Grows by `weights/bytes` for each version and joined actor.""")
WRONG_ENTRIES = define("""weights/wrong_entries, last, messages: Messages about weights that the learner
    refused, since it began. 0. Otherwise another program, or another version of asyncrl, writes to its
    socket; its log names the messages.""")

# --- time ---

GROUPS_PER_MINUTE = define("""time/groups_per_minute, mean, 1/min: Groups used by the learner per minute. The
    pace of the whole run, waiting included. Compare it between --placement choices.""")
LEARNER_WAITING = define("""time/learner_waiting, mean, share: Share of the time the learner waited for
    episodes. Low. High: imagining is the bottleneck; add actors (--placement), or raise --actor.slots.""")
CHECKPOINT_WAITING = define("""time/checkpoint_waiting, sum, s: Time the learner waited until the previous
    checkpoint was written. 0. Otherwise writing takes longer than the updates between two checkpoints: raise
    --checkpoint-every.""")
CHECKPOINT_COPYING = define("""time/checkpoint_copying, sum, s: Time in which the learner copied weights and
    optimizer to host memory for a checkpoint. No update runs during it. A large share of the time: raise
    --checkpoint-every.""")
ACTORS_WAITING = define("""time/actors_waiting, mean, share: Share of the time the actors waited for credit or
    newer weights. Low. High: the learner is the bottleneck. Raise --algorithm.micro-batch, add learner ranks
    (--placement), or use --learner.precision bf16; a larger --replay.max-lag does not help for long.""")
ACTOR_POLICY, ACTOR_WORLD, ACTOR_REWARD = (
    define(f"""time/actor_{name}, mean, share: Share of the actors' time in which their device was busy with
        the {model}. {advice}""")
    for name, model, advice in (
        ("policy", "policy", "With world and reward near 1: the GPU is always busy."),
        (
            "world",
            "world model",
            "Usually the largest. Far below 1 together with policy and reward although the actors do not "
            "wait: the host is the bottleneck, use --actor.pipeline-stages 2 or more --actor.slots.",
        ),
        ("reward", "reward model", "Small compared with the world's."),
    )
)
ACTOR_SIMULATORS = define("""time/actor_simulators, mean, share: Share of the actors' time in which they
    waited for simulators to answer; with a simulator as --world. Near 1: simulators are the bottleneck, use
    more --simulator.workers, or --actor.pipeline-stages 2. Near 0: the policy is.""")
ACTOR_HOST = define("""time/actor_host, mean, share: Share of the actors' time in which their thread worked:
    refilled, launched, recorded, handed over. Hidden behind the devices with --actor.pipeline-stages 2; with
    1 it adds to their time. Includes launches that wait while CUDA's queue is full, and no model time on the
    CPU.""")
ACTOR_OFFLOAD = define("""time/actor_parking, mean, share: Share of the actors' time spent moving models to
    host memory and back; with --actor.offload. Well below `time/actors_waiting`, within which most of it
    happens. Otherwise the waits are too short to pay: leave --actor.offload out.""")
LEARNER_OFFLOAD = define("""time/learner_parking, sum, s: Time rank 0 spent moving its tensors to host memory
    and back; with --learner.offload. Well below the time that the learner waits. Otherwise leave
    --learner.offload out.""")
UPDATE_SECONDS = define("""time/update, mean, s: Duration of one update without the waiting. Steady. It
    includes batch, passes and optimizer step, not publishing and checkpoints; the first one compiles, with
    --learner.compile.""")
DECISIONS_PER_SECOND = define("""time/decisions_per_second, mean, 1/s: Decisions with a gradient, of all ranks
    and epochs, per second of the update. Steady. Low: raise --algorithm.micro-batch as far as memory allows,
    or use --learner.precision bf16. Decisions without a gradient, such as those of groups of equal returns,
    are not evaluated and do not count.""")
MFU = define("""time/mfu, mean, share: Model FLOPs of those decisions per second, of the GPUs' peak; absent
    where that is unknown. Compare it between settings of one machine. Low: raise --algorithm.micro-batch.
    Passes without gradient (critic, several steps per batch, KL reference) and the recomputation of
    --learner.gradient-checkpointing lower it, as they are not counted; where memory is left,
    --learner.gradient-checkpointing-every 2 saves half of the latter.""")
RESPAWNS = define("""time/respawns, last, processes: Actors and replays that died and were started again,
    since torchrun last started the ranks. 0. Otherwise read the first traceback in the log of the process
    that the console names.""")
PEAK_MEMORY = define("""time/peak_memory, sum, bytes: Peak resident memory of the learner process. Levels off
    after the first checkpoints. It is host memory of rank 0, without its children; steady growth is a
    leak.""")
# --- actors and learner ---

LIVE_SLOTS = define("""actor/live_slots, mean, share: Slots with an episode under way, at each decision of an
    actor. At least 0.95 while `time/actors_waiting` is near 0. Lower: too little credit for so many slots;
    fewer --actor.slots, or a larger --replay.max-lag or --algorithm.groups-per-update.""")
USEFUL_STEPS = define("""actor/useful_steps, mean, share: Imagined steps before their episode's end; a
    decision is imagined whole. Near 1 where episodes have many decisions. Episodes that are dropped later
    count too.""")
ACTOR_MEMORY = define("""actor/peak_memory, max, bytes: Most memory of an actor's tensors on a GPU (on the
    CPU: of its process), the largest of all actors. Levels off within the first episodes. Near the device's
    size: fewer --actor.slots, or --actor.pipeline-stages 2.""")
ACTOR_DECISIONS = define("""actor/decisions, sum, decisions: Decisions imagined by the present actors since
    each of them began. Grows by a batch's decisions for each update. While it grows the learner waits on
    (--batch-timeout), even if no episode is complete.""")
ACTOR_RESTARTED = define("""actor/restarted_episodes, sum, episodes: Episodes that began again from their
    start because the simulator's worker was lost, since the present actors began. 0. Otherwise the actor's
    log names the worker and its exit; signal 9 often means a lack of memory.""")
ACTOR_OFFLOADED = define("""actor/parked_bytes, max, bytes: Device memory that an actor gave back when it last
    reported; with --actor.offload. 0 while the actor imagines; else about the weights of policy, world and
    reward.""")
LEARNER_MEMORY = define("""learner/peak_memory, max, bytes: Most memory of rank 0's tensors on its GPU; absent
    on the CPU. Levels off after the first update. Near the device's size: a smaller --algorithm.micro-batch,
    --learner.gradient-checkpointing, --lora.rank, or more learner ranks.""")
LEARNER_OFFLOADED = define("""learner/parked_bytes, max, bytes: Device memory that rank 0 gave back while it
    waited for this batch; with --learner.offload. About weights, gradient and both moments. 0: the batch was
    there at once.""")

# --- logs and messages ---

LOST_ROWS = define("""log/lost_rows, last, updates: Updates whose row of metrics.jsonl was lost, since the
    learner began. 0. Otherwise the disk took nothing until the memory for rows was full (the console gives
    the time). Free space on the run's disk.""")
LOST_CURVES = define("""log/lost_curves, last, updates: Updates missing in TensorBoard, since the learner
    began. 0. Otherwise as `log/lost_rows`; metrics.jsonl is complete unless that counts too.""")
LOST_TRACKED = define("""log/lost_tracked, last, updates: Updates that a tracker of --log-with did not take,
    of all trackers together, since the learner began. 0. Otherwise the console names the tracker and the
    reason, and logs/tracker-NAME.log has its output. metrics.jsonl is complete.""")
DROPPED_LINES = define("""log/dropped_lines, last, lines: Lines that the console, whose reader left,
    or a log did not take. 0. The run goes on without them. Those of the console are in logs/learner-0.log
    (--inline: logs/inline.log) too.""")
WIRE_BYTES = define("""wire/bytes, last, bytes: Episode bytes received by the replay. Grows steadily; 0 with
    --inline.""")
WIRE_ERRORS = define("""wire/errors, last, messages: Messages refused because they broke the wire format. 0.
    Otherwise another program connects to the replay's port, or processes run different versions.""")
DISCONNECTED = define("""wire/disconnected, last, connections: Connections that the replay or the learner
    ended, since each of them began: too many were there at once. 0. Otherwise another program connects to
    their ports. A surplus actor reconnects by itself.""")
