"""Instructions of the LIBERO suites by id, and the groups of tasks that LIBERO-Long's networks judge."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from asyncrl.errors import CheckpointError

# The id of an instruction is its index in the suite.
SUITES: Final[dict[str, tuple[str, ...]]] = {
    "libero_spatial": tuple(
        f"pick up the black bowl {place} and place it on the plate"
        for place in (
            *("between the plate and the ramekin", "from table center"),
            *("in the top drawer of the wooden cabinet", "next to the cookie box", "next to the plate"),
            *("next to the ramekin", "on the cookie box", "on the ramekin", "on the stove"),
            "on the wooden cabinet",
        )
    ),
    "libero_object": tuple(
        f"pick up the {thing} and place it in the basket"
        for thing in (
            *("alphabet soup", "bbq sauce", "butter", "chocolate pudding", "cream cheese", "ketchup", "milk"),
            *("orange juice", "salad dressing", "tomato sauce"),
        )
    ),
    "libero_goal": (
        "open the middle drawer of the cabinet",
        "open the top drawer and put the bowl inside",
        "push the plate to the front of the stove",
        "put the bowl on the plate",
        "put the bowl on the stove",
        "put the bowl on top of the cabinet",
        "put the cream cheese in the bowl",
        "put the wine bottle on the rack",
        "put the wine bottle on top of the cabinet",
        "turn on the stove",
    ),
    "libero_10": (
        "pick up the book and place it in the back compartment of the caddy",
        "put both moka pots on the stove",
        "put both the alphabet soup and the cream cheese box in the basket",
        "put both the alphabet soup and the tomato sauce in the basket",
        "put both the cream cheese box and the butter in the basket",
        "put the black bowl in the bottom drawer of the cabinet and close it",
        "put the white mug on the left plate and put the yellow and white mug on the right plate",
        "put the white mug on the plate and put the chocolate pudding to the right of the plate",
        "put the yellow and white mug in the microwave and close it",
        "turn on the stove and put the moka pot on it",
    ),
}
LONG: Final = "libero_10"
GROUPS: Final = tuple(f"group_{number}" for number in range(1, 7))
"""Folders of the networks that judge LIBERO-Long together."""
LONG_GROUPS: Final = (5, 2, 1, 1, 1, 3, 4, 4, 6, 2)  # Group number of each task of LIBERO-Long, by id.


def suite_of(tasks: Collection[str]) -> str:
    """Return the name of the suite that all `tasks` belong to."""
    homes = {task: name for name, instructions in SUITES.items() for task in instructions}
    if unknown := sorted(set(tasks) - homes.keys()):
        raise CheckpointError(
            f"the reward model was fitted on tasks of one LIBERO suite, and {unknown[0]!r} is an "
            f"instruction of none ({', '.join(SUITES)}). Use --start-states of one suite, with its exact "
            "instructions."
        )
    suites = sorted({homes[task] for task in tasks})
    if len(suites) != 1:
        raise CheckpointError(
            "the reward model was fitted on tasks of one LIBERO suite, and the start states are of "
            f"{' and '.join(suites) or 'none'}. Use --start-states of the suite of --world."
        )
    return suites[0]
