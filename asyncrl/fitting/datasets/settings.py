"""Settings of how a data set of another program is read: its keys, and what becomes of its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import PIXELS, AtLeast, Bounded
from asyncrl.errors import ConfigError

NONE = "none"
"""As a key: there is no such thing, although the data set has it."""


@dataclass(frozen=True, kw_only=True)
class DataSetSettings(Bounded):
    """How LeRobot v3 folders and robomimic files are read. Recordings of our own need none of this."""

    SECTION: ClassVar[str] = "dataset."

    cameras: tuple[str, ...] = ()
    """Keys of the cameras; models see the first. None: the first one that is not at a wrist."""
    action: str = ""
    """Key of the actions; empty: 'action' (LeRobot), 'actions' (robomimic)."""
    state: tuple[str, ...] = ()
    """Keys of the robot's state, joined in this order. None: observation.state (LeRobot); position, rotation
    and gripper of robot0 (robomimic), where they are there. 'none': no state."""
    reward: str = ""
    """Key of the rewards; empty: 'next.reward' (LeRobot), 'rewards' (robomimic). 'none': no rewards."""
    success: str = ""
    """Key that is above 0.5 where the task is solved; empty: 'next.success' (LeRobot), the attribute
    'success' of a demonstration or rewards of 0 and 1 (robomimic). 'none': nothing is solved."""
    solved: Literal["key", "end"] = "key"
    """end: every episode is solved in its last picture, whatever its keys say: of demonstrations."""
    task: str = ""
    """Instruction of all episodes, instead of what the data set says."""
    simulator: str = ""
    """What the recordings are called that are made of it; empty: its robot (LeRobot), its environment
    (robomimic)."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 128.", highest=PIXELS)] = 0
    """Height and width that pictures are resized to; 0: as they are stored."""
    aspect: Literal["stretch", "crop", "pad"] = "stretch"
    """What becomes of pictures that are not square: squeezed whole, cut to the middle, or black bars."""
    flip: Literal["none", "vertical", "both"] = "none"
    """Lines stored from the bottom up: vertical. Both axes reversed: both."""
    stride: Annotated[int, AtLeast(1, "steps are counted from 1.", "Use 1.", highest=1000)] = 1
    """Only every so many steps are taken: 3 makes 10 steps per second of 30."""
    between: Literal["last", "sum"] = "last"
    """With a stride, the action of a step. last: the last one of those it replaces, right for positions to
    go to. sum: their sum but for the last number, the gripper's: right for motions."""
    episodes: Annotated[int, AtLeast(0, "episodes are counted.", "Use 0.")] = 0
    """Only the first so many episodes of each data set; 0: all."""

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
