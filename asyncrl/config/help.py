"""Short help of `asyncrl COMMAND --help`: the flags that are often used, on one screen. No torch.

    The run
      --updates N             optimizer updates to make in all (10)

Brackets contain the default, or the value of a file on the command line. `--help-all` shows every flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

SHORT: Final = ("-h", "--help")
ALL: Final = "--help-all"
COLUMN: Final = 34
"""Column of the description; a longer flag is followed by a blank."""
WIDTH: Final = 80
DRY_RUN: Final = "--dry-run"


class ShortHelp:
    """Short help of one command."""

    def __init__(self, command: str, usage: str, about: str, rows: str, *examples: str) -> None:
        """Define it.

        Args:
            usage: Words after the command.
            rows: Lines: a heading, ``section.setting VALUE: description``, or ``--flag: description`` of a
            flag
                that is no setting.
            examples: Whole commands.
        """
        self.command, self.usage, self.about, self.examples = command, usage, about, examples
        self._rows = [row.partition(": ") for row in rows.strip().splitlines()]

    def text(self, settings: Any) -> str:
        """Format it with the values of `settings`."""
        lines = [f"usage: {self.command} {self.usage}", "", self.about]
        for flag, colon, what in self._rows:
            if not colon:
                lines += ["", flag]
            elif flag.startswith("--"):
                lines.append(f"  {flag:<{COLUMN - 3}} {what}")
            else:
                name, _, value = flag.partition(" ")
                shown = f"--{name.replace('_', '-')} {value}".rstrip()
                lines.append(f"  {shown:<{COLUMN - 3}} {what}{_default(value_of(settings, name))}")
        lines += ["", *(f"  {example}" for example in self.examples)]
        return "\n".join([*lines, "", f"Every flag, with all that it does: {self.command} {ALL}"])

    def own(self) -> dict[str, str]:
        """Return flag and description of the flags that are no settings."""
        return {flag: what for flag, _, what in self._rows if flag.startswith("--")}

    def about_all(self, settings: type) -> str:
        """Return the head of the full help: the docstring of the settings, and other flags."""
        own = (f"{flag}: {what}." for flag, what in self.own().items())
        return " ".join([inspect.cleandoc(settings.__doc__ or ""), *own, "--help: what is often used."])

    def names(self) -> Iterator[str]:
        """Yield the names of the settings."""
        yield from (flag.split()[0] for flag, colon, _ in self._rows if colon and not flag.startswith("--"))


def answer_help(arguments: Sequence[str], short: Callable[[], str]) -> list[str]:
    """Print the short help and exit with 0 if asked for; else return the arguments."""
    if ALL in arguments:
        return ["--help"]
    if any(argument in SHORT for argument in arguments):
        print(short())
        raise SystemExit(0)
    return list(arguments)


def value_of(settings: Any, name: str) -> Any:
    """Return a setting by its name with its section."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def _default(value: Any) -> str:
    """Format a default; switches and empty values have none."""
    if isinstance(value, bool) or value in ("", (), Path()):
        return ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"


_MODELS: Final = """\
Models
policy NAME: shipped, a folder, or a class
world NAME: world model, or a simulator
reward NAME: by default the one of the world
start_states FILE: where episodes begin
lora.rank N: adapters; 0 trains all weights
"""
_PROCESSES: Final = """\
Processes
placement TEXT: like learner=0,actor=1-3
device auto|cpu|cuda: where the models run
actor.slots N: episodes at once per actor
actor.max_decisions N: per episode; 0: the world says it
algorithm.micro_batch N: decisions per pass: memory, speed
learner.precision fp32|bf16: of the learner's passes
"""
TRAIN: Final = ShortHelp(
    "asyncrl train",
    "[CONFIG.toml ...] [--flags]",
    """Improve a policy inside a world model or a simulator. Of several files a later
one wins over those before it, and flags win over all.""",
    f"""
The run
updates N: optimizer updates to make in all
run_dir FOLDER: where everything goes
resume: go on with --run-dir, or the newest run
seed N: of start states, episodes and noise
checkpoint_every N: updates between two checkpoints
evaluate_every N: updates between two true measurements
inline: one process, in turns: for debugging
--dry-run: check, print the settings, start nothing
{_MODELS}Learning
algorithm.kind grpo|ppo: siblings, or a critic
algorithm.group_size N: episodes from each start state
algorithm.groups_per_update N: groups in one update
algorithm.temperature X: of the policy's sampling
optimizer.learning_rate X: of AdamW
correction.kind NAME: for samples of older policies
replay.max_lag N: oldest version that is trained on
{_PROCESSES}""",
    "asyncrl train configs/tabletop_ppo.toml --updates 20 --run-dir runs/mine",
)
DOCTOR: Final = ShortHelp(
    "asyncrl doctor",
    "[CONFIG.toml ...] [--flags]",
    """Check everything that `asyncrl train` with the same settings needs on this host;
nothing is started. Exit code 1 when it cannot run.""",
    f"""
The report
--json: a list: name, verdict, seen, advice
--simulator NAME: check a simulator instead
{_MODELS}{_PROCESSES}""",
    "asyncrl doctor configs/tabletop_ppo.toml --placement learner=0,actor=1-3",
    "asyncrl doctor --simulator NAME --help",
)
AUDIT: Final = ShortHelp(
    "asyncrl audit",
    "[POLICY] [--flags]",
    """Imagine held-out episodes closed-loop, play the same actions in the simulator,
and compare: which imagined successes are false, and whose fault it is. What is
left open is as in the run that the policy is of.""",
    """
What is audited
every_checkpoint: all that the run kept, a row each
world NAME: world model that imagines
reward NAME: by default the one of the world
max_decisions N: 0: the world says it
success_threshold X: of the reward model
success_frames N|last: in a row, or a decision's last
temperature X: 0: the most likely actions
The truth
simulator NAME: built-in, or package.module:Class
episodes N: 0: 128; starts that are seeds
trials N: stored starts of each task; 0: all
seed N: which of the held-out starts
How fast, and what is written
rows N: episodes imagined together
workers N: simulator processes
device auto|cpu|cuda: where the models run
json FILE: the result, with every episode
""",
    "asyncrl audit runs/mine --every-checkpoint --episodes 256",
)
EVALUATE: Final = ShortHelp(
    "asyncrl evaluate",
    "[POLICY] [--flags]",
    """Play a policy from held-out starts in a true simulator and count successes.
POLICY is a run (its newest checkpoint), a checkpoint, a folder, a shipped name,
a class, or 'expert': the simulator's own.""",
    """
What is played
simulator NAME: built-in, or package.module:Class
simulator_settings K=V ...: of the simulator's class
episodes N: 0: 256; starts that are seeds
tasks TASK ...: of stored starts; none: all
trials N: stored starts of each task; 0: all
seed N: which of the held-out starts
temperature X: 0: the most likely actions
How fast
workers N: simulator processes
places N: episodes of each; 0: it says
device auto|cpu|cuda: where the policy runs
What is written
json FILE: the result, with every episode
movies FOLDER: a movie of every episode
video FILE: true beside imagined, .gif or .mp4
world NAME: that imagines for --video
tensorboard FOLDER: eval/* as curves
""",
    "asyncrl evaluate runs/mine --episodes 256 --video sheet.gif",
)
COLLECT: Final = ShortHelp(
    "asyncrl collect",
    "--out FOLDER [--flags]",
    """Record episodes of a true simulator as HDF5, from a scripted expert or a policy.""",
    """
What is recorded
out FOLDER: to write; must be new
simulator NAME: built-in, or package.module:Class
simulator_settings K=V ...: of the simulator's class
episodes N: to record
tasks TASK ...: of stored starts; none: all in turn
seed N: first simulator seed
image_size N: pixels; 0: the simulator's own
Who plays
policy NAME: instead of the expert
temperature X: of the policy
expert.noise X X: least and most of the expert's
How fast
workers N: simulator processes
places N: episodes of each; 0: it says
""",
    "asyncrl collect --out data/demos --episodes 1000 --expert.noise 0.1 0.25",
)
CONVERT: Final = ShortHelp(
    "asyncrl convert",
    "SOURCE OUT [--flags]",
    """Write a policy with chosen conventions or merged adapters, complete for other
stacks, with a model card.""",
    """
What is written
original FOLDER: published; gives back what only others need
dtype TYPE: source, bfloat16 or float32
What a published folder does not say
unnorm_key NAME: which action statistics
convention rlinf|oft: how it was trained
gripper NAME: sign of its action
decoding NAME: parallel or autoregressive
adapter FOLDER: peft adapter to merge on the way
""",
    "asyncrl convert runs/mine EXPORT --original PUBLISHED",
)
