"""The command line: `asyncrl COMMAND ...`. Starts fast: a command's code is imported only when it runs."""

from __future__ import annotations

import sys
from importlib import import_module

from asyncrl import __version__
from asyncrl.errors import AsyncRLError, ConfigError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "asyncrl.commands.train:main",
        "improve a policy inside a world model: [CONFIG.toml] [--flags]",
    ),
    "actor": ("asyncrl.commands.actor:main", "join a running run as one more actor, from any host: --join"),
    "evaluate": ("asyncrl.commands.evaluate:main", "success rate of a checkpoint in the true simulator"),
    "collect": ("asyncrl.commands.collect:main", "record the simulator: a scripted expert, or a policy"),
    "fit": ("asyncrl.commands.fit:main", "models from recordings: policy | world | reward | starts"),
    "convert": (
        "asyncrl.commands.convert:main",
        "policies from and to the Hugging Face layout of OpenVLA: SOURCE OUT",
    ),
    "replay": (
        "asyncrl.replay_tools.commands:run_inspection",
        "look into a replay: list | show | video | sheet | stats | verify | export | prune",
    ),
    "check": (
        "asyncrl.commands.check:main",
        "does a class of yours keep its protocol: policy | world | reward | simulator | ...",
    ),
    "doctor": (
        "asyncrl.commands.doctor:main",
        "check everything a run needs on this host: [CONFIG.toml] [--flags]",
    ),
    "status": ("asyncrl.commands.status:main", "what every process of a run is doing, and since when"),
    "keys": ("asyncrl.commands.keys:main", "make keys for a replay that other hosts can reach"),
    "configs": ("asyncrl.commands.configs:main", "list the shipped configuration files"),
    "metrics": ("asyncrl.commands.metrics:main", "print the reference page of all metrics"),
}


def usage() -> str:
    """The text of `asyncrl --help`."""
    rows = "\n".join(f"  {name:<9} {about}" for name, (_, about) in COMMANDS.items())
    return (
        f"asyncrl {__version__}: asynchronous reinforcement learning of robot policies "
        "inside world models\n\n"
        f"usage: asyncrl COMMAND [arguments]\n\n{rows}\n\n"
        "`asyncrl COMMAND --help` explains a command. Begin with: asyncrl train"
    )


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
        module, function = COMMANDS[command][0].split(":")
        return int(getattr(import_module(module), function)(arguments) or 0)
    except ConfigError as error:
        print(f"asyncrl {command}: {error}", file=sys.stderr)
        return 2
    except AsyncRLError as error:
        print(f"asyncrl {command}: {error}", file=sys.stderr)
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
