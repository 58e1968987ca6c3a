"""Settings of all sections but those in `algorithm`; field docstrings are the `--help` text. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.bounds import SECONDS, THREADS, AtLeast, Bounded, Positive, Within
from asyncrl.errors import ConfigError
from asyncrl.observability.monitor_address import parse_address

SuccessFrames = int | Literal["last"]
"""See `ActorSettings.success_frames`."""


@dataclass(frozen=True, kw_only=True)
class ActorSettings(Bounded, section="actor."):
    """How an actor makes episodes."""

    slots: Annotated[int, AtLeast(1, "an actor imagines at least one episode.", "Use 16.", highest=4096)] = 16
    """Episodes imagined at the same time by one actor."""
    pipeline_stages: Literal[1, 2] = 1
    """2: the slots decide in two halves in turns, so that the host works on one half while the GPU works on
    the other, and policy and world on two GPUs work at the same time (RLinf: pipeline_stage_num)."""
    offload: bool = False
    """Keep policy, world and reward model in pinned host memory while there is nothing to imagine. Without
    effect under --inline."""
    max_decisions: Annotated[
        int, AtLeast(0, "an episode has a decision.", "Use 6, or 0 for what the world says.", highest=10_000)
    ] = 0
    """An episode is cut after this many decisions (of 8 steps each). 0: what the world says; 32 in a
    published folder, in a simulator what its horizon has room for, else 6."""
    success_threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.", open_below=True)] = (
        0.7
    )
    """The reward model's probability from which a step counts as success."""
    success_frames: SuccessFrames = 1
    """Which frames at --actor.success-threshold or above make a success. A number k: the first k in a row; 1:
    the first of all. last: the last frame of a decision, so that what was gone again at its end does not
    count. docs/worlds.md says what each rule gets wrong."""
    threads: Annotated[
        int, AtLeast(0, "it counts threads.", "Use 0 to let asyncrl choose.", highest=THREADS)
    ] = 0
    """CPU threads of an actor process. 0: two where every actor has two cores, else one."""
    max_respawns: int = 5
    """An actor that dies comes back this often; one death more ends the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.success_frames != "last":
            AtLeast(1, "it counts scoring frames in a row.", "Use 1, or the word last.").check(
                "actor.success-frames", self.success_frames
            )
        AtLeast(self.pipeline_stages, "each of --actor.pipeline-stages needs one.", "Use 16.").check(
            "actor.slots", self.slots
        )


ReplaySampler = Literal["oldest", "newest", "uniform", "prioritized"]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Bounded, section="replay."):
    """The HDF5 replay between the actors and the learner."""

    max_lag: Annotated[
        int, AtLeast(0, "a lag cannot be negative.", "Use 2, or --synchronous for 0.", highest=100_000)
    ] = 2
    """No decision older than this many policy versions is trained on; checked at admission and sampling."""
    group_timeout: Annotated[
        float, AtLeast(1, "imagining a group takes time.", "Use 300.", highest=SECONDS)
    ] = 300.0
    """Seconds without a decision of its actor until an incomplete group is given up and counted."""
    heartbeat_timeout: Annotated[
        float, AtLeast(3, "actors say every second that they are there.", "Use 30.", highest=SECONDS)
    ] = 30.0
    """Seconds without any sign of life after which an actor's open groups are given up."""
    keep_video_every: Annotated[int, AtLeast(0, "it counts groups.", "Use 0 for never.")] = 16
    """Keep every imagined frame of each n-th group, for movies and for data sets with one sample per step
    (`asyncrl replay export`); 0 = never."""
    max_gigabytes: Annotated[float, AtLeast(0.01, "the run must fit.", "Use 8.")] = 8.0
    """Oldest groups that were already used are deleted beyond this size."""
    read_ahead_gigabytes: Annotated[float, AtLeast(0, "memory cannot be negative.", "Use 8.")] = 8.0
    """Memory of the replay for complete groups that it reads before the learner asks for them. What does not
    fit is checked, and read again when a learner rank fetches it. Without effect under --inline."""
    listen: str = ""
    """Address the replay listens on, like tcp://10.0.0.5:5555; beyond loopback it needs --replay.keys. Empty:
    a private socket on this host. Without effect under --inline."""
    keys: str = ""
    """Folder of key files from `asyncrl keys`: traffic is encrypted, and only listed clients are admitted."""
    compact_at_end: bool = False
    """When the run has made all its updates, compress the pictures of groups that are no longer needed, as
    `asyncrl replay compact` does."""
    max_age_versions: Annotated[int, AtLeast(0, "it counts versions.", "Use 0 for never.")] = 0
    """Groups that were already used are deleted when their newest decision is older than this. 0: never."""
    quarantine_after: Annotated[int, AtLeast(1, "it counts failures.", "Use 2.")] = 2
    """A start state is not used any more after this many groups of it could not be imagined: something was
    not finite, or raised an error."""
    max_reuse: Annotated[int, AtLeast(1, "a group is used at least once.", "Use 1.")] = 1
    """A group is trained on in up to this many updates, as long as the lag bound lets it."""
    sampler: ReplaySampler = "oldest"
    """Which groups an update gets. prioritized: by chance, in proportion to the spread of their returns,
    which changes what is maximised (docs/staleness.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys and not self.listen:
            raise ConfigError(
                f"--replay.keys is {self.keys}, but the replay's private socket takes no keys. "
                "Set --replay.listen tcp://ADDRESS:PORT too, or leave the keys out."
            )


Precision = Literal["stored", "bf16", "float8"]
"""See `ImaginationSettings.precision`."""


@dataclass(frozen=True, kw_only=True)
class WorldDefaults:
    """What a world says about a run where its user said nothing."""

    source: str
    """What the run's banner calls them."""
    context: Literal["frames", "latents"] = "latents"
    """For --imagination.context auto."""
    steps: int = 0
    """For --imagination.steps 0; 0: the world does not count network calls."""
    max_decisions: int = 6
    """For --actor.max-decisions 0."""
    temperature: float = 0.0
    """At which those who published the world sampled the policy, for the banner only: how far a policy must
    be flattened depends on the policy and the algorithm. 0: nothing is known."""
    simulated: bool = False
    """Whether it is a simulator, for which only `max_decisions` means something."""


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings(Bounded, section="imagination."):
    """What the world model computes, and how fast. docs/approximations.md says what each choice costs."""

    context: Literal["auto", "frames", "latents"] = "auto"
    """What the next decision begins with. frames: the last four frames as uint8 pixels, encoded again, and
    the decoder starts anew behind the first frame, as published. latents: the last latent, and the decoder
    goes on from where it stopped. auto: what the world says; frames in a published folder, else latents."""
    decoder: Literal["full", "tiny"] = "full"
    """Which decoder draws the frames. tiny: one distilled from the full one by `asyncrl fit decoder`."""
    steps: Annotated[
        int, AtLeast(0, "it counts network calls.", "Use 0 for the folder's.", highest=10_000)
    ] = 0
    """Network calls per decision; 0 = as many as the world's folder says (published: 5)."""
    precision: Precision = "stored"
    """What the world computes in. stored: a published world in bfloat16, one that asyncrl fitted in float32.
    bf16: every world in bfloat16, which takes half of the memory and on a GPU a fraction of the time. float8:
    as stored, but the denoiser's linear layers multiply numbers of 8 bits, for GPUs from H100 on: half of the
    memory; with compile Wan draws 1.1 times as many frames, 1.3 times with the tiny decoder."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""
    fixed_shape: bool = False
    """Give every pass as many rows as it can have: what is free is filled up with copies. An episode then has
    the same bits whatever is imagined beside it; a pass always costs as much as with all --actor.slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context == "frames" and self.decoder == "tiny":
            raise ConfigError(
                "--imagination.context is frames and --imagination.decoder is tiny: frames are the exact "
                "path, and a distilled decoder is not exact. Use --imagination.context latents, or the full "
                "decoder."
            )


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings(Bounded, section="simulator."):
    """The simulator that --world names."""

    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 0 for the actor's own.", highest=THREADS)
    ] = 0
    """Processes of each actor that simulate; --actor.slots are shared out to them. 0: the actor's own process
    does, and the policy waits meanwhile. LIBERO can have one slot in each."""
    starts: Literal["random", "stored", "evaluation"] = "random"
    """Where episodes begin. random: at starts that are drawn below the seeds of evaluations. stored: at those
    stored starts that no evaluation plays, from the 50th of each task on. evaluation: at all stored starts,
    also those that `asyncrl evaluate` plays, so that its numbers say nothing of new ones."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0 for the simulator's.", highest=100_000)] = 0
    """Steps until an episode is truncated; 0: the simulator's own."""
    image_size: Annotated[
        int, AtLeast(0, "it counts pixels.", "Use 0 for the simulator's.", highest=4096)
    ] = 0
    """Height and width of the pictures in pixels; 0: the simulator's own, where it has none the policy's."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Bounded, section="evaluation."):
    """How --evaluate-every measures the true success of the run's policy, in a process that nobody waits for.

    With the run's own temperature and top-k, from starts that nothing is trained on, the same ones each time.
    """

    episodes: Annotated[int, AtLeast(1, "it counts episodes.", "Use 64.", highest=100_000)] = 64
    """Episodes that are played of each version. More make the interval narrower, and take longer."""
    simulator: str = ""
    """Simulator to play in; empty: the run's own, the one whose tasks the start states are of. Or
    package.module:make."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 1, or 0 for none of its own.", highest=THREADS)
    ] = 1
    """Processes that simulate. LIBERO has one episode in each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy plays, and world and reward model draw; auto: on the learner's device, beside it."""
    movies: Annotated[int, AtLeast(0, "it counts episodes.", "Use 6, or 0 for none.", highest=64)] = 6
    """Episodes of each version that are drawn into RUN/videos: the truth beside what the run's world model
    imagines of the same actions, and both verdicts."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Bounded, section="guard."):
    """Which imagined successes count, since some of them are false."""

    kind: Literal["none", "lasting"] = "none"
    """none: a reward of 1 at the first frame whose score reaches --actor.success-threshold. lasting: only
    where the last frame of a decision reaches it, as --actor.success-frames last: a success that is gone
    again at the end of its decision does not count."""


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Bounded, section="monitor."):
    """What others can read of a run over the network."""

    listen: str = ""
    """HOST:PORT, or PORT for this host only, where the learner answers Prometheus (/metrics) and says whether
    the run makes progress (/healthz). Empty: nowhere. There is no key: docs/cluster.md says what can be
    read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            parse_address(self.listen)


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Bounded, section="weights."):
    """How new weights reach the actors."""

    transport: str = "auto"
    """Carrier of the weights. auto: nccl when every actor has a GPU of its own, cuda_ipc when some are on the
    first learner's GPU, else shared_memory. Or package.module:Class."""
    between_hosts: Literal["tcp", "nccl"] = "tcp"
    """How weights travel to the other hosts of a run, once to each. tcp: encrypted, fetched in pieces. nccl:
    broadcast together with those of the first host, NOT encrypted: only on a private network. It takes one
    GPU of each host. Actors that join always fetch by tcp."""
    timeout: Annotated[float, AtLeast(1, "a broadcast takes time.", "Use 60.", highest=SECONDS)] = 60.0
    """Seconds after which an actor that does not take part in a broadcast is left behind, and one that joined
    and cannot reach the learner ends."""
    listen: str = ""
    """Address where actors on other hosts fetch the weights, like tcp://10.0.0.5:5556. Empty: the address of
    --replay.listen with a port that the system chooses. It takes the same --replay.keys."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Bounded, section="optimizer."):
    """AdamW and its learning rate."""

    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-4.")] = 1e-4
    """AdamW learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rates fall after the warm-up."""
    warmup_updates: Annotated[int, AtLeast(0, "it counts updates.", "Use 0.")] = 0
    """Updates in which the learning rates rise linearly to their full size."""
    decay_updates: Annotated[int, AtLeast(0, "it counts updates.", "Use 0.")] = 0
    """linear, cosine: update at which the end is reached; 0 = --updates of the run when it began. The number
    is kept with the run: a resume with more --updates makes the others at the final rate."""
    final_lr_share: Annotated[float, Within(0, 1, "it is a share.", "Use 0.")] = 0.0
    """linear, cosine: the learning rate at the end, as a share of the full one."""
    weight_decay: Annotated[float, AtLeast(0, "negative, it would make weights grow.", "Use 0.")] = 0.0
    """AdamW weight decay."""
    beta1: Annotated[float, Within(0, 1, "it must lie in 0..1, below 1.", "Use 0.9.", open_above=True)] = 0.9
    """AdamW decay rate of the first moment."""
    beta2: Annotated[float, Within(0, 1, "it must lie in 0..1, below 1.", "Use 0.95.", open_above=True)] = (
        0.95
    )
    """AdamW decay rate of the second moment."""
    eps: Annotated[float, Positive("it keeps a division from 0.", "Use 1e-8.")] = 1e-8
    """AdamW epsilon."""
    max_grad_norm: Annotated[float, Positive("0 trains nothing, less is gradient ascent.", "Use 1.")] = 1.0
    """Largest gradient norm; larger gradients are scaled down."""
    max_bad_updates: Annotated[int, AtLeast(1, "it counts updates.", "Use 3.")] = 3
    """Stop the run after this many steps in a row whose gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Bounded, section="lora."):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    rank: Annotated[
        int, AtLeast(0, "it counts directions.", "Use 32, or 0 for no adapters.", highest=4096)
    ] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, AtLeast(0, "it is a scale.", "Use 0 for the rank.")] = 0.0
    """The adapters' output is scaled by alpha / rank; 0 = rank."""
    targets: Literal["language", "all"] = "all"
    """all: every linear layer of vision, projector and language model. language: the language model's."""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(Bounded, section="learner."):
    """How the learner computes."""

    threads: Annotated[int, AtLeast(1, "a process needs a thread.", "Use 1.", highest=THREADS)] = 1
    """CPU threads of a learner process."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward passes in bfloat16; weights, log-probs and optimizer stay float32."""
    frozen_precision: Literal["stored", "float8"] = "stored"
    """With --lora.rank and bf16: what frozen linear layers below adapters multiply in the learner's passes.
    stored: numbers as the policy is loaded with. float8: rounded to 8 bits, forward and for the gradient of
    what goes in; 2 more bytes for each of their weights, and a GPU from H100 on. Nothing that is published or
    saved is rounded. With --learner.compile passes are 1.4 times as fast, without it slower."""
    compile: bool = False
    """Compile the layers: about a minute at the start; then passes are 1.6 times as fast on a GPU. All are of
    one size then: micro-batches are filled up, and prompts padded to the longest instruction."""
    compile_early: bool = True
    """With --learner.compile: compile while the actors imagine the first batch, not in the first update. Not
    done with --inline, where nobody imagines meanwhile, nor with --learner.offload, which leaves the device
    to the actors then."""
    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass: less memory, a third more time."""
    gradient_checkpointing_every: Annotated[
        int, AtLeast(1, "it counts layers.", "Use 1 for all layers.", highest=1024)
    ] = 1
    """With --learner.gradient-checkpointing: one of so many layers does so, the others keep what they need.
    1: all of them. 2: half of the extra time, for half of the memory that is saved. OpenVLA-OFT with adapters
    and 32 decisions per pass takes 22 GiB, with 4 it takes 63 and is 1.28 times as fast; where nothing is
    computed again, 48 per pass take 105 GiB."""
    offload: bool = False
    """Keep weights, gradient and optimizer state in pinned host memory while the learner waits."""
    shard: Literal["all", "host"] = "all"
    """What learner ranks spread weights, gradient and optimizer state over: all of them, or those of their
    host, so that every host has all of it: more memory, and only gradients travel between hosts."""
    reshard_after: Literal["pass", "step"] = "pass"
    """When learner ranks that train all weights free those that they gathered from each other: after each
    pass of a layer, or after the passes of an optimizer step, which takes 2 bytes more for each weight in
    bfloat16 and is 1.07 to 1.10 times as fast. Adapters stay for a step in any case."""

    @property
    def recomputed(self) -> float:
        """Share of the layers that compute their activations again."""
        return self.gradient_checkpointing / self.gradient_checkpointing_every

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_checkpointing_every > 1 and not self.gradient_checkpointing:
            raise ConfigError(
                f"--learner.gradient-checkpointing-every is {self.gradient_checkpointing_every}, but without "
                "--learner.gradient-checkpointing no layer computes anything again. Add it, or leave it at 1."
            )
        if self.frozen_precision == "float8" and self.precision == "fp32":
            raise ConfigError(
                "--learner.frozen-precision is float8, but --learner.precision is fp32, and products of "
                "8-bit numbers are bfloat16. Use --learner.precision bf16, or --learner.frozen-precision "
                "stored."
            )
