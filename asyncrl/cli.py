"""The command line: `asyncrl COMMAND ...`. Starts fast: a command's code is imported only when it runs."""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from asyncrl import __version__
from asyncrl.errors import AsyncRLError, ConfigError

COMMANDS: dict[str, str] = {
    "train": "asyncrl.commands.train:main",
    "actor": "asyncrl.commands.actor:main",
    "evaluate": "asyncrl.commands.evaluate:main",
    "collect": "asyncrl.commands.collect:main",
    "fit": "asyncrl.commands.fit:main",
    "convert": "asyncrl.commands.convert:main",
    "replay": "asyncrl.commands.replay:main",
    "check": "asyncrl.commands.check:main",
    "doctor": "asyncrl.commands.doctor:main",
    "status": "asyncrl.commands.status:main",
    "keys": "asyncrl.commands.keys:main",
    "configs": "asyncrl.commands.configs:main",
    "metrics": "asyncrl.commands.metrics:main",
}
"""What runs a command. The docstring of its module begins with: `asyncrl NAME ARGUMENTS`: what it does."""


def usage() -> str:
    """Return the text of `asyncrl --help`."""
    rows = "\n".join(f"  {name:<9} {about(name)}" for name in COMMANDS)
    return (
        f"asyncrl {__version__}: asynchronous reinforcement learning of robot policies "
        "inside world models\n\n"
        f"usage: asyncrl COMMAND [arguments]\n\n{rows}\n\n"
        "`asyncrl COMMAND --help` explains a command. Begin with: asyncrl train"
    )


def about(command: str) -> str:
    """Return what a command does, and its arguments, from its module's docstring, without importing it."""
    spec = find_spec(COMMANDS[command].partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    call, _, what = text.splitlines()[0].partition("`: ")
    arguments = call.removeprefix(f"`asyncrl {command}").strip()
    return f"{what.rstrip('.')}{': ' if arguments else ''}{arguments}"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `asyncrl` program: runs one command and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"asyncrl {__version__}")
        raise SystemExit(0)
    raise SystemExit(run(arguments[0], arguments[1:]))


def run(command: str, arguments: list[str]) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 asked for something that cannot work."""
    try:
        if command not in COMMANDS:
            raise ConfigError(_unknown(command))
        module, function = COMMANDS[command].split(":")
        return int(getattr(import_module(module), function)(arguments) or 0)
    except AsyncRLError as error:
        notes = getattr(error, "__notes__", ())  # Such as where a run that failed can go on.
        print("\n".join((f"asyncrl {command}: {error}", *notes)), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # Whoever read the output has left, like `head`. What is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _unknown(command: str) -> str:
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"Perhaps you meant `asyncrl {near[0]}`." if near else f"There are: {', '.join(COMMANDS)}."
    return f"there is no command {command!r}. {hint}"


def torchrun_main() -> None:
    """Entry point of torchrun_scripts/train.sh: what a rank of torchrun runs."""
    raise SystemExit(run("train", sys.argv[1:]))


def evaluate_main() -> None:
    """Entry point of torchrun_scripts/evaluate.sh."""
    raise SystemExit(run("evaluate", sys.argv[1:]))


if __name__ == "__main__":
    main()
