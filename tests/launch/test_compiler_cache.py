"""Where the compiler keeps its results: a folder per version, unless the user chose one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrl
from asyncrl.devices.tensors import INDUCTOR, TRITON, compiler_cache_folder, use_compiler_cache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # So that it is put back afterwards.
        monkeypatch.delenv(name)


def test_the_folder_names_versions_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = f"{asyncrl.__version__}-{torch.__version__}"
    assert compiler_cache_folder(CPU) == tmp_path / "cache" / "asyncrl" / "compiled" / f"{versions}-cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 / x")
    gpu = compiler_cache_folder(torch.device("cuda", 0))
    assert gpu.name == f"{versions}-NVIDIA_H100_80GB_HBM3_x"


def test_what_is_compiled_is_kept_there_by_the_user_alone() -> None:
    use_compiler_cache(CPU)
    folder = compiler_cache_folder(CPU)
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder), str(folder / "triton"))
    assert folder.stat().st_mode & 0o077 == 0


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/mine")
    use_compiler_cache(CPU)
    assert os.environ[INDUCTOR] == "/mine"


def test_torch_looks_there_whatever_its_imports_wrote_into_the_variable() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

    assert cache_dir() == os.environ[INDUCTOR] == default_cache_dir()
    use_compiler_cache(CPU)
    assert cache_dir() == str(compiler_cache_folder(CPU))
    assert triton_cache_dir(0) == str(compiler_cache_folder(CPU) / "triton")


def test_where_it_cannot_be_made_torch_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_compiler_cache(CPU)
    assert INDUCTOR not in os.environ
    assert INDUCTOR in caplog.text
