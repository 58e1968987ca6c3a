"""Follow the instructions of a pickle without importing or calling anything on its behalf.

The readers of arrays of objects (`safe_npy`) and of training checkpoints (`evac.ckpt_reader`) are built on
this: each says what the names in its files stand for, and which further instructions it knows; any other one
ends the reading. Nowhere else are bytes of a pickle read, but for PyTorch's own reader of weights
(``torch.load`` with ``weights_only=True``).
"""

from __future__ import annotations

import pickletools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Final


class UnsafePickle(ValueError):
    """What the file asks for is not what the library writes for documented values."""


@dataclass(frozen=True)
class Name:
    """Something that the file wants to import. Nothing is imported."""

    text: str
    """Module and name, with a space between."""


class PickleMachine(ABC):
    """Follows the instructions of one pickle. `stack`, marks and what is kept are those of the pickle format.

    Popping more than there is raises IndexError.
    """

    steps: ClassVar[Mapping[str, Callable[[Any, Any], None]]] = {}
    """Instructions that only this kind knows -> what they do with the machine and their argument."""

    def __init__(self, max_instructions: int) -> None:
        """Begin empty.

        Args:
            max_instructions: Bounds what a small file can make of memory and time.
        """
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self._steps = _STEPS | dict(self.steps)
        self._max_instructions = max_instructions

    def run(self, stream: BinaryIO | bytes) -> Any:
        """Follow a pickle to its end; returns what it holds.

        Raises:
            UnsafePickle: It holds something that is not understood.
            ValueError: It is no pickle, or is cut short.
            IndexError: It takes more than it put.
        """
        for count, (instruction, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= self._max_instructions:
                raise UnsafePickle(f"it has more than {self._max_instructions} instructions")
            name = instruction.name
            if name == "STOP":
                return self.stack.pop()
            if name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in self._steps:
                self._steps[name](self, argument)
            else:
                raise UnsafePickle(f"it holds the instruction {name}")
        raise UnsafePickle("it ends early")  # not reached: genops says so itself

    @abstractmethod
    def keep(self, index: int | None) -> None:
        """Keep the top of the stack under a number; None: the next one."""

    @abstractmethod
    def recall(self, index: int) -> None:
        """Put what was kept."""

    @abstractmethod
    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""

    @abstractmethod
    def set_items(self, items: list[Any]) -> None:
        """Fill the dict on top with keys and values in turn."""

    @abstractmethod
    def named(self, text: str) -> None:
        """Put a name, see `Name.text`."""

    @abstractmethod
    def call(self) -> None:
        """Take arguments and a name; put what takes the place of the result."""

    @abstractmethod
    def fill(self) -> None:
        """Take the state of what is then on top."""

    def above_mark(self) -> list[Any]:
        """Take what was put since the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def mark(self) -> None:
        """Set a mark."""
        self.below.append(self.stack)
        self.stack = []

    def pack(self, count: int) -> None:
        """Make a tuple of the topmost values."""
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def pack_marked(self) -> None:
        """Make a tuple of what was put since the last mark."""
        items = self.above_mark()
        self.stack.append(tuple(items))

    def named_by_stack(self) -> None:
        """Take module and name, and put them as one."""
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise UnsafePickle("it wants to import something without a name")
        self.named(f"{module} {name}")


# fmt: off
_VALUES: Final = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
))
# fmt: on
_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_STEPS: Final[dict[str, Callable[[PickleMachine, Any], None]]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.pack_marked(),
    "TUPLE1": lambda machine, _: machine.pack(1),
    "TUPLE2": lambda machine, _: machine.pack(2),
    "TUPLE3": lambda machine, _: machine.pack(3),
    "BINPUT": lambda machine, index: machine.keep(index),
    "LONG_BINPUT": lambda machine, index: machine.keep(index),
    "MEMOIZE": lambda machine, _: machine.keep(None),
    "BINGET": lambda machine, index: machine.recall(index),
    "LONG_BINGET": lambda machine, index: machine.recall(index),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.above_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.above_mark()),
    "GLOBAL": lambda machine, text: machine.named(text),
    "STACK_GLOBAL": lambda machine, _: machine.named_by_stack(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.fill(),
}
