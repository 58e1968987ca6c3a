"""Frames, instructions and proprioception to `PolicyInputs` on the device.

The policy's first output is read at the prompt's last token, so padding goes to the left; `<s>` stays first.
Dimension letters: B rows, H/W frame size in pixels, N pictures per row, Q numbers of proprioception.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from asyncrl.devices.tensors import constant_to_device, to_device
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.facts import check_instruction, plain_task
from asyncrl.policies.action_tokens import normalise
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.storage.untrusted import read_bytes

PROMPT: Final = "In: What action should the robot take to {task}?\nOut: "
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
_WORDS: Final = """
a the it and of to in into on onto from at next between under put pick place move push pull lift open close
turn stack up down off left right front back top bottom middle first second small large red green blue
yellow purple white black orange pink brown grey cyan cube block ball plate bowl mug cup box basket tray
table drawer cabinet stove bottle rack shelf door button handle side
"""
WORDS: Final = tuple(_WORDS.split())
"""Vocabulary of the small policies besides the prompt's own words; every other word is refused."""

_PIECE: Final = r"\w+|[^\w\s]|\n"
_OF_PROMPT: Final = re.findall(_PIECE, PROMPT.replace("{task}", ""))
JPEG_QUALITY: Final = 95
CROPPED_AREA: Final = 0.9  # Share of a picture's area that is kept: fine-tuning augments with such crops
_RADIUS: Final = 3
_ROWS_AT_ONCE: Final = 64
_THREADS: Final = 8


# ---- instructions ----


def words_for(tasks: Iterable[str]) -> tuple[str, ...]:
    """Return `WORDS`, followed by the other words of these instructions in alphabetical order."""
    said = {piece for task in tasks for piece in re.findall(_PIECE, plain_task(task))}
    return (*WORDS, *sorted(said - set(WORDS) - set(_OF_PROMPT)))


def build_word_tokenizer(words: Iterable[str] = WORDS) -> Tokenizer:
    """Build a tokenizer of words, punctuation marks and line breaks; ids 0, 1, 2: `<unk>`, `<s>`, `</s>`."""
    pieces = [UNKNOWN, BEGIN, END, *_OF_PROMPT, *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"), pre_tokenizers.Split(Regex(_PIECE), "isolated")]
    )
    return tokenizer


class PromptTokenizer:
    """A tokenizer of whole prompts, cached by task."""

    def __init__(self, tokenizer: Tokenizer, *, pad_id: int) -> None:
        begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
        if begin is None or end is None:
            raise CheckpointError(
                f"The tokenizer has no {BEGIN} or no {END}: it is not a Llama tokenizer. "
                "Put the tokenizer.json of the checkpoint next to its weights."
            )
        self.tokenizer = tokenizer
        self.begin_id: int = begin
        self.end_id: int = end
        self.pad_id = pad_id
        self.shortest = 0  # Minimum length of a batch.
        self.always_masked = False  # True if attention gets a mask even where a batch needs none.
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def from_file(cls, path: Path, *, pad_id: int) -> PromptTokenizer:
        """Read a `tokenizer.json`; raises CheckpointError if it is missing or invalid."""
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: instructions cannot become tokens. "
                "Copy tokenizer.json from the checkpoint the weights came from."
            )
        try:
            tokenizer = Tokenizer.from_str(read_bytes(path).decode())
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{path} is not a tokenizer ({error}). Copy it again from the checkpoint."
            ) from error
        # Some files keep the settings of the last call. Truncation would cut the end of a prompt, which
        # announces the action; `batch` pads on the left, behind `<s>`.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, pad_id=pad_id)

    def fix_shape(self, tasks: Iterable[str]) -> None:
        """Pad all later batches to the longest prompt of `tasks`; mask each if prompts differ in length."""
        lengths = {len(self.ids(task)) for task in tasks}
        self.shortest, self.always_masked = max(lengths), len(lengths) > 1

    def save(self, path: Path) -> None:
        """Write the tokenizer as `tokenizer.json`."""
        path.write_text(self.tokenizer.to_str(pretty=False), encoding="utf-8")

    def ids(self, task: str) -> tuple[int, ...]:
        """Tokenise the prompt of one task in its normal form, beginning with `<s>`."""
        if task in self._known:
            return self._known[task]
        prompt = PROMPT.format(task=check_instruction(task, "The prompt of the policy"))
        encoded = self.tokenizer.encode(prompt)
        ids = encoded.ids
        known = tuple(ids) if ids[:1] == [self.begin_id] else (self.begin_id, *ids)
        if max(known) >= self.pad_id:
            raise CheckpointError(
                f"The tokenizer gives id {max(known)} for the task {task!r}, but the policy knows ids "
                f"below {self.pad_id}: tokenizer.json belongs to another checkpoint. Copy the right one."
            )
        self._refuse_unknown(task, prompt, ids, encoded.offsets)
        self._known[task] = known
        return known

    def _refuse_unknown(
        self, task: str, prompt: str, ids: Sequence[int], places: Sequence[tuple[int, int]]
    ) -> None:
        of_unknown = self.tokenizer.token_to_id(UNKNOWN)
        spans = [place for number, place in zip(ids, places, strict=True) if number == of_unknown]
        if unread := list(dict.fromkeys(repr(prompt[begin:end]) for begin, end in spans)):
            raise ConfigError(
                f"The policy cannot read {', '.join(unread)} of the instruction {task!r}: its tokenizer does "
                f"not know {'the word' if len(unread) == 1 else 'the words'}. Use other words, or a policy "
                "that knows them: `asyncrl fit policy` takes them from its recordings (not with --refine)."
            )

    def batch(self, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (`<s>`, padding, prompt) and mask (1 = token), ``[B, L]`` int64 on the CPU."""
        prompts = [self.ids(task) for task in tasks]
        length = max(self.shortest, *map(len, prompts))
        ids, mask = [], []
        for prompt in prompts:
            gap = length - len(prompt)
            ids.append([prompt[0], *[self.pad_id] * gap, *prompt[1:]])
            mask.append([1, *[0] * gap, *[1] * (len(prompt) - 1)])
        return torch.tensor(ids), torch.tensor(mask)


# ---- pictures ----


def prepare_oft(frames: NDArray[np.uint8], size: int, device: torch.device) -> Tensor:
    """Turn ``[..., H, W, 3]`` uint8 into ``[..., S, S, 3]``: JPEG, Lanczos resize, centre crop."""
    flat = frames.reshape(-1, *frames.shape[-3:])
    parts = []
    with ThreadPoolExecutor(min(_THREADS, len(flat))) as pool:  # Pillow releases the interpreter's lock
        for start in range(0, len(flat), _ROWS_AT_ONCE):
            decoded = np.stack(list(pool.map(through_jpeg, flat[start : start + _ROWS_AT_ONCE])))
            parts.append(crop_centre(resize_lanczos3(to_device(decoded, device), size)))
    return torch.cat(parts).reshape(*frames.shape[:-3], size, size, 3)


def encode_jpeg(frame: NDArray[np.uint8]) -> bytes:
    """Write a frame ``[H, W, 3]`` uint8 as a JPEG file: quality 95, colours at half resolution (4:2:0)."""
    file, image = io.BytesIO(), Image.fromarray(np.ascontiguousarray(frame))
    image.save(file, format="JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
    return file.getvalue()


def through_jpeg(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pass ``[H, W, 3]`` uint8 through a JPEG file and back, like the fine-tuning data."""
    with Image.open(io.BytesIO(encode_jpeg(frame))) as image:
        return np.asarray(image.convert("RGB"))


def lanczos3_weights(source: int, target: int) -> NDArray[np.float64]:
    """Compute weights of source pixels in target pixels along one axis: half-integer centres, antialiased."""
    ratio = source / target
    stretch = max(ratio, 1.0)
    centers = (np.arange(target) + 0.5) * ratio
    distance = (np.arange(source) + 0.5 - centers[:, None]) / stretch
    window = np.sinc(distance) * np.sinc(distance / _RADIUS) * (np.abs(distance) <= _RADIUS)
    return window / window.sum(axis=1, keepdims=True)


@lru_cache(maxsize=32)
def _weights_on(source: int, target: int, device: torch.device) -> Tensor:
    return constant_to_device(lanczos3_weights(source, target), device)


def resize_lanczos3(frames_BHW3: Tensor, size: int) -> Tensor:
    """Resize ``[B, H, W, 3]`` uint8 to ``[B, S, S, 3]`` uint8; halves are rounded to even."""
    # Float64 because reduced-precision matrix products (TF32, autocast) would miss grey levels.
    rows_SH = _weights_on(frames_BHW3.shape[1], size, frames_BHW3.device)
    columns_SW = _weights_on(frames_BHW3.shape[2], size, frames_BHW3.device)
    levels_BSW3 = torch.einsum("sh,bhwc->bswc", rows_SH, frames_BHW3.double())
    levels_BSS3 = torch.einsum("tw,bswc->bstc", columns_SW, levels_BSW3)
    return levels_BSS3.round().clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=32)
def _crop_neighbours(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    side = np.sqrt(CROPPED_AREA)
    samples = ((1 - side) / 2 + np.linspace(0, 1, size) * side) * (size - 1)  # corners meet corners
    lower = np.floor(samples).astype(np.int64)
    upper = np.minimum(lower + 1, size - 1)
    share = (samples - lower).astype(np.float32)
    lower_S, upper_S, share_S = (constant_to_device(array, device) for array in (lower, upper, share))
    return lower_S, upper_S, share_S


def crop_centre(frames_BSS3: Tensor) -> Tensor:
    """Crop the centre of ``[B, S, S, 3]`` uint8 (side ``sqrt(0.9)``), stretch it: ``floor(255.5 x)``."""
    lower, upper, share_S = _crop_neighbours(frames_BSS3.shape[1], frames_BSS3.device)
    levels = frames_BSS3.float() / 255
    left, right = levels.index_select(2, lower), levels.index_select(2, upper)
    levels = left + (right - left) * share_S[:, None]
    top, bottom = levels.index_select(1, lower), levels.index_select(1, upper)
    levels = top + (bottom - top) * share_S[:, None, None]
    return (levels.clamp(0, 1) * 255.5).to(torch.uint8)


# ---- all inputs ----

_WORLDS: Final = (
    "A world model draws one picture and no proprioception: such a policy can be evaluated and trained in "
    "a simulator that gives what it needs, but not trained in a world."
)


def build_inputs(
    config: OpenVLAOFTConfig,
    tokenizer: PromptTokenizer,
    device: torch.device,
    frames: NDArray[np.uint8],
    tasks: Sequence[str],
    proprio: NDArray[np.floating] | None,
) -> PolicyInputs:
    """Implement `interface.Policy.preprocess` without waiting for the device."""
    shown = frames[:, None] if frames.ndim == 4 else frames[:, : config.images]
    if (
        frames.dtype != np.uint8
        or shown.ndim != 5
        or shown.shape[:2] != (len(tasks), config.images)
        or shown.shape[-1] != 3
    ):
        raise ConfigError(
            f"The policy reads {config.images} uint8 picture(s) [H, W, 3] per task, but it got frames "
            f"{frames.dtype}{list(frames.shape)} for {len(tasks)} tasks. "
            f"{_WORLDS if config.images > 1 else 'Check the observation of the world or simulator.'}"
        )
    ids, mask = tokenizer.batch(tasks)
    return PolicyInputs(
        pixels=place_pictures(config, shown[:, 0] if config.images == 1 else shown, device),
        input_ids=to_device(ids.numpy(), device),
        attention_mask=to_device(mask.numpy(), device),
        padded=tokenizer.always_masked or not bool(mask.all()),
        proprio=_place_proprio(config, proprio, len(tasks), device) if config.proprio_dim else None,
    )


def place_pictures(config: OpenVLAOFTConfig, frames: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Move ``[..., H, W, 3]`` uint8 to the device, through the policy's `image_pipeline`."""
    if config.image_pipeline == "oft":
        return prepare_oft(frames, config.image_size, device)
    return to_device(frames, device)


def _place_proprio(
    config: OpenVLAOFTConfig, proprio: NDArray[np.floating] | None, rows: int, device: torch.device
) -> Tensor:
    if proprio is None or proprio.shape != (rows, config.proprio_dim):
        raise ConfigError(
            f"The policy needs {config.proprio_dim} numbers of proprioception (proprio_dim) for each of "
            f"{rows} rows, but it got {'none' if proprio is None else list(proprio.shape)}. "
            f"{_WORLDS}"
        )
    bounds = config.proprio_bounds
    return to_device(proprio.astype(np.float32) if bounds is None else normalise(proprio, bounds), device)
