"""The size of the code: ceilings per package, which only fall. Raising one is a commit of its own."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CEILINGS = {
    "": (1040, 8),
    "actors": (1133, 5),
    "commands": (2424, 12),
    "config": (1109, 6),
    "devices": (410, 3),
    "doctor": (1238, 7),
    "evaluation": (929, 5),
    "fitting": (4155, 15),
    "launch": (4490, 19),
    "learner": (3259, 16),
    "messaging": (1042, 6),
    "observability": (2434, 12),
    "policies": (2868, 13),
    "replay": (4037, 18),
    "replay_tools": (1380, 7),
    "rewards": (494, 3),
    "simulators": (4003, 21),
    "storage": (2350, 10),
    "weights": (2167, 10),
    "worlds": (5428, 24),
}
"""Package (empty: the top level) -> most lines and modules."""
MOST_TEST_LINES = 44_700
MOST_BENCHMARK_LINES = 3_500
LONGEST_FILE, LONGEST_FUNCTION = 440, 60
HOT_PATH = ("actors", "learner", "replay/limiter.py", "records.py")
NOT_THERE = ("second draw", "mined", "refit", "guard.world", "--pace")
"""Options that the hot path must not know."""
SIBLINGS = {"__init__", "interface", "files", "world", "simulator", "expert", "scene", "tasks"}
"""Names that several modules may have: the same thing of several packages."""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "asyncrl").parts
    return parts[0] if len(parts) > 1 else ""


def test_every_package_has_a_ceiling() -> None:
    assert {package_of(path) for path in files("asyncrl")} == CEILINGS.keys()


@pytest.mark.parametrize("package", CEILINGS)
def test_a_package_stays_below_its_ceiling(package: str) -> None:
    found = [path for path in files("asyncrl") if package_of(path) == package]
    most_lines, most_modules = CEILINGS[package]
    found_lines = lines(found)
    said = f"{package}: {found_lines} lines in {len(found)} modules, at most {most_lines} in {most_modules}"
    assert found_lines <= most_lines, said
    assert len(found) <= most_modules, said


def test_tests_and_benchmarks_stay_below_theirs() -> None:
    assert lines(files("tests")) <= MOST_TEST_LINES
    assert lines(files("benchmarks")) <= MOST_BENCHMARK_LINES


def test_no_file_and_no_function_is_too_long() -> None:
    long_files = [str(path) for path in files("asyncrl") if lines([path]) > LONGEST_FILE]
    long_functions = [
        f"{path}: {node.name}"
        for path in files("asyncrl")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]
    assert long_files == []
    assert long_functions == []


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in files("asyncrl") if path.stem not in SIBLINGS)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in files("asyncrl")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_hot_path_knows_no_deleted_option() -> None:
    for place in HOT_PATH:
        path = ROOT / "asyncrl" / place
        for file in files(f"asyncrl/{place}") if path.is_dir() else [path]:
            assert not [word for word in NOT_THERE if word in file.read_text()], file


WORDS = re.compile(r"\b(whoever|anew|meanwhile|beside|says|told|nobody)\b", re.IGNORECASE)
FIRST = re.compile(r"(What|Whether|Say|Tell)\b")


def test_the_source_is_in_plain_words() -> None:
    found = [
        f"{path}:{number}: {word[0]}"
        for path in [*files("asyncrl"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (word := WORDS.search(line)) and "put the red cube beside" not in line  # ManiSkill's instruction
    ]
    assert found == []


def test_docstrings_do_not_begin_with_a_question() -> None:
    found = [
        f"{path}:{node.name}"
        for path in files("asyncrl")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and FIRST.match(ast.get_docstring(node) or "")
    ]
    assert found == []
