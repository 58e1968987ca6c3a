"""The command line: fast, and helpful to those who mistype."""

import errno
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncrl import __version__, cli
from asyncrl.errors import RunError


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    done = python(
        "import sys; from asyncrl import cli\n"
        "print('code', cli.main(['--help']))\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'mujoco', 'tyro', 'numpy'}\n"
        "print('heavy', sorted(heavy & sys.modules.keys()))"
    )
    *text, code, heavy = done.stdout.splitlines()
    assert (code, heavy, done.stderr) == ("code 0", "heavy []", "")
    for command in cli.COMMANDS:
        assert any(line.startswith(f"  {command} ") for line in text)


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("", "1"), ("4", "4")])
def test_every_command_computes_with_one_thread_unless_told_otherwise(given, expected, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    seen = list[str]()

    def functions(module: str) -> object:
        seen.append(os.environ["OMP_NUM_THREADS"])  # Torch reads it when a command's module imports it.
        names = {place.partition(":")[2] for place in cli.COMMANDS.values()}
        return SimpleNamespace(**dict.fromkeys(names, lambda arguments: 0))

    monkeypatch.setattr(cli, "import_module", functions)
    assert [cli.run(command, []) for command in cli.COMMANDS] == [0] * len(cli.COMMANDS)
    assert seen == [expected] * len(cli.COMMANDS)


SUBCOMMANDS = {
    name: cli.about(name).rpartition(": ")[2].split()[0].split("|")
    for name in ("fit", "recordings", "replay", "simulators")
}
CALLS = [*(cli.COMMANDS.keys() - SUBCOMMANDS), *(f"{c} {s}" for c in SUBCOMMANDS for s in SUBCOMMANDS[c])]


def help_of(call: str, capsys: pytest.CaptureFixture[str]) -> str:
    command, *rest = call.split()
    with pytest.raises(SystemExit) as left:
        cli.run(command, [*rest, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_help_names_every_subcommand(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"\{([\w,\s]+)\}", help_of(command, capsys))
    assert found
    assert SUBCOMMANDS[command] == found[1].split(",")


@pytest.mark.parametrize("call", sorted(CALLS))
def test_no_positional_argument_is_named_after_its_type(call: str, capsys) -> None:
    usage = help_of(call, capsys).splitlines()[0]
    without_flags = re.sub(r"--[a-z-]+ \[?(STR|PATH|INT|FLOAT)", "--flag", usage)
    assert not re.search(r"\b(STR|PATH|INT|FLOAT)\b(?! ?\.\.\.)", without_flags)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["-h"], 0), (["help"], 0), (["--version"], 0)])
def test_what_is_no_command_is_answered(arguments: list[str], code: int, capsys) -> None:
    assert cli.main(arguments) == code
    assert capsys.readouterr().out.startswith(f"asyncrl {__version__}")


def test_an_unknown_command_is_answered_with_the_nearest_one_or_the_list(capsys) -> None:
    assert cli.run("evalute", []) == 2
    assert "Perhaps you meant `asyncrl evaluate`" in capsys.readouterr().err
    assert cli.run("qqqq", []) == 2
    assert "There are: train, actor, evaluate, audit, pace, collect" in capsys.readouterr().err


def fails(arguments: list[str]) -> int:
    """Stand for a command whose files are missing."""
    raise RunError(f"nothing there for {arguments[0]}")


def test_an_error_of_ours_is_one_line_and_code_one(monkeypatch, capsys) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fails", f"{__name__}:fails")
    assert cli.run("fails", ["x"]) == 1
    assert capsys.readouterr().err == "asyncrl fails: nothing there for x\n"


def shell(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    text = command.replace("asyncrl", f"{sys.executable} -m asyncrl")
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=60, env=os.environ | environ
    )


@pytest.mark.parametrize("arguments", ["metrics", "--version", "train --help"])
def test_a_full_device_is_said_in_a_sentence_and_is_code_one(arguments: str) -> None:
    done = shell(f"asyncrl {arguments} > /dev/full")
    assert done.returncode == 1
    assert re.fullmatch(
        r"asyncrl[ a-z]*: \[Errno 28\] No space left on device\. Free disk space\.\n", done.stderr
    )


def test_with_nobody_to_complain_to_the_code_says_enough() -> None:
    assert shell("asyncrl metrics > /dev/full 2> /dev/full").returncode == 1
    assert shell("asyncrl qqqq 2>&-").returncode == 2


LEFTOVERS: dict[str, tuple[Exception, int, str]] = {
    "a folder": (IsADirectoryError(errno.EISDIR, "Is a directory", "runs"), 2, "runs cannot be used"),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 1, "Free disk space"),
    "too many files": (OSError(errno.EMFILE, "Too many open files"), 1, "ulimit -n"),
    "no UTF-8": (UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "the end"), 2, "is not UTF-8 text"),
    "a large number": (OverflowError("int too large to convert"), 2, "too large to compute with"),
    "many levels": (RecursionError("maximum recursion depth exceeded"), 2, "more levels than can be read"),
    "no memory": (MemoryError(), 1, "there is not enough memory"),
    "PyTorch's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "not enough memory"),
}
_raised: Exception = ValueError()


def raises(arguments: list[str]) -> int:
    """Stand for a command in which a library fails."""
    raise _raised


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_no_part_answered_is_a_sentence(name: str, monkeypatch, capsys) -> None:
    error, code, text = LEFTOVERS[name]
    monkeypatch.setitem(cli.COMMANDS, "fails", f"{__name__}:raises")
    monkeypatch.setattr(sys.modules[__name__], "_raised", error)
    monkeypatch.setattr(cli, "_give_up_output", lambda: None)
    assert cli.run("fails", []) == code
    said = capsys.readouterr().err
    assert said.startswith("asyncrl fails: ")
    assert text in said
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(type(error)):
        cli.run("fails", [])


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), OSError("no file")])
def test_a_bug_still_shows_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fails", f"{__name__}:raises")
    monkeypatch.setattr(sys.modules[__name__], "_raised", error)
    with pytest.raises(type(error)):
        cli.run("fails", [])
