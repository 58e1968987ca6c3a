"""The right simulator is known by the tasks alone, and a wrong one is never played in without a word."""

import pytest

from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import refuse_foreign_tasks, simulator_of_tasks
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.simulators.tabletop.scene import TASKS


@pytest.mark.parametrize("suite", list(SUITES))
def test_tasks_of_a_suite_lead_to_it(suite: str) -> None:
    assert simulator_of_tasks(SUITES[suite]) == suite
    assert simulator_of_tasks([SUITES[suite][3].capitalize() + "."]) == suite, "however they are written"
    assert simulator_of_tasks(TASKS[2:4]) == "tabletop"


@pytest.mark.parametrize(
    "tasks", [[], ["fold the towel"], [TASKS[0], SUITES["libero_goal"][0]], [TASKS[0], "fold the towel"]]
)
def test_tasks_of_none_or_of_several_lead_nowhere(tasks: list[str]) -> None:
    assert simulator_of_tasks(tasks) == ""


def test_a_simulator_that_lacks_a_task_is_refused_with_the_one_that_has_them() -> None:
    with pytest.raises(ConfigError) as error:
        refuse_foreign_tasks(TASKS, SUITES["libero_goal"], "libero_goal", "Name one.")
    assert "no task of --simulator libero_goal" in str(error.value)
    assert str(error.value).endswith("Use --simulator tabletop.")
    with pytest.raises(ConfigError, match=r"'fold the towel', which is no task .* Name one\.$"):
        refuse_foreign_tasks(["fold the towel"], TASKS, "tabletop", "Name one.")


def test_a_simulator_that_takes_any_task_is_not_refused() -> None:
    refuse_foreign_tasks(["fold the towel"], (), "my.env:make", "Name one.")
    refuse_foreign_tasks((), TASKS, "tabletop", "Name one.")
