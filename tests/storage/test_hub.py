"""`--push`: what is sent, when, and what an error leaves behind. No network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands import convert
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.storage.assets import check_repo, files_of, push
from support.published import run_cli, some_policy


class SomeHub:
    """Takes what is sent, or refuses it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: list[tuple[str, bool, bool]] = []
        self.sent: dict[str, list[str]] = {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.error is not None:
            raise self.error
        self.made.append((repo_id, private, exist_ok))

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str
    ) -> Any:
        assert all((folder_path / name).is_file() for name in allow_patterns)
        self.sent[repo_id] = allow_patterns


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    some_policy().save(tmp_path / "policy")
    return tmp_path / "policy"


def test_an_export_is_sent_whole_and_its_files_are_named_first(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, out = SomeHub(), tmp_path / "out"
    arguments = [str(policy), str(out), "--push", "owner/name", "--private"]
    assert convert.main(arguments, hub) == 0
    assert hub.made == [("owner/name", True, True)]
    assert hub.sent["owner/name"] == sorted(path.name for path in out.iterdir())
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent["owner/name"])
    printed = capsys.readouterr().out
    assert "to owner/name (private if new):" in printed
    assert all(f"          {name}  " in printed for name in hub.sent["owner/name"])
    assert printed.index("          README.md") < printed.index("sent      https://huggingface.co/owner/name")
    assert "hf download owner/name --local-dir FOLDER" in (out / "README.md").read_text()


def test_nothing_is_sent_without_the_flag(tmp_path: Path, policy: Path) -> None:
    hub = SomeHub(AssertionError("was called"))
    assert convert.main([str(policy), str(tmp_path / "out")], hub) == 0


@pytest.mark.parametrize(
    "error",
    [OSError("401 Client Error\nUnauthorized"), ValueError("odd"), RuntimeError("no route"), KeyError("x")],
)
def test_a_hub_that_refuses_is_one_line_and_the_folder_stays(
    tmp_path: Path, policy: Path, error: Exception
) -> None:
    out = tmp_path / "out"
    with pytest.raises(AsyncRLError) as caught:
        convert.main([str(policy), str(out), "--push", "owner/name"], SomeHub(error))
    said = str(caught.value)
    assert "\n" not in said
    assert not isinstance(caught.value, ConfigError), "the settings were right: exit code 1"
    assert str(error).splitlines()[0] in said
    assert f"hf upload owner/name {out}" in said
    assert (out / "model.safetensors").is_file()
    assert (out / "README.md").is_file()


@pytest.mark.parametrize("repo", ["name", "a/b/c", "owner/na me", "owner/", "../x", "owner/name..x"])
def test_a_name_that_no_repository_has_is_refused_before_anything_is_written(
    tmp_path: Path, policy: Path, repo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"names no repository.*OWNER/NAME"):
        check_repo(repo)
    assert run_cli(policy, tmp_path / "out", "--push", repo) == 2
    assert "names no repository" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_private_alone_is_refused(tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(policy, tmp_path / "out", "--private") == 2
    assert "--push, which is not set" in capsys.readouterr().err


def test_links_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.json").write_text("{}")
    (folder / "link").symlink_to(tmp_path / "secret")
    hub = SomeHub()
    push(folder, "owner/name", private=False, tell=lambda line: None, hub=hub)
    assert [path.as_posix() for path in files_of(folder)] == ["deep/a.json"]
    assert hub.sent == {"owner/name": ["deep/a.json"]}
