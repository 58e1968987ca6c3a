"""Every command that a page, a recipe or a script tells a reader to type is understood by its parser."""

import ast
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import tyro

from asyncrl.commands import (
    COMMANDS,
    audit,
    collect,
    convert,
    doctor,
    evaluate,
    fit,
    pace,
    replay,
    runs,
    small,
)
from asyncrl.config.run import parse, split_files
from asyncrl.errors import ConfigError
from support import ROOT

PAGES: Final = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
HEADS: Final = (*sorted((ROOT / "configs").glob("*.toml")), *sorted((ROOT / "torchrun_scripts").iterdir()))
PROGRAMS: Final = (
    *("asyncrl", "torchrun", "python", "python3", "pip", "bash", "pytest", "sbatch", "tensorboard", "hf"),
    *("head", "docker", "apptainer", "mkdir", "scp", "curl", "export", "ruff", "pyright", "cp", "make", "cd"),
    *("echo", "nvidia-cuda-mps-control"),
)
"""What a line of a fenced block begins with when it is to be typed."""
ARGUMENTS: Final[dict[str, Any]] = {
    **{module.__name__.rpartition(".")[2]: module.ARGUMENTS for module in (fit, replay, runs)},
    **{"evaluate": evaluate.EvaluateConfig, "audit": audit.AuditConfig, "collect": collect.CollectConfig},
    **{"convert": convert.ConvertConfig, "pace": pace.PaceConfig, "check": doctor.CheckConfig},
    **{"actor": small.JoinOptions, "simulators": small.SIMULATORS, "keys": small.KeysConfig},
    **{"metrics": small.MetricsConfig, "recordings": collect.RECORDINGS, "status": runs.STATUS},
    "plot": runs.PlotConfig,
}
"""Command -> what its parser reads."""
TYPED: Final = ("", "bash")
"""Tags of fences with commands; `text` is for output and for the shape of a command."""
OWN_SETTINGS: Final = re.compile(r"^(?:configs/NAME|mine)\.toml$")
"""A file of settings that is the reader's own."""
OWN_PACKAGES: Final = ("my_lab", "my_robot")
"""Written by the reader, from the page."""
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_SEPARATORS: Final = ("&&", "||", "|", ";", "&")


@dataclass(frozen=True, kw_only=True)
class Fence:
    """A fenced block, or the comments at the head of a file."""

    where: str
    """Of its first line, ``docs/page.md:12``."""
    tag: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program with its arguments, as a shell would split them."""

    where: str
    words: tuple[str, ...]


def fences(path: Path) -> Iterator[Fence]:
    """Yield the fenced blocks of a page."""
    tag, begin, lines = None, 0, list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.match(r"^ *```(\w*)", line):
            if tag is None:
                tag, begin, lines = found[1], number + 1, []
                continue
            yield Fence(where=f"{path.relative_to(ROOT)}:{begin}", tag=tag, lines=tuple(lines))
            tag = None
        elif tag is not None:
            lines.append(line)
    assert tag is None, f"{path}: the last fence is not closed"


def head(path: Path) -> Fence:
    """Return the indented comments of a recipe or a script, in which commands are written."""
    lines = path.read_text(encoding="utf-8").splitlines()
    indented = [line[1:].strip() if re.match(r"^#  +\S", line) else "" for line in lines]
    return Fence(where=f"{path.relative_to(ROOT)}:1", tag="", lines=tuple(indented))


def commands(fence: Fence) -> Iterator[Command]:
    """Yield the commands of a block.

    In a block with prompts (`$ `) the other lines are output. Without a tag and without prompts, lines that
    begin with no known program are output too; with the tag `bash` every line is a command.
    """
    prompted = any(line.startswith("$ ") for line in fence.lines)
    variables: dict[str, str] = {}
    for line in _whole_lines(fence.lines):
        if prompted and not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ").strip()
        if not text or text.startswith("#"):
            continue
        if not prompted and fence.tag == "" and not _is_typed(text):
            continue
        for words in _split(text, fence.where, variables):
            yield Command(where=fence.where, words=words)


def _whole_lines(lines: tuple[str, ...]) -> Iterator[str]:
    """Join lines that end in a backslash or within quotes."""
    held = ""
    for line in lines:
        held += line
        if held.endswith("\\"):
            held = held[:-1]
        elif _odd_quotes(held):
            held += "\n"
        else:
            yield held
            held = ""
    if held:
        yield held


def _odd_quotes(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return _is_typed(text.removeprefix("$ "))
    return False


def _is_typed(text: str) -> bool:
    words = [word for word in text.split() if not _ASSIGNMENT.match(word)]
    return bool(_ASSIGNMENT.match(text)) or bool(words and _program(words[0]))


def _program(word: str) -> bool:
    return word in PROGRAMS or word.startswith("./")


def _split(text: str, where: str, variables: dict[str, str]) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    skipped = False
    for found in [*lexer, ";"]:
        word = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), found)
        if skipped:
            skipped = False
        elif word in (">", ">>", "<"):
            skipped = True
        elif word not in _SEPARATORS:
            words.append(word)
        else:
            while words and _ASSIGNMENT.match(words[0]):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words:
                assert _program(words[0]), f"{where}: {words[0]!r} is no program that is known: {text}"
                yield tuple(words)
            words = []


def check(command: Command) -> None:
    """Give a command of ours to its parser; raises if it does not survive copying."""
    program, *words = command.words
    assert not {"...", "…"} & set(words), "what stands for more cannot be typed"
    match program:
        case "asyncrl":
            _asyncrl(words)
        case "torchrun":
            _torchrun(words)
        case "python" | "python3":
            _python(words)
        case "pip":
            _pip(words)
        case "bash" | "sbatch":
            _script(_behind_flags(words, ("--nodes", "--gpus-per-node")))
        case "docker" | "apptainer" if words[0] == "run":
            _asyncrl(words[1 + next(i for i, word in enumerate(words) if word.startswith("asyncrl")) :])
        case "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), f"no target {words[0]}"
        case _ if program.startswith("./"):
            _script([program.removeprefix("./"), *words])


def _asyncrl(words: list[str]) -> None:
    if not words or {"--version", "--help", "--help-all"} & set(words):
        return
    name, *arguments = words
    assert name in COMMANDS, f"there is no command {name!r}"
    if name in ("train", "doctor"):
        _settings(name, [word for word in arguments if word not in ("--dry-run", "--json")])
        return
    if words[:2] == ["runs", "plot"]:
        name, arguments = "plot", arguments[1:]
    wanted = ARGUMENTS[name]
    if name == "pace":
        _, arguments = tyro.cli(wanted, args=arguments, return_unknown_args=True)
        _settings("train", arguments)
        return
    read: Any = tyro.cli(wanted, args=arguments, prog=f"asyncrl {name}")
    assert name != "evaluate" or read.checkpoint, "nothing is evaluated"


def _settings(name: str, arguments: list[str]) -> None:
    """Read settings as `train` does. The reader's own files are left out, all others must be there."""
    if name == "doctor" and "--simulator" in arguments:
        tyro.cli(doctor.SimulatorConfig, args=arguments, prog="asyncrl doctor")
        return
    files, flags = split_files(arguments)
    there = [str(ROOT / file) for file in files if not OWN_SETTINGS.match(str(file))]
    parse([*there, *flags])


def _torchrun(words: list[str]) -> None:
    if "-m" in words:
        return _python(words[words.index("-m") :])
    own = ("nproc-per-node", "nnodes", "max-restarts", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
    script, *arguments = _behind_flags(words, tuple(f"--{name}" for name in own))
    return _script(arguments if script == "bash" else [script, *arguments])


def _behind_flags(words: list[str], with_value: tuple[str, ...]) -> list[str]:
    """Leave out the launcher's own flags, which stand first."""
    place = 0
    while words[place].startswith("-"):
        place += 2 if words[place] in with_value else 1
    return words[place:]


def _script(words: list[str]) -> None:
    path, *arguments = words
    assert (ROOT / path).is_file(), f"there is no file {path}"
    name = Path(path).stem
    if name == "libero_spatial":
        (stages,) = re.findall(r'^STAGES="(.*)"$', (ROOT / path).read_text(), re.MULTILINE)
        unknown = set(arguments) - {"--anyway", *stages.split()}
        assert not unknown, f"{path} has no stage {sorted(unknown)[0]}"
    elif name == "rebuild_assets":
        assert not arguments, f"{path} takes no arguments"
    else:
        _asyncrl(["evaluate" if name == "evaluate" else "train", *arguments])


def _python(words: list[str]) -> None:
    if words[0] == "-c":
        ast.parse(words[1])
        return
    if words[0] == "-m":
        if words[1].partition(".")[0] not in OWN_PACKAGES:
            assert words[1] == "asyncrl", f"python -m {words[1]} is not ours"
            _asyncrl(words[2:])
        return
    path, *arguments = words
    assert (ROOT / path).is_file(), f"there is no file {path}"
    source = (ROOT / path).read_text(encoding="utf-8")
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, given, text = flag.partition("=")
        if re.match(r"--[a-z]", name):
            field = re.escape(name[2:].replace("-", "_"))
            assert re.search(rf"\b{field}\b|{re.escape(name)}\b", source), f"{path} has no {name}"
        if name in ("--flags", "--ppo-flags"):
            _settings("train", shlex.split(text if given else value))


def _pip(words: list[str]) -> None:
    assert words[0] == "install"
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|asyncrl)\[([\w,]+)\]", word):
            missing = set(found[1].split(",")) - set(project["optional-dependencies"])
            assert not missing, f"there is no extra {missing}"


def problem(command: Command) -> str:
    """What is wrong with a command; empty: nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            check(command)
    except (AssertionError, ConfigError) as error:
        return str(error)
    except SystemExit as error:
        return said.getvalue() if error.code else ""
    return ""


def problems(found: list[Fence]) -> str:
    lines = []
    for command in (command for fence in found if fence.tag in TYPED for command in commands(fence)):
        if wrong := problem(command):
            lines.append(f"{command.where}: {' '.join(command.words)}\n{wrong}")
    return "\n".join(lines)


@pytest.mark.parametrize("path", [*PAGES, *HEADS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_and_the_python_of_a_file_survive_copying(path: Path) -> None:
    found = list(fences(path)) if path in PAGES else [head(path)]
    assert problems(found) == ""
    for fence in found:
        if fence.tag == "python":
            compile("\n".join(fence.lines), fence.where, "exec")


WRONG = {
    "asyncrl train --updats 3": "updates",
    "asyncrl train --resume      the newest run": "the",
    "asyncrl train configs/none.toml": "cannot be read",
    "asyncrl fit policy --data a": "--out",
    "asyncrl doctor --simulator tabletop --seeds 3": "seeds",
    "torchrun --nproc-per-node 2 torchrun_scripts/trian.sh": "no file",
    "NPROC=3 bash torchrun_scripts/train.sh configs/NAME.toml   the same": "the",
    "python benchmarks/staleness.py run OUT --sedes 1": "--sedes",
    'python benchmarks/asynchrony.py --flags="--updats 3"': "updates",
    "pip install -e '.[everything]'": "extra",
    "docker run --rm asyncrl train --updats 3": "updates",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_command_that_does_not_survive_copying_is_found(line: str) -> None:
    (command,) = commands(Fence(where="here", tag="", lines=(line,)))
    assert WRONG[line] in problem(command)
