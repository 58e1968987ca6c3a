"""`asyncrl completion SHELL`: print a script by which bash, zsh or fish completes what is typed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Union

import tyro

from asyncrl.commands.table import COMMANDS
from asyncrl.config.short_help import ALL, AUDIT, COLLECT, CONVERT, DOCTOR, EVALUATE, TRAIN, ShortHelp

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print a script by which a shell completes commands, flags and files (docs/quickstart.md)."""

    shell: Annotated[Shell, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash, zsh or fish."""


ARGUMENTS: Final = CompletionConfig
"""What the command takes; tab completion reads it too."""
HELPS: Final[Mapping[str, ShortHelp]] = MappingProxyType(
    {
        "train": TRAIN,
        "doctor": DOCTOR,
        "evaluate": EVALUATE,
        "audit": AUDIT,
        "collect": COLLECT,
        "convert": CONVERT,
    }
)
"""Commands that have flags besides their settings."""

SPEC: Final = "COMPLETION_SPEC = "
"""Begins the line of the script that holds all commands and flags, as Python writes them."""
ZSH_CALL: Final = '_tyro_asyncrl "$@"'
"""Ends the script for zsh; `FILES` has its own."""
FILES: Final[Mapping[Shell, str]] = MappingProxyType(
    {
        "bash": """
# A word that is no flag: a subcommand or a value, else a file; of settings where these are taken.
_asyncrl() {
  local word="${COMP_WORDS[COMP_CWORD]}" IFS=$'\\n' one
  local -a found=()
  _tyro_asyncrl
  for one in "${COMPREPLY[@]}"; do
    [[ -n $one && ( $one != -* || $word == -* ) ]] && found+=("$one")
  done
  if [[ ${#found[@]} == 0 && $COMP_CWORD -gt 1 && $word != -* ]]; then
    case "${COMP_WORDS[1]}" in
      train | doctor) found=($(compgen -f -X '!*.toml' -- "$word"; compgen -f -X '!*.json' -- "$word"
                               compgen -d -- "$word")) ;;
      *) found=($(compgen -f -- "$word")) ;;
    esac
    compopt -o filenames 2>/dev/null
  fi
  COMPREPLY=("${found[@]}")
}
complete -F _asyncrl asyncrl
""",
        "zsh": """
# A word that is no flag: a subcommand or a value, or a file.
_tyro_asyncrl "$@"
if (( CURRENT > 2 )) && [[ "${words[CURRENT]}" != -* ]]; then
  _files
fi
""",
        "fish": """
# A word behind a command may be a file.
complete --command asyncrl --force-files --condition 'test (count (commandline -opc)) -gt 1'
""",
    }
)
"""What is added to tyro's script: it completes commands, flags and their values, and no positional words."""


def main(arguments: list[str]) -> int:
    """Print the script."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl completion")
    print(script(config.shell))
    return 0


def script(shell: Shell) -> str:
    """Let tyro write the script for the whole program, and add what it knows nothing of: positional words."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        tyro.cli(
            _program(),
            prog="asyncrl",
            args=["--tyro-write-completion", shell, "-"],
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
    text = "\n".join(map(_on_one_line, written.getvalue().rstrip().split("\n")))
    return text.removesuffix(ZSH_CALL).rstrip() + "\n" + FILES[shell]


def _on_one_line(line: str) -> str:
    """Take the line ends out of what flags do: the scripts read a line for each flag."""
    if SPEC not in line:
        return line
    return re.sub(r"\\+n\s*", " ", line)


def _program() -> Any:
    """All commands as one type: a union of what each of them takes."""
    kinds = []
    for name, where in COMMANDS.items():
        takes = import_module(where.partition(":")[0]).ARGUMENTS
        kinds.append(Annotated[_as_one(name, takes), tyro.conf.subcommand(name=name)])
    return Union[tuple(kinds)]  # noqa: UP007


def _as_one(name: str, takes: Any) -> Any:
    """Make what a command takes a part of a union: of subcommands a class, of others with their own flags."""
    marked = getattr(takes, "__metadata__", None)
    if not isinstance(takes.__origin__ if marked else takes, type):
        return dataclasses.make_dataclass(name, [("wanted", takes)])
    if name not in HELPS:
        return takes
    own = [ALL, *(HELPS[name].own or {})]
    flags = [(one.partition(" ")[0][2:].replace("-", "_"), str if " " in one else bool) for one in own]
    return dataclasses.make_dataclass(
        name,
        [
            (flag, tyro.conf.FlagCreatePairsOff[kind], dataclasses.field(default=kind()))
            for flag, kind in flags
        ],
        bases=(takes,),
        frozen=True,
        kw_only=True,
    )
