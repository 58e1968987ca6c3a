"""`asyncrl simulators`: what there is, and what is asked for wrongly."""

from asyncrl import cli
from asyncrl.simulators.libero import light, tasks


def test_a_suite_that_is_not_one_is_answered_with_those_there_are(capsys):
    assert cli.run("simulators", ["lite", "libero_spatail"]) == 2
    assert "There are: libero_spatial, libero_object" in capsys.readouterr().err


def test_what_was_made_is_said(monkeypatch, capsys, tmp_path):
    report = light.LightReport(
        folder=tmp_path, shapes=2, textures=1, faces_before=900, faces_after=100, kept=["x.obj"]
    )
    asked = []
    monkeypatch.setattr(light, "make_light", lambda suite, say: asked.append(suite) or report)
    assert cli.run("simulators", ["lite", "libero_goal"]) == 0
    said = capsys.readouterr().out
    assert "2 shapes of 900 faces now have 100, 1 textures" in said
    assert "x.obj" in said
    assert "--simulator libero_goal --simulator-settings scene=light" in said
    assert asked == ["libero_goal"]


def test_the_simulators_are_listed_also_those_that_cannot_be_used_here(capsys, monkeypatch):
    monkeypatch.setattr(tasks, "_version", lambda name: "")
    for cached in (tasks.libero_package, tasks.task_names):
        cached.cache_clear()
    assert cli.run("simulators", ["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = next(i for i, line in enumerate(lines) if "--simulator libero_* needs the extra" in line)
    assert lines[reason].startswith("not usable here: ")
    assert lines[reason + 1].split() == [
        f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90")
    ]
    assert lines[0].split()[0] == "tabletop"
