"""Short help of `asyncrl COMMAND --help`: the flags that are often used, on one screen. No torch.

    The run
      --updates N             Optimizer updates to make in all (10)

A row is the first clause of the setting's docstring. Brackets contain the default, or the value of a file on
the command line. `--help-all` shows every flag.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from asyncrl.config.bounds import Bounded

SHORT: Final = ("-h", "--help")
ALL: Final = "--help-all"
COLUMN: Final = 34  # Column of the description; a longer flag is followed by a blank
WIDTH: Final = 80
LONGEST_CHOICE: Final = 14  # Columns of words to choose from; longer ones are a NAME
DRY_RUN: Final = "--dry-run"
_NAMES: Final = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}  # Type -> name of a value
Settings = TypeVar("Settings", bound=Bounded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortHelp:
    """Short help of one command."""

    command: str
    usage: str  # Words after the command
    groups: Mapping[str, str]  # Heading -> names of settings with their section, and of own flags
    own: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flags that are no settings, as they are written -> description."""
    about: str = ""  # Empty: the docstring of the settings
    examples: Sequence[str]

    def text(self, settings: Any) -> str:
        """Format the help with `settings`' values."""
        lines = [f"usage: {self.command} {self.usage}", ""]
        lines += textwrap.wrap(self.about or _about(type(settings)).partition("\n\n")[0], WIDTH)
        for heading, names in self.groups.items():
            lines += ["", heading]
            own = {flag.partition(" ")[0]: (flag, what) for flag, what in self.own.items()}
            rows = (own[name] if name in own else _described(settings, name) for name in names.split())
            lines += [f"  {shown:<{COLUMN - 3}} {what}" for shown, what in rows]
        lines += ["", *(f"  {example}" for example in self.examples)]
        return "\n".join([*lines, "", f"Every flag, with all that it does: {self.command} {ALL}"])

    def parse(
        self,
        kind: type[Settings],
        arguments: Sequence[str],
        default: Settings | None = None,
        *,
        shown: Settings | None = None,
    ) -> Settings:
        """Read the settings from flags; help and invalid flags exit.

        `shown`: values for the short help of a type that needs arguments.
        """
        import tyro

        if any(argument in SHORT for argument in arguments):
            print(self.text(default or shown or kind()))
            raise SystemExit(0)
        own = " ".join(f"{flag}: {what}." for flag, what in self.own.items())
        about = " ".join(f"{self.about or _about(kind)} {own} --help: what is often used.".split())
        about = "\n".join(textwrap.wrap(about, shutil.get_terminal_size().columns))
        positional = self.usage.removesuffix(" [--flags]") if self.usage.startswith("[CONFIG") else ""
        prog = f"{self.command} {positional}".rstrip() if ALL in arguments else self.command
        flags = ["--help"] if ALL in arguments else list(arguments)
        settings: Any = tyro.cli(kind, args=flags, default=default, prog=prog, description=about)
        return settings


def subcommands(kinds: Mapping[str, type]) -> Any:
    """Return the type by which tyro parses one of several commands by name."""
    import tyro

    named = [Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in kinds.items()]
    return typing.Union[tuple(named)]  # noqa: UP007


def _described(settings: Any, name: str) -> tuple[str, str]:
    # The flag with the name of its value, and the description with the default.
    *sections, last = name.split(".")
    for section in sections:
        settings = getattr(settings, section)
    value = getattr(settings, last)
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    default = "" if isinstance(value, bool) or value in ("", (), Path()) else f" ({words})"
    first = re.split(r"[.:;](?=\s|$)", _docstrings(type(settings))[last])[0]
    flag = f"--{name.replace('_', '-')} {_value_name(typing.get_type_hints(type(settings))[last])}"
    return flag.rstrip(), first + default


def _about(settings: type) -> str:
    return inspect.cleandoc(settings.__doc__ or "")


def _value_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        words = "|".join(map(str, typing.get_args(hint)))
        return words if len(words) <= LONGEST_CHOICE else "NAME"
    if typing.get_origin(hint) is tuple:
        kinds = [_value_name(kind) for kind in typing.get_args(hint) if kind is not Ellipsis]
        return " ".join(kinds) + " ..." * (Ellipsis in typing.get_args(hint))
    return _NAMES.get(hint) or "|".join(map(_value_name, typing.get_args(hint)))


@cache
def _docstrings(settings: type) -> dict[str, str]:
    # Of the fields, which only the source has.
    found = dict[str, str]()
    for kind in (kind for kind in reversed(settings.__mro__) if dataclasses.is_dataclass(kind)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, text in pairwise(typing.cast(ast.ClassDef, tree).body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


MODELS: Final = "policy world reward start_states lora.rank"
PROCESSES: Final = "placement device actor.slots actor.max_decisions algorithm.micro_batch learner.precision"
TRAIN: Final = ShortHelp(
    command="asyncrl train",
    usage="[CONFIG.toml ...] [--flags]",
    groups={
        "The run": "updates run_dir resume seed checkpoint_every evaluate_every inline --dry-run",
        "Models": MODELS,
        "Learning": "algorithm.kind algorithm.group_size algorithm.groups_per_update algorithm.temperature "
        "optimizer.learning_rate correction.kind replay.max_lag",
        "Processes": PROCESSES,
    },
    own={DRY_RUN: "Check, print the settings, start nothing"},
    examples=["asyncrl train configs/tabletop_ppo.toml --updates 20 --run-dir runs/mine"],
)
