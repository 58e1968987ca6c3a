"""Which LIBERO tasks the scripted expert can demonstrate, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from asyncrl.simulators.libero.expert import Grasp, Plan

_BOWL: Final = Grasp(radius=0.047, height=0.034)


def _bowl_to_plate(*angles: float) -> Plan:
    return Plan(item="akita_black_bowl_1", goal="plate_1", grasp=replace(_BOWL, angles=angles))


PLANS: Final[dict[str, dict[int, Plan]]] = {
    "libero_spatial": {
        0: _bowl_to_plate(90, 0, 180),
        1: _bowl_to_plate(90, 0, 180),
        2: _bowl_to_plate(90, 0, 180),
        3: _bowl_to_plate(90, 0, 180),
        4: Plan(
            item="akita_black_bowl_1",
            goal="plate_1",
            grasp=replace(_BOWL, angles=(165.0, 350.0), inside="wooden_cabinet_1_top_region"),
        ),
        5: _bowl_to_plate(90, 0, 180),
        6: _bowl_to_plate(180, 90, 0),
        7: _bowl_to_plate(90, 0, 180),
        8: _bowl_to_plate(-90, 0, 180),
        9: _bowl_to_plate(45, 135, 90),
    },
}
"""Suite -> task id -> plan."""
