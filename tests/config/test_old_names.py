"""A setting that was renamed or removed names what stands in its place, in a file as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.loading import load_files, parse
from asyncrl.config.old_names import REMOVED, RENAMED, RENAMED_VALUES, successor
from asyncrl.config.run import TrainConfig
from asyncrl.config.short_help import value_of
from asyncrl.errors import ConfigError

KNOWN = (Path(__file__).parents[1] / "data" / "setting_names.txt").read_text().split()
"""Every setting that there ever was. A new one is added when it is documented."""


def exists(name: str) -> bool:
    settings: Any = TrainConfig()
    try:
        value_of(settings, name)
    except AttributeError:
        return False
    return True


def test_no_setting_that_there_was_is_merely_unknown() -> None:
    lost = [name for name in KNOWN if not (exists(name) or name in RENAMED or name in REMOVED)]
    assert not lost, f"add to RENAMED or REMOVED of config/old_names.py what became of {lost}"


def test_every_successor_exists_and_no_old_name_does() -> None:
    assert not [new for new in RENAMED.values() if not exists(new)]
    assert not [old for old in (*RENAMED, *REMOVED) if exists(old)]
    assert not [name for name, _ in RENAMED_VALUES if not exists(name)]


def test_what_never_was_a_setting_has_no_successor() -> None:
    assert successor("replay.uses") == " It is called 'max_reuse' now."
    assert successor("replay.shared_megabytes").startswith(" It is gone. Leave it out")
    assert successor("replay.max_lag") == successor("nothing") == ""


def test_an_old_name_in_the_second_of_two_files_is_answered_with_file_and_successor(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("updates = 3\n")
    (tmp_path / "b.toml").write_text("[replay]\nuses = 2\n")
    with pytest.raises(ConfigError, match=r"b\.toml \[replay\] sets 'uses'.*It is called 'max_reuse' now"):
        load_files([tmp_path / "a.toml", tmp_path / "b.toml"])


def test_an_old_flag_written_with_underscores_is_answered_too() -> None:
    with pytest.raises(ConfigError, match=r"--replay\.group_deadline is called --replay.group-timeout now"):
        parse(["--replay.group_deadline", "3"])
