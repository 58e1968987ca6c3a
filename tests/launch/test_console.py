"""What a run says at its end, by the world that it imagined in."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.launch.console import final_summary


@pytest.mark.parametrize(
    ("kind", "policy", "said"),
    [
        ("shipped", "tabletop", "asyncrl evaluate RUN --episodes 256"),
        ("shipped", "my.flow:Flow@x", "asyncrl evaluate my.flow:Flow@RUN --episodes 256"),
        ("fitted", "tabletop", "asyncrl evaluate RUN --episodes 256 (if WORLD was fitted to tabletop"),
        ("class", "tabletop", "asyncrl evaluate RUN --simulator SIMULATOR --episodes 256"),
        (
            "published",
            "models/libero",
            "not measured here: no built-in simulator plays the tasks of this world. Evaluate it where the "
            "policy came from: asyncrl convert RUN EXPORT --to openvla --original PUBLISHED",
        ),
        ("published", "my.flow:Flow@x", "asyncrl evaluate my.flow:Flow@RUN --simulator SIMULATOR"),
    ],
)
def test_the_built_in_simulator_is_advised_for_its_own_worlds_only(
    tmp_path: Path, kind: str, policy: str, said: str
) -> None:
    world = {"shipped": "tabletop", "class": "my.worlds:Mine@x"}.get(kind, str(tmp_path / kind))
    if kind == "fitted":
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "world.json").write_text("{}")
    run = tmp_path / "run"
    (line,) = (
        line
        for line in final_summary(TrainConfig(world=world, policy=policy), run).splitlines()
        if line.startswith("true success rate:")
    )
    assert said.replace("RUN", str(run)).replace("WORLD", world) in line
    assert ("tabletop" in line) == (kind == "fitted")
