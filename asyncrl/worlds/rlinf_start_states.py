"""Read start states from RLinf's folders of ``traj*.npy``, without running code that they name.

Each file is an array of one dict per frame: ``image`` uint8 ``[H, W, 3]``, ``delta_action`` ``[7]`` (the
action that produced the frame), ``instruction`` or ``task``, and perhaps ``init_ee_pose`` or ``abs_action``
``[8]`` (the pose of the hand). The first frame begins the episode. In a file of four frames or more, the last
four are the context: keyframe files (``_kir``) hold a first frame and four later ones. As in RLinf, the
number of frames decides, not the name.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from asyncrl.errors import AssetError, first_line
from asyncrl.facts import check_pictures
from asyncrl.observability.terminal import progress
from asyncrl.records import ACTION_DIM, POSE_DIM, StartState
from asyncrl.storage.untrusted import files_in, read_bytes

CONTEXT: Final = 4
KEYFRAME_MARK: Final = "_kir"
COPIES: Final = 4  # Bytes that may be made of each byte of a file: numpy needs 2 where protocol 2 writes text
_MAX_FRAMES: Final = 5_000
_DTYPE: Final = re.compile(r"O8|b1|[iu][1248]|f[248]|[SU]\d{1,5}")


def load_trajectories(folder: Path, *, keyframes: bool, image_size: int = 0) -> list[StartState]:
    """Read one start state per trajectory of a folder, by name (``traj10`` before ``traj2``)."""
    files = [file for file in files_in(folder, ".npy") if keyframes or KEYFRAME_MARK not in file.name]
    if not files:
        raise AssetError(
            f"{folder} holds no trajectories to start from (looked for *.npy"
            f"{'' if keyframes else ' without _kir, because of --no-keyframes'}). Set --start-states."
        )
    shown = progress(files, desc="start states", unit="file", delay=2, leave=False)
    return [load_trajectory(file, image_size=image_size) for file in shown]


def load_trajectory(file: Path, *, image_size: int = 0) -> StartState:
    """Read the start state of one trajectory; its name is the file's, without ``.npy``."""
    frames = read_object_array(file)
    if not 1 <= len(frames) <= _MAX_FRAMES:
        raise AssetError(f"{file} has {len(frames)} frames; between 1 and {_MAX_FRAMES} can be read.")
    if not all(isinstance(frame, dict) for frame in frames):
        raise AssetError(f"{file} holds something else than one dict per frame. Use RLinf's layout.")
    context = frames[-CONTEXT:] if len(frames) >= CONTEXT else []
    shown = [_image(frame, file) for frame in (frames[0], *context)]
    shapes = sorted({image.shape for image in shown})
    if len(shapes) != 1:
        raise AssetError(f"{file}: frames differ in shape, {list(shapes[0])} and {list(shapes[-1])}.")
    images = np.stack(shown)
    if image_size and images.shape[1:3] != (image_size, image_size):
        images = resized(images, image_size)
    actions = [_numbers(frame.get("delta_action"), ACTION_DIM) for frame in context]
    if any(action is None for action in actions):
        raise AssetError(
            f"{file}: 'delta_action' of a frame is missing or is not {ACTION_DIM} finite numbers. It is the "
            "action that produced the frame; use RLinf's layout."
        )
    last = frames[-1] if context else frames[0]
    poses = (_numbers(last.get(key), POSE_DIM) for key in ("init_ee_pose", "abs_action"))
    texts = [frames[0].get(key) for key in ("instruction", "task")]
    task: Any = next((text for text in texts if isinstance(text, str | bytes) and text.strip()), texts[0])
    return StartState(
        name=file.stem,
        task=task,
        frame=images[0],
        context_frames=images[1:],
        context_actions=np.array(actions, dtype=np.float32).reshape(-1, ACTION_DIM),
        ee_pose=next((pose for pose in poses if pose is not None), None),
    )


def resized(images_NHW3: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize ``[N, H, W, 3]`` uint8 to ``[N, size, size, 3]`` uint8: bilinear, corners not aligned."""
    floats = torch.from_numpy(np.ascontiguousarray(images_NHW3)).permute(0, 3, 1, 2).float()
    drawn = functional.interpolate(floats, size=(size, size), mode="bilinear", align_corners=False)
    return drawn.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def _image(frame: Mapping[str, Any], file: Path) -> NDArray[np.uint8]:
    image: Any = frame.get("image")
    check_pictures(image, (-1, -1, 3), f"{file}: pictures")
    return image


def _numbers(found: Any, count: int) -> NDArray[np.float32] | None:
    values = found.tolist() if isinstance(found, np.ndarray) else found
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    if not all(isinstance(value, int | float) and abs(value) < 1e38 for value in values):
        return None
    return np.array(values, np.float64).astype(np.float32)


# ---- arrays of objects ---------------------------------------------------------------------------


def read_object_array(path: Path) -> list[Any]:
    """Read a one-dimensional array of objects that ``np.save`` wrote (pickle protocol 2 to 5)."""
    try:
        stream = io.BytesIO(read_bytes(path))
        try:
            version = np.lib.format.read_magic(stream)
            shape, _, kind = getattr(np.lib.format, f"read_array_header_{version[0]}_0")(stream)
            if len(shape) != 1 or not kind.hasobject:
                raise ValueError("its header does not describe a one-dimensional array of objects")
            array = _Unpickler(stream, len(stream.getbuffer())).load()
        except Exception as error:  # On broken files these raise whatever they stumble upon.
            raise ValueError(first_line(str(error)) or type(error).__name__) from error
        if not isinstance(array, np.ndarray) or not array.dtype.hasobject or array.shape != shape:
            raise ValueError(f"its header promises {shape[0]} objects and the rest is something else")
    except OSError as error:
        raise AssetError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except ValueError as error:
        raise AssetError(
            f"{path} was not read: {error}. Only arrays of objects as numpy.save writes them are read, made "
            "of numbers, strings, lists, dicts and numeric arrays; nothing in a file is ever executed. "
            "Write it again from such values."
        ) from error
    return array.tolist()


_Python: Any = vars(pickle)["_Unpickler"]  # The one written in Python, whose instructions can be replaced.


class _Unpickler(_Python):
    """Python's unpickler, which treats names as text and imports nothing.

    Five names of numpy's and Python's functions are resolved; nothing else is ever called, and only arrays
    get a state.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Python.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, stream: io.BytesIO, size: int) -> None:
        super().__init__(stream)
        self._room = COPIES * size

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a name as a text."""
        return f"{module} {name}".replace("numpy.core.", "numpy._core.")

    def _reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        # Texts that are remembered can be used again and again.
        self._room -= sum(len(part) for part in arguments if isinstance(part, str | bytes | bytearray))
        if self._room < 0:
            raise ValueError("what it holds would take many times its own length")
        match name, *arguments:
            case ("numpy dtype", str(code), False, True) if _DTYPE.fullmatch(code):
                made: Any = np.dtype(code)
            case ("numpy._core.multiarray _reconstruct", "numpy ndarray", (0,), b"b"):
                made = np.zeros(0, np.int8)
            case ("numpy._core.multiarray scalar", np.dtype() as dtype, bytes(content)):
                made = np.frombuffer(content, dtype).reshape(())[()]
            case ("numpy._core.numeric _frombuffer", content, np.dtype() as dtype, tuple() as shape, order):
                made = np.frombuffer(content, dtype).reshape(shape, order=order)
            case ("_codecs encode", str(text), "latin1"):  # Protocol 2 has no bytes.
                made = text.encode("latin1")
            case ("__builtin__ bytes",):
                made = b""
            case _:
                raise ValueError(f"it calls {name!r:.80}, which numpy does not for plain values")
        self.append(made)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        match target, state:
            # (version, byte order, sub-array, field names, fields, ...)
            case np.dtype(), (3 | 4, "|" | "<", None, None, None, *_):
                pass  # It repeats the code; a type of numpy's is shared by the whole process.
            case np.ndarray(shape=(0,)), (1, tuple() as shape, np.dtype() as dtype, bool(), content) if (
                isinstance(content, list if dtype.hasobject else bytes)
                and all(type(size) is int and size >= 0 for size in shape)
                and math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize) == len(content)
            ):
                filled: Any = target
                filled.__setstate__(state)
            case _:
                raise ValueError("it sets the state of something that has none, or fills an array wrongly")

    def _bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))  # Python's own makes it before it reads.

    dispatch |= {pickle.REDUCE[0]: _reduce, pickle.BUILD[0]: _build, pickle.BYTEARRAY8[0]: _bytearray}
