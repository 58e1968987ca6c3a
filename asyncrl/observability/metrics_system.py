"""Define what a run reports of weights on their way, of time, memory and messages."""

from __future__ import annotations

from asyncrl.observability.metrics import Reduction, define

WEIGHTS_VERSION = define(
    "weights/version",
    Reduction.LAST,
    "versions",
    "Version last published.",
    "Equals the update's number.",
)
WEIGHTS_BYTES = define(
    "weights/bytes",
    Reduction.LAST,
    "bytes",
    "Size of one broadcast.",
    "Constant: what actors need of all that is trained. Large: train adapters (--lora.rank).",
)
WEIGHTS_SECONDS = define(
    "weights/seconds",
    Reduction.LAST,
    "s",
    "Duration of the last broadcast.",
    "Below `time/update`; the learner does not wait for it, but actors act on older weights meanwhile. Near "
    "--weights.timeout: actors drop out; look at --weights.transport.",
)
WEIGHTS_MEMBERS = define(
    "weights/members",
    Reduction.LAST,
    "actors",
    "Actors that took part in the last broadcast, joined ones that hold a version, and other hosts.",
    "The number of actors. Fewer: one is restarting or was left behind (--weights.timeout).",
)
WEIGHTS_HOSTS = define(
    "weights/hosts",
    Reduction.LAST,
    "hosts",
    "Other hosts that took part in the last broadcast; absent with --weights.between-hosts tcp.",
    "The number of other hosts with actors. Fewer: one is lost, cut off or slow (--weights.timeout).",
)
WEIGHTS_HOSTS_SECONDS = define(
    "weights/hosts_seconds",
    Reduction.LAST,
    "s",
    "Duration of the last broadcast between hosts.",
    "Above the time between two updates: other hosts skip versions and their lag grows. Train adapters "
    "(--lora.rank), or raise --replay.max-lag.",
)
WEIGHTS_JOINED = define(
    "weights/joined",
    Reduction.LAST,
    "actors",
    "Actors that joined and hold a version; absent where none can.",
    "The number of actors that joined (`asyncrl actor`); docs/joining.md.",
)
WEIGHTS_PULL_SECONDS = define(
    "weights/pull_seconds",
    Reduction.LAST,
    "s",
    "Time the slowest joined actor needed to fetch its last version.",
    "Above the time between two updates: actors skip versions and their lag grows. A slow network: train "
    "adapters (--lora.rank), or raise --replay.max-lag.",
)
WEIGHTS_PULLED_BYTES = define(
    "weights/pulled_bytes",
    Reduction.LAST,
    "bytes",
    "Bytes of weights that joined actors fetched.",
    "Grows by `weights/bytes` for each version and joined actor.",
)
WRONG_ENTRIES = define(
    "weights/wrong_entries",
    Reduction.LAST,
    "entries",
    "Wrong entries of the weights' private folder that learner and actors skipped, since each of them began.",
    "0. Otherwise something else writes into that folder; each is named in the log of the process that read "
    "it.",
)
GROUPS_PER_MINUTE = define(
    "time/groups_per_minute",
    Reduction.MEAN,
    "1/min",
    "Groups used by the learner per minute.",
    "The pace of the whole run, waiting included. Compare it between --placement choices.",
)
LEARNER_WAITING = define(
    "time/learner_waiting",
    Reduction.MEAN,
    "share",
    "Share of the time the learner waited for episodes.",
    "Low. High: imagining is the bottleneck; add actors (--placement), or raise --actor.slots.",
)
CHECKPOINT_WAITING = define(
    "time/checkpoint_waiting",
    Reduction.SUM,
    "s",
    "Time the learner waited for the checkpoint before to be written.",
    "0. Otherwise a checkpoint takes longer to write than the updates between two: raise --checkpoint-every.",
)
CHECKPOINT_COPYING = define(
    "time/checkpoint_copying",
    Reduction.SUM,
    "s",
    "Time in which the learner copied weights and optimizer to host memory for a checkpoint.",
    "It makes no updates meanwhile. A large share of the time: raise --checkpoint-every.",
)
ACTORS_WAITING = define(
    "time/actors_waiting",
    Reduction.MEAN,
    "share",
    "Share of the time the actors waited for credit.",
    "Low. High: the learner is the bottleneck. Raise --algorithm.micro-batch, add learner ranks "
    "(--placement), or use --learner.precision bf16; a larger --replay.max-lag does not help for long.",
)
LIVE_SLOTS = define(
    "actor/live_slots",
    Reduction.MEAN,
    "share",
    "Slots with an episode under way, at each decision of an actor.",
    "At least 0.95 while `time/actors_waiting` is near 0. Lower: too little credit for so many slots: "
    "fewer --actor.slots, or a larger --replay.max-lag or --algorithm.groups-per-update.",
)
USEFUL_STEPS = define(
    "actor/useful_steps",
    Reduction.MEAN,
    "share",
    "Imagined steps that lie before their episode's end; a decision is imagined whole.",
    "Near 1 where episodes have many decisions. It says nothing of episodes that are dropped later. With "
    "--guard.kind second lower by what is imagined again, of which nothing is learned.",
)
ACTOR_POLICY, ACTOR_WORLD, ACTOR_REWARD = (
    define(
        f"time/actor_{model}",
        Reduction.MEAN,
        "share",
        f"Share of the actors' time in which their device was busy with {what}.",
        advice,
    )
    for model, what, advice in (
        (
            "policy",
            "the policy",
            "With world and reward near 1 on one device: the GPU is always busy. The larger of two devices' "
            "shares is the bottleneck (--placement policy=, world=).",
        ),
        (
            "world",
            "the world model",
            "Usually the largest. Far below 1 together with policy and reward although the actors do not "
            "wait: the host is the bottleneck, use --actor.pipeline-stages 2 or more --actor.slots.",
        ),
        ("reward", "the reward model", "Small beside the world's."),
    )
)
ACTOR_SIMULATORS = define(
    "time/actor_simulators",
    Reduction.MEAN,
    "share",
    "Share of the actors' time in which they waited for simulators to answer; with a simulator as --world.",
    "Near 1: simulators are the bottleneck, use more --simulator.workers, or --actor.pipeline-stages 2. Near "
    "0: the policy is.",
)
ACTOR_HOST = define(
    "time/actor_host",
    Reduction.MEAN,
    "share",
    "Share of the actors' time in which their thread worked: refilled, launched, recorded, handed over. On a "
    "GPU a launch also waits while CUDA's queue is full, which counts here.",
    "Hidden behind the devices with --actor.pipeline-stages 2; with 1 it adds to their time. On the CPU the "
    "models' own time is not in it.",
)
ACTOR_OFFLOAD = define(
    "time/actor_parking",
    Reduction.MEAN,
    "share",
    "Share of the actors' time spent moving models to host memory and back; with --actor.offload.",
    "Well below `time/actors_waiting`, within which most of it happens. Otherwise the waits are too short to "
    "pay: leave --actor.offload out.",
)
LEARNER_OFFLOAD = define(
    "time/learner_parking",
    Reduction.SUM,
    "s",
    "Time rank 0 spent moving its tensors to host memory and back; with --learner.offload.",
    "Well below the time that the learner waits. Otherwise leave --learner.offload out.",
)
UPDATE_SECONDS = define(
    "time/update",
    Reduction.MEAN,
    "s",
    "Duration of one update without the waiting.",
    "Steady. It is the compute of an update (batch, passes, optimizer step), without publishing and "
    "checkpoints.",
)
COMPILE_SECONDS = define(
    "time/learner_compile",
    Reduction.SUM,
    "s",
    "Time rank 0 compiled before its first batch; with --learner.compile, in the first row only.",
    "Below the time that the actors take for that batch: nobody waits for it then. With a filled compiler "
    "cache it is a fraction of what it is with an empty one.",
)
DECISIONS_PER_SECOND = define(
    "time/decisions_per_second",
    Reduction.MEAN,
    "1/s",
    "Decisions with a gradient, of all ranks and epochs, per second of the update.",
    "Steady. Low: raise --algorithm.micro-batch as far as memory allows, or use --learner.precision bf16. "
    "Decisions that can have no gradient, such as those of groups that scored all the same, are not "
    "evaluated and do not count.",
)
MFU = define(
    "time/mfu",
    Reduction.MEAN,
    "share",
    "Model FLOPs of those decisions per second, of the GPUs' peak; absent where that is not known.",
    "Compare it between settings of one machine. Low: passes are too small, raise --algorithm.micro-batch. "
    "Passes without gradient (critic, several steps per batch, KL reference) and the recomputation of "
    "--learner.gradient-checkpointing are not counted, so both lower it; where memory is left, "
    "--learner.gradient-checkpointing-every 2 saves half of the latter.",
)
RESPAWNS = define(
    "time/respawns",
    Reduction.LAST,
    "processes",
    "Actors and replays that died and were started again, since torchrun last started the ranks.",
    "0. Otherwise read the first traceback in the log of the process that the console names.",
)
PEAK_MEMORY = define(
    "time/peak_memory",
    Reduction.SUM,
    "bytes",
    "Peak resident memory of the learner process.",
    "Levels off after the first checkpoints. It is host memory, of rank 0 and without its children; steady "
    "growth is a leak.",
)
PACE_COLLECT_SECONDS = define(
    "time/pace_collect",
    Reduction.LAST,
    "s",
    "Time the round's true episodes took.",
    "Nobody waits for it. Long: --pace.workers.",
)
PACE_FIT_SECONDS = define(
    "time/pace_fit",
    Reduction.LAST,
    "s",
    "Time the round's refits and audits took.",
    "Nobody waits for it. Longer than --pace.every updates: rounds are skipped, the newest version counts.",
)
ACTOR_MEMORY = define(
    "actor/peak_memory",
    Reduction.MAX,
    "bytes",
    "Most memory that an actor's tensors took on a GPU (on the CPU: its process), the largest of all actors.",
    "Levels off within the first episodes. Near the device's size: fewer --actor.slots, "
    "--actor.pipeline-stages 2, or policy and world on two devices (--placement).",
)
ACTOR_DECISIONS = define(
    "actor/decisions",
    Reduction.SUM,
    "decisions",
    "Decisions that the actors which are there have imagined since each of them began, repetitions included.",
    "Grows by a batch's decisions for each update, and with --guard.kind second by about those of its "
    "successes once more. While it grows the learner goes on waiting (--batch-timeout), although no episode "
    "is complete yet.",
)
ACTOR_RESTARTED = define(
    "actor/restarted_episodes",
    Reduction.SUM,
    "episodes",
    "Episodes that began again from their start because the simulator's worker was lost, since the actors "
    "which are there began.",
    "0. Otherwise the actor's log names the worker and how it died; signal 9 often means a lack of memory.",
)
ACTOR_OFFLOADED = define(
    "actor/parked_bytes",
    Reduction.MAX,
    "bytes",
    "Device memory that an actor gave back when it last reported; with --actor.offload.",
    "0 while the actor imagines; else about the weights of policy, world and reward.",
)
LEARNER_MEMORY = define(
    "learner/peak_memory",
    Reduction.MAX,
    "bytes",
    "Most memory that rank 0's tensors took on its GPU; absent on the CPU.",
    "Levels off after the first update. Near the device's size: a smaller --algorithm.micro-batch, "
    "--learner.gradient-checkpointing, --lora.rank, or more learner ranks.",
)
LEARNER_OFFLOADED = define(
    "learner/parked_bytes",
    Reduction.MAX,
    "bytes",
    "Device memory that rank 0 gave back while it waited for this batch; with --learner.offload.",
    "About weights, gradient and both moments. 0: the batch was there at once.",
)
LOST_ROWS = define(
    "log/lost_rows",
    Reduction.LAST,
    "updates",
    "Updates whose row of metrics.jsonl was lost, since the learner began.",
    "0. Otherwise the disk took nothing for so long that the memory for rows was full; the console said when "
    "it began. Free space on the run's disk.",
)
LOST_CURVES = define(
    "log/lost_curves",
    Reduction.LAST,
    "updates",
    "Updates whose numbers are missing in TensorBoard, since the learner began.",
    "0. Otherwise as `log/lost_rows`; what is in metrics.jsonl is complete unless that counts too.",
)
LOST_TRACKED = define(
    "log/lost_tracked",
    Reduction.LAST,
    "updates",
    "Updates that a tracker of --log-with did not take, of all trackers together, since the learner began.",
    "0. Otherwise the console said which tracker and why, and logs/tracker-NAME.log has all it printed. What "
    "is in metrics.jsonl is complete.",
)
DROPPED_LINES = define(
    "log/dropped_lines",
    Reduction.LAST,
    "lines",
    "Lines that neither the console took, because nobody reads it any more, nor the run's logs/console.log.",
    "0. The run goes on without them; `asyncrl status` shows what it does.",
)
WIRE_BYTES = define(
    "wire/bytes",
    Reduction.LAST,
    "bytes",
    "Episode bytes received by the replay.",
    "Grows steadily; 0 with --inline.",
)
WIRE_ERRORS = define(
    "wire/errors",
    Reduction.LAST,
    "messages",
    "Messages refused because they broke the wire format.",
    "0. Otherwise something else talks to the replay's port, or processes run different versions.",
)
DISCONNECTED = define(
    "wire/disconnected",
    Reduction.LAST,
    "connections",
    "Connections that the replay or the learner ended: too much of an unfinished message, or too many "
    "connections at once. Since each of them began.",
    "0. Otherwise something else talks to their ports; the replay's log names its address. An actor that is "
    "too many by mistake comes back by itself.",
)
