"""Every command's usage says in words what its positional arguments are."""

from __future__ import annotations

import re

import pytest

from asyncrl import cli

SUBCOMMANDS = {
    "replay": ["list", "show", "video", "sheet", "stats", "verify", "imagine", "export", "prune", "compact"],
    "recordings": ["list", "stats", "import", "export"],
    "runs": ["list", "compare", "gc"],
    "fit": ["policy", "world", "reward", "starts", "decoder"],
    "simulators": ["list", "lite"],
}


def usage(call: str, capsys: pytest.CaptureFixture[str]) -> str:
    command, *rest = call.split()
    with pytest.raises(SystemExit) as left:
        cli.run(command, [*rest, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    "call",
    [c for c in cli.COMMANDS if c not in SUBCOMMANDS]
    + [f"{c} {s}" for c in SUBCOMMANDS for s in SUBCOMMANDS[c]],
)
def test_no_positional_argument_is_named_after_its_type(
    call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without_flags = re.sub(r"--[a-z-]+ \[?(STR|PATH|INT|FLOAT)", "--flag", usage(call, capsys))
    assert not re.search(r"\b(STR|PATH|INT|FLOAT)\b(?! ?\.\.\.)", without_flags)
