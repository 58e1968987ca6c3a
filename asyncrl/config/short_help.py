"""Writes `asyncrl COMMAND --help`: what is often used, on one screen; `--help-all` is every flag. No torch.

    The run
      --updates N             optimizer updates to make in all (10)

A table of `Often` says which flags these are; what stands in brackets is the settings' own default, or what a
file on the command line says.

Which flags `--help` shows of the commands that have many. Imports no torch; tests check that all exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHORT: Final = ("-h", "--help")
ALL: Final = "--help-all"
COLUMN: Final = 34
"""Where what a flag does begins; a longer flag has a blank behind it."""
WIDTH: Final = 80
"""Columns that no line goes beyond."""


@dataclass(frozen=True)
class Often:
    """A line of the short help."""

    name: str
    """Of the setting, with its section: 'replay.max_lag'."""
    value: str
    """What stands behind the flag; empty: the flag takes nothing."""
    what: str
    """It does, in few words."""


Groups = Mapping[str, Sequence[Often]]
"""Heading -> what stands below it."""


@dataclass(frozen=True, kw_only=True)
class ShortHelp:
    """Everything of a short help but the values of the settings."""

    command: str
    """With the program: 'asyncrl train'."""
    usage: str
    """What stands behind the command."""
    about: str
    """One or two lines."""
    groups: Groups
    examples: Sequence[str]
    """Whole commands."""
    own: Mapping[str, str] | None = None
    """Flags that are no settings -> what they do; shown below the first heading."""

    def text(self, settings: Any) -> str:
        """Write it."""
        lines = [f"usage: {self.command} {self.usage}", "", self.about]
        for number, (heading, group) in enumerate(self.groups.items()):
            lines += ["", heading, *(_line(one, settings) for one in group)]
            if not number:
                lines += [_row(flag, what) for flag, what in (self.own or {}).items()]
        lines += ["", *(f"  {example}" for example in self.examples)]
        return "\n".join([*lines, "", f"Every flag, with all that it does: {self.command} {ALL}"])

    def about_all(self, settings: type) -> str:
        """Write what stands above all flags: what the settings say of themselves, and the own flags."""
        own = (f"{flag}: {what}." for flag, what in (self.own or {}).items())
        return " ".join([inspect.cleandoc(settings.__doc__ or ""), *own, "--help: what is often used."])

    def names(self) -> Iterator[str]:
        """Name the settings that are shown."""
        yield from (one.name for group in self.groups.values() for one in group)


def answer_help(arguments: Sequence[str], short: Callable[[], str]) -> list[str]:
    """Print the short help and exit where it is asked for; else return the arguments.

    Raises:
        SystemExit: With 0, after the short help.
    """
    if ALL in arguments:
        return ["--help"]
    if any(argument in SHORT for argument in arguments):
        print(short())
        raise SystemExit(0)
    return list(arguments)


def value_of(settings: Any, name: str) -> Any:
    """Read a setting by its name with its section."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def _line(one: Often, settings: Any) -> str:
    flag = f"--{one.name.replace('_', '-')} {one.value}"
    return _row(flag.rstrip(), f"{one.what}{_default(value_of(settings, one.name))}")


def _default(value: Any) -> str:
    """Write a default behind what a flag does; a switch and what is empty need none."""
    if isinstance(value, bool) or value in ("", (), Path()):
        return ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def _row(flag: str, what: str) -> str:
    return f"  {flag:<{COLUMN - 3}} {what}"


_RUN: Final = (
    Often("updates", "N", "optimizer updates to make in all"),
    Often("run_dir", "FOLDER", "where everything goes"),
    Often("resume", "", "go on with --run-dir, or the newest run"),
    Often("seed", "N", "of start states, episodes and noise"),
    Often("checkpoint_every", "N", "updates between two checkpoints"),
    Often("evaluate_every", "N", "updates between two true measurements"),
    Often("inline", "", "one process, in turns: for debugging"),
)
_MODELS: Final = (
    Often("policy", "NAME", "shipped, a folder, or a class"),
    Often("world", "NAME", "world model, or a simulator"),
    Often("reward", "NAME", "by default the one of the world"),
    Often("start_states", "FILE", "where episodes begin"),
    Often("lora.rank", "N", "adapters; 0 trains all weights"),
)
_LEARNING: Final = (
    Often("algorithm.kind", "grpo|ppo", "siblings, or a critic"),
    Often("algorithm.group_size", "N", "episodes from each start state"),
    Often("algorithm.groups_per_update", "N", "groups in one update"),
    Often("algorithm.temperature", "X", "of the policy's sampling"),
    Often("optimizer.learning_rate", "X", "of AdamW"),
    Often("correction.kind", "NAME", "for samples of older policies"),
    Often("replay.max_lag", "N", "oldest version that is trained on"),
    Often("synchronous", "", "lag 0, for comparison"),
)
_PROCESSES: Final = (
    Often("placement", "TEXT", "like learner=0,actor=1-3"),
    Often("device", "auto|cpu|cuda", "where the models run"),
    Often("actor.slots", "N", "episodes at once per actor"),
    Often("actor.max_decisions", "N", "per episode; 0: the world says it"),
    Often("algorithm.micro_batch", "N", "decisions per pass: memory, speed"),
    Often("learner.precision", "fp32|bf16", "of the learner's passes"),
)
DRY_RUN: Final = "--dry-run"
TRAIN: Final = ShortHelp(
    command="asyncrl train",
    usage="[CONFIG.toml ...] [--flags]",
    about="Improve a policy inside a world model or a simulator. Of several files a later\n"
    "one wins over those before it, and flags win over all.",
    groups={"The run": _RUN, "Models": _MODELS, "Learning": _LEARNING, "Processes": _PROCESSES},
    own={DRY_RUN: "check, print the settings, start nothing"},
    examples=("asyncrl train configs/tabletop_ppo.toml --updates 20 --run-dir runs/mine",),
)
DOCTOR: Final = ShortHelp(
    command="asyncrl doctor",
    usage="[CONFIG.toml ...] [--flags]",
    about="Check everything that `asyncrl train` with the same settings needs on this host;\n"
    "nothing is started. Exit code 1 when it cannot run.",
    groups={"The report": (), "Models": _MODELS, "Processes": _PROCESSES},
    own={
        "--json": "a list: name, verdict, seen, advice",
        "--simulator NAME": "check a simulator instead",
    },
    examples=(
        "asyncrl doctor configs/tabletop_ppo.toml --placement learner=0,actor=1-3",
        "asyncrl doctor --simulator NAME --help",
    ),
)
"""The settings are those of `asyncrl train`; these matter most for what a host must have."""
AUDIT: Final = ShortHelp(
    command="asyncrl audit",
    usage="[POLICY] [--flags]",
    about="Imagine held-out episodes closed-loop, play the same actions in the simulator,\n"
    "and compare: which imagined successes are false, and whose fault it is. What is\n"
    "left open is as in the run that the policy is of.",
    groups={
        "What is audited": (
            Often("every_checkpoint", "", "all that the run kept, a row each"),
            Often("world", "NAME", "world model that imagines"),
            Often("reward", "NAME", "by default the one of the world"),
            Often("max_decisions", "N", "0: the world says it"),
            Often("success_threshold", "X", "of the reward model"),
            Often("success_frames", "N|last", "in a row, or a decision's last"),
            Often("temperature", "X", "0: the most likely actions"),
        ),
        "The truth": (
            Often("simulator", "NAME", "built-in, or package.module:Class"),
            Often("episodes", "N", "0: 128; starts that are seeds"),
            Often("trials", "N", "stored starts of each task; 0: all"),
            Often("seed", "N", "which of the held-out starts"),
        ),
        "How fast, and what is written": (
            Often("rows", "N", "episodes imagined together"),
            Often("workers", "N", "simulator processes"),
            Often("device", "auto|cpu|cuda", "where the models run"),
            Often("json", "FILE", "the result, with every episode"),
        ),
    },
    examples=("asyncrl audit runs/mine --every-checkpoint --episodes 256",),
)
EVALUATE: Final = ShortHelp(
    command="asyncrl evaluate",
    usage="[POLICY] [--flags]",
    about="Play a policy from held-out starts in a true simulator and count successes.\n"
    "POLICY is a run (its newest checkpoint), a checkpoint, a folder, a shipped name,\n"
    "a class, or 'expert': the simulator's own.",
    groups={
        "What is played": (
            Often("simulator", "NAME", "built-in, or package.module:Class"),
            Often("simulator_settings", "K=V ...", "of the simulator's class"),
            Often("episodes", "N", "0: 256; starts that are seeds"),
            Often("tasks", "TASK ...", "of stored starts; none: all"),
            Often("trials", "N", "stored starts of each task; 0: all"),
            Often("seed", "N", "which of the held-out starts"),
            Often("temperature", "X", "0: the most likely actions"),
        ),
        "How fast": (
            Often("workers", "N", "simulator processes"),
            Often("places", "N", "episodes of each; 0: it says"),
            Often("device", "auto|cpu|cuda", "where the policy runs"),
        ),
        "What is written": (
            Often("json", "FILE", "the result, with every episode"),
            Often("movies", "FOLDER", "a movie of every episode"),
            Often("video", "FILE", "true beside imagined, .gif or .mp4"),
            Often("world", "NAME", "that imagines for --video"),
            Often("tensorboard", "FOLDER", "eval/* as curves"),
        ),
    },
    examples=("asyncrl evaluate runs/mine --episodes 256 --video sheet.gif",),
)
COLLECT: Final = ShortHelp(
    command="asyncrl collect",
    usage="--out FOLDER [--flags]",
    about="Record episodes of a true simulator as HDF5, from a scripted expert or a policy.",
    groups={
        "What is recorded": (
            Often("out", "FOLDER", "to write; must be new"),
            Often("simulator", "NAME", "built-in, or package.module:Class"),
            Often("simulator_settings", "K=V ...", "of the simulator's class"),
            Often("episodes", "N", "to record"),
            Often("tasks", "TASK ...", "of stored starts; none: all in turn"),
            Often("seed", "N", "first simulator seed"),
            Often("image_size", "N", "pixels; 0: the simulator's own"),
        ),
        "Who plays": (
            Often("policy", "NAME", "instead of the expert"),
            Often("temperature", "X", "of the policy"),
            Often("expert.noise", "X X", "least and most of the expert's"),
        ),
        "How fast": (
            Often("workers", "N", "simulator processes"),
            Often("places", "N", "episodes of each; 0: it says"),
        ),
    },
    examples=("asyncrl collect --out data/demos --episodes 1000 --expert.noise 0.1 0.25",),
)
CONVERT: Final = ShortHelp(
    command="asyncrl convert",
    usage="SOURCE OUT [--flags]",
    about="Write a policy with chosen conventions or merged adapters, complete for other\n"
    "stacks, with a model card.",
    groups={
        "What is written": (
            Often("original", "FOLDER", "published; gives back what only others need"),
            Often("dtype", "TYPE", "source, bfloat16 or float32"),
            Often("push", "OWNER/NAME", "send it to a hub"),
            Often("private", "", "with --push"),
        ),
        "What a published folder does not say": (
            Often("unnorm_key", "NAME", "which action statistics"),
            Often("convention", "rlinf|oft", "how it was trained"),
            Often("gripper", "NAME", "sign of its action"),
            Often("decoding", "NAME", "parallel or autoregressive"),
            Often("adapter", "FOLDER", "peft adapter to merge on the way"),
        ),
    },
    examples=("asyncrl convert runs/mine EXPORT --original PUBLISHED",),
)
