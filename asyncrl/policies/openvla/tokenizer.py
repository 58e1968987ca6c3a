"""Instructions to left-padded prompt tokens and their mask.

The prompt is OpenVLA's. Its last token announces the action: the policy's first output is read there, so
padding goes to the left; the beginning-of-sequence token stays in column 0, where the picture follows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.storage.untrusted import read_text

PROMPT: Final = "In: What action should the robot take to {task}?\nOut: "
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
_WORDS: Final = """
a the it and of to in into on onto from at next between under put pick place move push pull lift open close
turn stack up down off left right front back top bottom middle first second small large red green blue
yellow purple white black orange pink brown grey cyan cube block ball plate bowl mug cup box basket tray
table drawer cabinet stove bottle rack shelf door button handle side
"""
WORDS: Final = tuple(_WORDS.split())
"""Vocabulary of the small policies besides the prompt's own words; every other word is `<unk>`."""

_PIECE: Final = r"\w+|[^\w\s]|\n"
_OF_PROMPT: Final = re.findall(_PIECE, PROMPT.replace("{task}", ""))


def words_for(tasks: Iterable[str]) -> tuple[str, ...]:
    """Return `WORDS`, followed by the other words of these instructions in alphabetical order.

    Example:
        >>> words_for(["pick up the ketchup", "Open the moka-pot"])[len(WORDS) :]
        ('-', 'ketchup', 'moka', 'pot')
    """
    said = {piece for task in tasks for piece in re.findall(_PIECE, task.lower())}
    return (*WORDS, *sorted(said - set(WORDS) - set(_OF_PROMPT)))


def build_word_tokenizer(words: Iterable[str] = WORDS) -> Tokenizer:
    """Build one token per word, punctuation mark or line break; ids 0, 1, 2 are `<unk>`, `<s>`, `</s>`."""
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
        """Wrap a tokenizer."""
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
        self.shortest = 0
        """Minimum length of a batch."""
        self.always_masked = False
        """True if attention gets a mask even where a batch needs none."""
        self._known: dict[str, tuple[int, ...]] = {}
        self._first: dict[tuple[int, ...], str] = {}

    @classmethod
    def from_file(cls, path: Path, *, pad_id: int) -> PromptTokenizer:
        """Read a `tokenizer.json`; raises CheckpointError if it is missing or no tokenizer."""
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: instructions cannot become tokens. "
                "Copy tokenizer.json from the checkpoint the weights came from."
            )
        try:
            tokenizer = Tokenizer.from_str(read_text(path))
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
        """Pad every batch from now on to the longest prompt of `tasks`; mask all if any is shorter."""
        lengths = {len(self.ids(task)) for task in tasks}
        self.shortest, self.always_masked = max(lengths), len(lengths) > 1

    def save(self, path: Path) -> None:
        """Write the tokenizer as `tokenizer.json`."""
        path.write_text(self.tokenizer.to_str(pretty=False), encoding="utf-8")

    def ids(self, task: str) -> tuple[int, ...]:
        """Tokenise the prompt of one task in lower case, beginning with `<s>`.

        Raises:
            CheckpointError: The tokenizer is another policy's.
            ConfigError: The tokenizer lacks a word, or another instruction has the same prompt.
        """
        if task in self._known:
            return self._known[task]
        prompt = PROMPT.format(task=task.lower())
        encoded = self.tokenizer.encode(prompt)
        ids = encoded.ids
        known = tuple(ids) if ids[:1] == [self.begin_id] else (self.begin_id, *ids)
        if max(known) >= self.pad_id:
            raise CheckpointError(
                f"The tokenizer gives id {max(known)} for the task {task!r}, but the policy knows ids "
                f"below {self.pad_id}: tokenizer.json belongs to another checkpoint. Copy the right one."
            )
        self._refuse_unknown(task, prompt, ids, encoded.offsets)
        self._refuse_second(task, known)
        self._known[task] = known
        return known

    def _refuse_unknown(
        self, task: str, prompt: str, ids: Sequence[int], places: Sequence[tuple[int, int]]
    ) -> None:
        """Refuse words that all become `<unk>`; an unknown punctuation mark is harmless."""
        of_unknown = self.tokenizer.token_to_id(UNKNOWN)
        spans = [place for number, place in zip(ids, places, strict=True) if number == of_unknown]
        words = dict.fromkeys(prompt[begin:end] for begin, end in spans)
        if unread := [repr(word) for word in words if re.search(r"\w", word)]:
            raise ConfigError(
                f"The policy cannot read {', '.join(unread)} of the instruction {task!r}: its tokenizer does "
                f"not know {'the word' if len(unread) == 1 else 'the words'}. Use other words, or a policy "
                "that knows them: `asyncrl fit policy` takes them from its recordings (not with --refine)."
            )

    def _refuse_second(self, task: str, ids: tuple[int, ...]) -> None:
        other = self._first.setdefault(ids, task)
        if task.lower().split() != other.lower().split():
            pieces = sorted({piece for text in (other, task) for piece in re.findall(_PIECE, text.lower())})
            unknown = [repr(piece) for piece in pieces if self.tokenizer.token_to_id(piece) is None]
            raise ConfigError(
                f"The policy reads {other!r} and {task!r} as the same prompt, because its tokenizer does not "
                f"know {' nor '.join(unknown)}: it cannot tell these tasks apart. Use a "
                "policy that knows what tells them apart; `asyncrl fit policy` takes it from its recordings "
                "(not with --refine)."
            )

    def batch(self, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokenise prompts and bring them to equal length: `<s>`, padding, the rest.

        Returns:
            ids ``[B, L]`` int64 and mask ``[B, L]`` int64 (1 = token) on the CPU; L is the longest prompt,
            but at least `shortest`.
        """
        prompts = [self.ids(task) for task in tasks]
        length = max(self.shortest, *map(len, prompts))
        ids, mask = [], []
        for prompt in prompts:
            gap = length - len(prompt)
            ids.append([prompt[0], *[self.pad_id] * gap, *prompt[1:]])
            mask.append([1, *[0] * gap, *[1] * (len(prompt) - 1)])
        return torch.tensor(ids), torch.tensor(mask)
