"""The secret of a run: its own, kept from others, and not a copied folder's."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.storage import run_identity
from asyncrl.storage.run_identity import RunIdentity


def test_every_start_counts_and_keeps_the_secret(tmp_path: Path) -> None:
    first, second = run_identity.next_attempt(tmp_path), run_identity.next_attempt(tmp_path)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.secret == second.secret
    assert len(first.secret) == 64
    assert run_identity.read(tmp_path) == second
    assert stat.S_IMODE((tmp_path / "identity.json").stat().st_mode) == 0o600
    assert first.secret not in repr(first)


def test_two_runs_do_not_know_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = run_identity.next_attempt(tmp_path / "a"), run_identity.next_attempt(tmp_path / "b")
    assert a.knows(a.secret)
    assert not a.knows(b.secret)
    assert not a.knows("")
    assert not a.knows("é")


def test_a_copied_folder_gets_a_secret_of_its_own_and_a_moved_one_keeps_it(tmp_path: Path) -> None:
    original = tmp_path / "run"
    original.mkdir()
    before = run_identity.next_attempt(original)
    shutil.copytree(original, tmp_path / "copy")
    with pytest.raises(ConfigError, match="another folder"):
        run_identity.read(tmp_path / "copy")
    copy = run_identity.next_attempt(tmp_path / "copy")
    assert copy.attempt == 1
    assert not before.knows(copy.secret)
    original.rename(tmp_path / "moved")
    assert run_identity.read(tmp_path / "moved") == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "{}", "[" * 5000, '{"secret": 1, "attempt": 1, "folder": [1, 2]}', "\udcff"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "identity.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"identity\.json is damaged\. Delete it"):
        run_identity.next_attempt(tmp_path)


@pytest.mark.parametrize("attempt", [0, -1, True, 1.5, 10**30, "1"])
def test_a_number_that_counts_nothing_is_damage(tmp_path: Path, attempt: object) -> None:
    run_identity.next_attempt(tmp_path)
    path = tmp_path / "identity.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attempt": attempt}))
    with pytest.raises(ConfigError, match="damaged"):
        run_identity.read(tmp_path)


def test_a_file_that_others_can_read_is_no_secret(tmp_path: Path) -> None:
    run_identity.next_attempt(tmp_path)
    (tmp_path / "identity.json").chmod(0o644)
    with pytest.raises(ConfigError, match="others may know"):
        run_identity.read(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_something_else_in_its_place_is_an_error(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "identity.json", tmp_path / "precious"
    elsewhere.write_text("mine")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(elsewhere), "folder": Path.mkdir}[kind](path)
    with pytest.raises(ConfigError, match=r"identity\.json cannot be read"):
        run_identity.next_attempt(tmp_path)
    assert elsewhere.read_text() == "mine"


def test_nobody_knows_the_secret_of_no_run_by_chance() -> None:
    assert RunIdentity().knows("")
    assert not RunIdentity(secret="a" * 64, attempt=1).knows("")
