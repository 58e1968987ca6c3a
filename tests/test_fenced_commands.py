"""Every command that a page, a recipe or a script tells a reader to type is understood by its parser."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from support import ROOT
from support.fenced_commands import HEADS, PAGES, TYPED, Command, Fence, check, commands, fences, head


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_survive_copying(page: Path) -> None:
    assert problems(list(fences(page))) == ""


@pytest.mark.parametrize("path", HEADS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_in_the_comments_of_a_file_survive_copying(path: Path) -> None:
    assert problems([head(path)]) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_compiles(page: Path) -> None:
    for fence in fences(page):
        if fence.tag == "python":
            compile("\n".join(fence.lines), fence.where, "exec")


def test_most_of_what_is_checked_is_ours() -> None:
    every = [fence for page in PAGES for fence in fences(page)] + [head(path) for path in HEADS]
    found = [command.words[0] for fence in every if fence.tag in TYPED for command in commands(fence)]
    assert found.count("asyncrl") > 100
    assert found.count("torchrun") > 20
    assert found.count("python") > 5


def test_a_block_is_read_as_a_shell_would() -> None:
    text = (
        'F="configs/tabletop.toml --seed 1"',
        "asyncrl train $F > all.toml  # why",
        "OMP_NUM_THREADS=1 torchrun \\",
        "    torchrun_scripts/train.sh && asyncrl runs | head",
        "update  success",
        "# asyncrl nothing",
    )
    found = [command.words for command in commands(Fence(where="here", tag="", lines=text))]
    assert found == [
        ("asyncrl", "train", "configs/tabletop.toml --seed 1"),
        ("torchrun", "torchrun_scripts/train.sh"),
        ("asyncrl", "runs"),
        ("head",),
    ]


def test_in_a_block_with_prompts_the_rest_is_output() -> None:
    text = ("$ asyncrl runs", "asyncrl is what it prints", "$ asyncrl configs")
    found = [command.words for command in commands(Fence(where="here", tag="", lines=text))]
    assert found == [("asyncrl", "runs"), ("asyncrl", "configs")]


WRONG = {
    "asyncrl train --updats 3": "updates",
    "asyncrl train --resume      the newest run": "the",
    "asyncrl train configs/none.toml": "cannot be read",
    "asyncrl fitt policy": "no command",
    "asyncrl fit policy --data a": "--out",
    "asyncrl evaluate": "nothing is evaluated",
    "asyncrl doctor --simulator tabletop --seeds 3": "seeds",
    "torchrun --nproc-per-node 2 torchrun_scripts/trian.sh": "no file",
    "torchrun --nproc-per-node 2 torchrun_scripts/train.sh --seeed 1": "seed",
    "torchrun -m asyncrl trian": "no command",
    "NPROC=3 bash torchrun_scripts/train.sh configs/NAME.toml   the same": "the",
    "python benchmarks/none.py": "no file",
    "python benchmarks/staleness.py run OUT --sedes 1": "--sedes",
    'python benchmarks/asynchrony.py --flags="--updats 3"': "updates",
    "python -m asyncrl evaluate a b": "b",
    "pip install -e '.[everything]'": "extra",
    "docker run --rm asyncrl train --updats 3": "updates",
    "hf download NAME --local-dir models/NAME": "OWNER/NAME",
    "make dcos": "no target",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_command_that_does_not_survive_copying_is_found(line: str) -> None:
    (command,) = commands(Fence(where="here", tag="", lines=(line,)))
    assert WRONG[line] in problem(command)


@pytest.mark.parametrize("line", ["asyncrk train", "frobnicate --all"])
def test_in_a_block_of_commands_every_line_is_one(line: str) -> None:
    with pytest.raises(AssertionError, match="no program that is known"):
        list(commands(Fence(where="here", tag="bash", lines=(line,))))
