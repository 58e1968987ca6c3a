"""Flags of `asyncrl fit`, and of reading data sets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from asyncrl.config.bounds import PIXELS, SEEDS, AtLeast, Bounded, Within
from asyncrl.config.sections import LoraSettings
from asyncrl.errors import ConfigError

Size = Literal["tiny", "small"]
Kind = Literal["wan", "opensora", "evac"]
CONTEXT_SIGMA: Final = 0.1
NONE: Final = "none"  # As a key: not read, although the data set has it
_MOST_EXAMPLES: Final = 65_536
Steps = Annotated[int, AtLeast(1, "it counts steps.", "Leave it out for the default.")]
Examples = Annotated[
    int, AtLeast(1, "a step needs an example.", "Leave it out for the default.", highest=_MOST_EXAMPLES)
]
LearningRate = Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 1e-3.")]
Count = Annotated[int, AtLeast(1, "it counts from 1.", "Leave it out for the default.", highest=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class DataSetSettings(Bounded, section="dataset."):
    """Reading of LeRobot v3 folders and robomimic files. Recordings of our own need none of this."""

    cameras: tuple[str, ...] = ()
    """Keys of the cameras; models see the first. Empty: the first one that is not at a wrist."""
    action: str = ""
    """Key of the actions; empty: 'action' (LeRobot), 'actions' (robomimic)."""
    state: tuple[str, ...] = ()
    """Keys of the robot's state, joined in this order. Empty: observation.state (LeRobot); position, rotation
    and gripper of robot0 (robomimic), if present. 'none': no state."""
    success: str = ""
    """Key that is above 0.5 where the task is solved; empty: 'next.success' (LeRobot), the attribute
    'success' of a demonstration or rewards of 0 and 1 (robomimic). 'none': nothing is solved."""
    solved: Literal["key", "end"] = "key"
    """end: every episode is solved in its last picture, whatever its keys: for demonstrations."""
    task: str = ""
    """Instruction of all episodes, instead of the data set's."""
    simulator: str = ""
    """Simulator's name in the recordings; empty: the robot (LeRobot), the environment (robomimic)."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 128.", highest=PIXELS)] = 0
    """Height and width that pictures are resized to; 0: as they are stored."""
    aspect: Literal["stretch", "crop", "pad"] = "stretch"
    """For pictures that are not square: squeeze, cut to the middle, or add black bars."""
    flip: Literal["none", "vertical", "both"] = "none"
    """Lines stored from the bottom up: vertical. Both axes reversed: both."""
    stride: Annotated[int, AtLeast(1, "steps are counted from 1.", "Use 1.", highest=1000)] = 1
    """Keep one in this many steps: 3 turns 30 steps per second into 10."""
    between: Literal["last", "sum"] = "last"
    """With a stride, the action of a step. last: the last of those it replaces, for target positions. sum:
    their sum, except of the last number, the gripper's: for motions."""
    episodes: Annotated[int, AtLeast(0, "episodes are counted.", "Use 0.")] = 0
    """Use only the first episodes of each data set, this many; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.between == "sum" and self.stride == 1:
            raise ConfigError(
                "--dataset.between sum is about steps that --dataset.stride leaves out, and it leaves out "
                "none. Set --dataset.stride, or leave it out."
            )
        if len(set(self.cameras)) != len(self.cameras):
            raise ConfigError("--dataset.cameras names a camera twice. Name each once.")
        if NONE in self.state and len(self.state) > 1:
            raise ConfigError("--dataset.state has 'none' and keys. Give one or the other.")


@dataclass(frozen=True, kw_only=True)
class Trained(Bounded):
    """Device and duration of a fit."""

    device: str = "auto"
    """cpu, cuda, or auto."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Seed of the weights, of imagination, and of the order of examples."""
    steps: Steps
    """Optimizer steps."""
    batch: Examples
    """Examples per step: decisions of a policy, windows of a world, frames of a reward model, episodes of a
    decoder."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class FromData(Bounded):
    """Input of most fits."""

    data: tuple[Path, ...]
    """Recording folders, LeRobot v3 folders, or robomimic's HDF5 files."""
    dataset: DataSetSettings = field(default_factory=DataSetSettings)
    """How LeRobot and robomimic are read."""


@dataclass(frozen=True, kw_only=True)
class Refinable(Trained, FromData):
    """Settings of fits that can fine-tune large networks (`launch.fine_tune`)."""

    MODEL: ClassVar[str]
    FRESH: ClassVar[tuple[str, ...]]
    """Settings of fresh weights, which --refine excludes."""

    refine: str = ""
    """Model to start from instead of fresh weights."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    precision: Literal["fp32", "bf16"] = "fp32"
    """With --refine. bf16: passes in bfloat16, and frozen weights stay as they are. fp32: these become
    float32 too, and a GPU rounds only the factors of products. Trained weights and the optimizer's state are
    float32 in both."""
    micro_batch: Annotated[int, AtLeast(0, "it counts examples.", "Use 0 for all.")] = 0
    """With --refine: examples that a rank computes at once; 0: all of its part of --batch."""
    gradient_checkpointing: bool = False
    """With --refine: compute the layers again in the backward pass instead of keeping their activations."""
    compile: bool = False
    """Compile the model first: a minute or two at the start, then about twice as fast on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = self.asked_of_fine_tuning()
        if asked and not self.refine:
            raise ConfigError(
                f"--{asked[0].replace('_', '-')} is about fine-tuning, but --refine names no {self.MODEL}. "
                f"Give one, or leave it out: what is fitted from nothing is small."
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name in self.FRESH:
            if self.refine and (value := getattr(self, name)) != defaults[name]:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is about fresh weights, but with --refine "
                    f"{self.refine} that is decided already. Leave one of them out."
                )

    def asked_of_fine_tuning(self) -> list[str]:
        """List the settings of fine-tuning that differ from their defaults."""
        is_set = {
            "policy_settings": getattr(self, "policy_settings", ()),
            "lora.rank": self.lora.rank,
            "precision": self.precision != "fp32",
            "micro_batch": self.micro_batch,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        return [name for name, value in is_set.items() if value]


@dataclass(frozen=True, kw_only=True)
class FitPolicy(Refinable):
    """Behaviour cloning of an OpenVLA-OFT policy, at the recordings' picture size."""

    MODEL: ClassVar[str] = "policy"
    FRESH: ClassVar = ("size",)

    out: Path
    """Folder for the policy."""
    size: Size = "tiny"
    """tiny: about 2 million parameters. small: 11 million."""
    statistics: Literal["auto", "q01_q99", "none"] = "auto"
    """Range of the 256 tokens of a number. q01_q99: the recordings' first to 99th percentile, the gripper
    apart. none: -1 to 1. auto: none for tabletop, q01_q99 for every other simulator."""
    refine: str = ""
    """Policy to start from instead of fresh weights, also a published OpenVLA-OFT: its size and words stay,
    and its statistics unless --statistics is set."""
    policy_settings: tuple[str, ...] = ()
    """Settings that a published --refine lacks, as key=value; see `asyncrl train`."""
    average: Annotated[float, Within(0, 1, "it is a share.", "Use 0.999, or 0 for none.")] = 0.999
    """Decay of the moving average of the trained weights, which is written; 0: write the last weights."""
    world: str = ""
    """World folder whose autoencoder redraws half of the frames: the policy will see imagined ones."""
    steps: Steps = 10_000
    batch: Examples = 256


@dataclass(frozen=True, kw_only=True)
class FitWorld(Refinable):
    """A world model at the recordings' picture size: its autoencoder, then the network that draws latents."""

    MODEL: ClassVar[str] = "world"
    FRESH: ClassVar = ("kind", "size", "vae_size", "camera", "autoencoder")

    out: Path
    """Folder for the world model."""
    kind: Kind = "wan"
    """wan, opensora or evac: which published architecture and objective. docs/fitting.md compares them."""
    size: Size = "tiny"
    """Size of the network that draws latents. tiny: 3 to 4 million parameters. small: 7 to 12 million."""
    vae_size: Size = "tiny"
    """Size of the autoencoder. tiny: 1 to 2 million parameters. small: about 2.4 times as many."""
    autoencoder: str = ""
    """World folder whose autoencoder is reused instead of fitting one. For opensora and evac, whose
    autoencoders are equal: a frame has the same latents in both. No --vae-steps are made."""
    vae_steps: Steps = 7_000
    """Optimizer steps of the autoencoder."""
    vae_batch: Examples = 48
    """Clips of 17 frames per step; for frame-wise autoencoders, 17 frames from anywhere."""
    vae_learning_rate: LearningRate = 2e-3
    """Peak learning rate of the autoencoder."""
    steps: Steps = 30_000
    """Optimizer steps of the network that draws latents."""
    batch: Examples = 512
    context_sigma: Annotated[float, Within(0, 1000, "it is a width.", "Use 0.1.")] = CONTEXT_SIGMA
    """Noise on the memory latent while training, against drift. wan only: others have a published one."""
    imagined_memory: Annotated[float, Within(0, 1, "it is a share.", "Use 0.5, or 0.")] = 0.0
    """Share of windows whose memory latent the network drew, against drift (scheduled sampling). wan
    only."""
    camera: str = ""
    """evac only: JSON file with the camera's pose, for simulators where it is unknown."""
    refine: str = ""
    """World to start from instead of fresh weights, also a published one; its autoencoder stays as it is."""
    version: Annotated[int, AtLeast(0, "versions are counted.", "Use 0.")] = 0
    """World version that episodes will carry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.targets != "all":
            raise ConfigError(
                f"--lora.targets is {self.lora.targets}, but a world has no language model: its adapters go "
                "into the attention and the MLP of every block. Leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class FitReward(Trained, FromData):
    """The task-conditioned ResNet that judges whether a frame shows success."""

    world: Path
    """World folder: its autoencoder redraws half of the frames; the reward model is written into it."""
    size: Size = "tiny"
    """tiny: 0.4 million parameters. small: 0.7 million."""
    steps: Steps = 6_000
    batch: Annotated[
        int, AtLeast(4, "a step has frames of both kinds.", "Leave it out.", highest=_MOST_EXAMPLES)
    ] = 256


@dataclass(frozen=True, kw_only=True)
class FitKeyframes(FromData):
    """Start states in the middle of true episodes, for short imagination with an open end."""

    out: Path
    """HDF5 file to write."""
    count: Count = 512
    """Key frames to keep, balanced over the tasks."""


@dataclass(frozen=True, kw_only=True)
class FitStarts(FromData):
    """Start states for imagination: the first frames of recordings, or pictures with instructions."""

    data: tuple[Path, ...] = ()
    """Recording folders, LeRobot v3 folders, or robomimic's HDF5 files."""
    pictures: str = ""
    """Folder of pictures, instead of --data. Their size is set by --dataset.image-size."""
    instructions: str = ""
    """File with the instructions of --pictures: .txt or .csv; see docs/fitting.md."""
    out: Path
    """HDF5 file to write."""
    count: Count = 512
    """Start states to keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.data) == bool(self.pictures):
            raise ConfigError(
                "Start states are made of recordings or of pictures: set --data or --pictures, one of them."
            )
        if bool(self.pictures) != bool(self.instructions):
            raise ConfigError(
                "--pictures and --instructions belong together, but one of them is missing. Set both."
            )


@dataclass(frozen=True, kw_only=True)
class FitDecoder(Trained):
    """A tiny decoder, distilled from the world's own on episodes it imagines; on a GPU in bfloat16."""

    world: str = "tabletop"
    """World folder, or 'tabletop' (shipped)."""
    policy: str = "tabletop"
    """Policy that acts in the imagined episodes."""
    start_states: str = "tabletop"
    """Starts of these episodes."""
    out: str = ""
    """Folder for decoder.safetensors and decoder.json; empty: the world's folder."""
    episodes: Count = 256
    """Episodes to learn from."""
    held_out: Count = 64
    """Further episodes, from other start states, to measure on."""
    decisions: Count = 6
    """Length of an episode; as long as those of training (--actor.max-decisions)."""
    imagine_batch: Examples = 32
    """Episodes imagined side by side."""
    steps: Steps = 3_000
    batch: Examples = 4
    learning_rate: LearningRate = 3e-3
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0.")] = 1.0
    """Sampling temperature of the policy, as in training."""
    threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.")] = 0.7
    """Probability from which a frame counts as success, for the agreement of the verdicts."""
    compile: bool = False
    """Compile the tiny decoder first: a minute at the start, then faster on a GPU."""
