"""The container recipes copy and install what is there, alike, and do not run as root."""

import json
import re
import subprocess
import tomllib

import pytest

from support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
RECIPE = (ROOT / "asyncrl.def").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions():
    """(name, rest) of every instruction of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def rest_of(name):
    return [rest for found, rest in instructions() if found == name]


def copied():
    """Files and folders that the Dockerfile copies."""
    return [source for rest in rest_of("COPY") for source in rest.split()[:-1]]


def section(name):
    """Lines of a section of Apptainer's recipe."""
    text = re.search(rf"^%{name}\n((?:    .*\n)+)", RECIPE, re.M)
    assert text is not None
    return [line.strip() for line in text[1].splitlines()]


def test_what_the_image_copies_is_there_and_enough_to_build_the_package():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored
    assert ignored[1] == "*"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "asyncrl"} <= set(copied())


@pytest.mark.parametrize("text", [DOCKERFILE, RECIPE], ids=["Dockerfile", "asyncrl.def"])
def test_installs_are_pinned_and_the_extras_exist(text):
    installs = re.findall(r"pip install (.*)", text)
    assert len(installs) == 2
    for line in installs:
        assert "-c constraints.txt" in line
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", installs[1])
    assert set(extras.split(",")) <= EXTRAS.keys()


def test_every_package_that_the_image_adds_has_a_version_in_the_constraints():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    wanted = {"torch"} | {re.split(r"[<>=]", x)[0] for extra in ("lerobot", "video") for x in EXTRAS[extra]}
    assert wanted <= pinned


def test_the_image_has_a_pinned_base_that_can_be_chosen_and_does_not_run_as_root():
    arguments = dict(rest.split("=", 1) for rest in rest_of("ARG"))
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments["BASE"])
    assert rest_of("FROM") == ["${BASE}"]
    assert rest_of("USER") == ["1000:1000"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert json.loads(rest_of("ENTRYPOINT")[0]) == ["asyncrl"]


def test_both_recipes_build_the_same():
    arguments = [f"{rest}" for rest in rest_of("ARG")]
    assert section("arguments") == arguments
    assert [line.split()[0] for line in section("files")] == copied()
    commands = "\n".join(section("post"))
    for rest in rest_of("RUN"):
        for command in re.split(r"&&", rest):
            if "apt-get install" in command or "pip install" in command:
                packages = command.strip().removeprefix("{ ").removesuffix("; }")
                packages = packages.replace("${TORCH_INDEX}", "{{ TORCH_INDEX }}")
                tail = packages.partition("install ")[2].removeprefix("-c constraints.txt ")
                assert tail in commands, packages


@pytest.mark.parametrize("name", [".ci/images", ".ci/run"])
def test_the_scripts_of_ci_are_valid_shell(name):
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True, timeout=20)
