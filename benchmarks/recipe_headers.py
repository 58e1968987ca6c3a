"""Write what the cost model expects of every shipped full-size recipe into its header.

    python benchmarks/recipe_headers.py

The lines are those of `asyncrl doctor --costs RECIPE`. A test holds them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.loading import load_file
from asyncrl.doctor.pace import expected_table

ROOT = Path(__file__).resolve().parents[1]
FIRST = "# Expected by the cost model"


def full_size_recipes() -> list[Path]:
    """Recipes of the published policies."""
    return sorted((ROOT / "configs").glob("*_openvla*.toml"))


def with_expectation(text: str, expected: Sequence[str]) -> str:
    """Put the lines at the end of a recipe's header, in place of those that are there.

    Args:
        text: Of a recipe, which begins with comments and then has an empty line.
        expected: Lines without the sign of a comment.
    """
    header, _, settings = text.partition("\n\n")
    kept = header.partition(f"\n#\n{FIRST}")[0]
    return "\n".join([kept, "#", *(f"# {line}" for line in expected)]) + f"\n\n{settings}"


def main() -> None:
    """Rewrite the recipes that differ, and name them."""
    for recipe in full_size_recipes():
        text = recipe.read_text()
        written = with_expectation(text, expected_table(load_file(recipe)))
        if written != text:
            recipe.write_text(written)
            print(recipe.name)


if __name__ == "__main__":
    main()
