"""Settings of all sections but those in `algorithm`; field docstrings are the `--help` text. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.bounds import SECONDS, THREADS, AtLeast, Bounded, Positive, Within
from asyncrl.errors import ConfigError

SuccessFrames = int | Literal["last"]  # See `ActorSettings.success_frames`


@dataclass(frozen=True, kw_only=True)
class ActorSettings(Bounded, section="actor."):
    """Settings of an actor."""

    slots: Annotated[int, AtLeast(1, "an actor imagines at least one episode.", "Use 16.", highest=4096)] = 16
    """Episodes of an actor at the same time."""
    pipeline_stages: Literal[1, 2] = 1
    """2: two halves of the slots decide alternately, so that host and GPU work at the same time (RLinf:
    pipeline_stage_num)."""
    offload: bool = False
    """Keep the models in pinned host memory while there is nothing to imagine. No effect with --inline."""
    max_decisions: Annotated[
        int, AtLeast(0, "an episode has a decision.", "Use 6, or 0 for the world's own.", highest=10_000)
    ] = 0
    """Longest episode in decisions of 8 steps. 0: the world's own; 32 for a published folder, a simulator's
    horizon, else 6."""
    success_threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.", open_below=True)] = (
        0.7
    )
    """The reward model's probability from which a step counts as success."""
    success_frames: SuccessFrames = 1
    """Frames at --actor.success-threshold or above that make a success. A number k: the first k in a row.
    last: the last frame of a decision, so that a success must last until its end (docs/worlds.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.success_frames != "last":
            AtLeast(1, "it counts scoring frames in a row.", "Use 1, or the word last.").check(
                "actor.success-frames", self.success_frames
            )
        AtLeast(self.pipeline_stages, "each of --actor.pipeline-stages needs one.", "Use 16.").check(
            "actor.slots", self.slots
        )


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Bounded, section="replay."):
    """The HDF5 replay between the actors and the learner."""

    max_lag: Annotated[
        int, AtLeast(0, "a lag cannot be negative.", "Use 2, or 0 for actors that wait.", highest=100_000)
    ] = 2
    """Largest lag of a decision in a batch; checked at admission and sampling. 0: the actors
    wait for every update."""
    group_timeout: Annotated[
        float, AtLeast(1, "imagining a group takes time.", "Use 300.", highest=SECONDS)
    ] = 300.0
    """Seconds without a decision of its actor until an incomplete group is given up and counted."""
    keep_video_every: Annotated[int, AtLeast(0, "it counts groups.", "Use 0 for never.")] = 16
    """Keep all frames of each n-th group, for movies and `asyncrl replay export` with one sample per step; 0
    = never."""
    max_gigabytes: Annotated[float, AtLeast(0.01, "the run must fit.", "Use 8.")] = 8.0
    """Oldest groups that were already used are deleted beyond this size."""
    listen: str = ""
    """Address of the replay, like tcp://10.0.0.5:5555; beyond loopback it needs --replay.keys. Empty: a
    private socket on this host. No effect with --inline."""
    keys: str = ""
    """Folder of key files from `asyncrl keys`: traffic is encrypted, and only listed clients are admitted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys and not self.listen:
            raise ConfigError(
                f"--replay.keys is {self.keys}, but the replay's private socket takes no keys. "
                "Set --replay.listen tcp://ADDRESS:PORT too, or leave the keys out."
            )


Precision = Literal["stored", "bf16", "float8"]  # See `ImaginationSettings.precision`


@dataclass(frozen=True, kw_only=True)
class WorldDefaults:
    """Defaults that a world sets for a run."""

    source: str  # Name in the run's banner
    context: Literal["frames", "latents"] = "latents"  # For --imagination.context auto
    steps: int = 0  # For --imagination.steps 0; 0: the world does not count network calls
    max_decisions: int = 6  # For --actor.max-decisions 0
    temperature: float = 0.0  # Of sampling, by the world's publishers; for the banner only; 0: unknown
    simulated: bool = False  # True for a simulator, for which only `max_decisions` applies


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings(Bounded, section="imagination."):
    """Computation of the world model; docs/approximations.md has the cost of each choice."""

    context: Literal["auto", "frames", "latents"] = "auto"
    """Start of the next decision. frames: the last four frames as uint8, encoded again, and a new decoder
    state, as published. latents: the last latent and decoder state. auto: frames for a published folder, else
    latents."""
    decoder: Literal["full", "tiny"] = "full"
    """Decoder of the frames. tiny: distilled from the full one by `asyncrl fit decoder`."""
    steps: Annotated[
        int, AtLeast(0, "it counts network calls.", "Use 0 for the folder's.", highest=10_000)
    ] = 0
    """Network calls per decision; 0 = the world's own (published: 5)."""
    precision: Precision = "stored"
    """Numbers of the world. stored: bfloat16 if published, float32 if fitted by asyncrl. bf16: bfloat16, with
    half of the memory. float8: as stored, but the denoiser's linear layers multiply 8 bits (from H100 on):
    half of the memory; with compile Wan draws 1.1 times as many frames, 1.3 times with the tiny decoder."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""
    fixed_shape: bool = False
    """Fill every pass up to --actor.slots with copies, so that an episode has the same bits in any batch."""

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
    """Simulator processes of each actor, which share its --actor.slots, and of --evaluate-every (there at
    least 1); LIBERO has one slot in each. 0: the actor's own process simulates, while the policy waits."""
    starts: Literal["random", "evaluation"] = "random"
    """Starts of episodes. random: drawn from seeds below the evaluations'. evaluation: stored starts, so that
    `asyncrl evaluate` measures nothing new."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0 for the simulator's.", highest=100_000)] = 0
    """Steps until an episode is truncated; 0: the simulator's own."""
    image_size: Annotated[
        int, AtLeast(0, "it counts pixels.", "Use 0 for the simulator's.", highest=4096)
    ] = 0
    """Height and width of the pictures in pixels; 0: the simulator's own, else the policy's."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Bounded, section="evaluation."):
    """True success for --evaluate-every, with the run's sampling, from separate starts."""

    episodes: Annotated[int, AtLeast(1, "it counts episodes.", "Use 64.", highest=100_000)] = 64
    """Episodes per version. More make the interval narrower, and take longer."""
    simulator: str = ""
    """Simulator, or package.module:make; empty: the run's own, or the one of the start states' tasks."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Bounded, section="guard."):
    """Rule against imagined successes that are false."""

    kind: Literal["none", "lasting"] = "none"
    """none: reward 1 at the first frame that reaches --actor.success-threshold. lasting: only if the last
    frame of a decision reaches it, as --actor.success-frames last."""


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Bounded, section="monitor."):
    """Monitor of a run over the network."""

    listen: str = ""
    """HOST:PORT, or PORT for this host only, of /metrics for Prometheus and /healthz for progress, without a
    key (docs/cluster.md). Empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            from asyncrl.observability.monitor import parse_address  # It imports an HTTP server.

            parse_address(self.listen)


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Bounded, section="weights."):
    """Transfer of new weights to the actors."""

    transport: str = "auto"
    """Carrier of the weights. auto: nccl if every actor has a GPU of its own, cuda_ipc if some share the
    first learner's, else shared_memory. Or package.module:Class."""
    between_hosts: Literal["tcp", "nccl"] = "tcp"
    """Carrier to the other hosts, once to each. tcp: encrypted, fetched in pieces; always for actors that
    join. nccl: broadcast with the first host's, NOT encrypted: only on a private network. It takes a GPU per
    host."""
    timeout: Annotated[float, AtLeast(1, "a broadcast takes time.", "Use 60.", highest=SECONDS)] = 60.0
    """Seconds until a broadcast drops a slow actor, and until a joined actor ends without the learner."""
    listen: str = ""
    """Address of the weights for actors on other hosts, like tcp://10.0.0.5:5556, with --replay.keys. Empty:
    --replay.listen's host with a free port."""


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
    """linear, cosine: update at which the end is reached; 0 = --updates when the run began, also after a
    resume with more --updates."""
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
    """Settings of the learner."""

    threads: Annotated[int, AtLeast(1, "a process needs a thread.", "Use 1.", highest=THREADS)] = 1
    """CPU threads of a learner process."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Numbers of the learner's passes. bf16: bfloat16, forward and backward; weights, log-probs and optimizer
    stay float32."""
    compile: bool = False
    """Compile the layers: about a minute in the first update (longer for a policy without `fix_prompts`),
    then passes of one padded size, 1.6 times as fast on a GPU."""
    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass: less memory, a third more time."""
    gradient_checkpointing_every: Annotated[
        int, AtLeast(1, "it counts layers.", "Use 1 for all layers.", highest=1024)
    ] = 1
    """With --learner.gradient-checkpointing: one in this many layers does so; 2: half of the time and of the
    saving. OpenVLA-OFT with adapters and 32 decisions per pass takes 22 GiB; with 4, 63 GiB and is 1.28 times
    as fast."""
    offload: bool = False
    """Keep weights, gradient and optimizer state in pinned host memory while the learner waits."""
    shard: Literal["all", "host"] = "all"
    """Ranks that share weights, gradient and optimizer state: all, or those of a host, which takes more
    memory, but only gradients travel between hosts."""
    reshard_after: Literal["pass", "step"] = "pass"
    """When gathered weights are freed, if all are trained: after each pass of a layer, or after an optimizer
    step, which takes 2 bytes more per bfloat16 weight and is 1.07 to 1.10 times as fast."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_checkpointing_every > 1 and not self.gradient_checkpointing:
            raise ConfigError(
                f"--learner.gradient-checkpointing-every is {self.gradient_checkpointing_every}, but without "
                "--learner.gradient-checkpointing no layer computes anything again. Add it, or leave it at 1."
            )
