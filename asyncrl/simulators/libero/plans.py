"""Which LIBERO tasks the scripted expert can demonstrate, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from asyncrl.simulators.libero.expert import Grasp, Plan

_BOWL: Final = Grasp(radius=0.047, height=0.034)


def _bowl_to_plate(*angles: float) -> Plan:
    return Plan(item="akita_black_bowl_1", goal="plate_1", grasp=replace(_BOWL, angles=angles))


def _to_basket(item: str, angle: float, height: float) -> Plan:
    grasp = Grasp(angles=(angle,), height=height)
    return Plan(item=item, goal="basket_1_contain_region", grasp=grasp, drop=0.05, over=0.22)


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
    "libero_object": {
        0: _to_basket("alphabet_soup_1", 90, 0.01),
        1: _to_basket("cream_cheese_1", 90, 0.0),
        2: _to_basket("salad_dressing_1", 0, 0.04),
        3: _to_basket("bbq_sauce_1", 0, 0.02),
        4: _to_basket("ketchup_1", 0, 0.04),
        5: _to_basket("tomato_sauce_1", 90, 0.01),
        6: _to_basket("butter_1", 90, 0.0),
        7: _to_basket("milk_1", 0, 0.025),
        8: _to_basket("chocolate_pudding_1", 90, 0.0),
        9: _to_basket("orange_juice_1", 0, 0.025),
    },
    "libero_goal": {
        1: replace(_bowl_to_plate(90, 0, 180), goal="flat_stove_1_cook_region"),
        2: Plan(
            item="wine_bottle_1",
            goal="wooden_cabinet_1_top_side",
            grasp=Grasp(angles=(90.0, 0.0), height=0.13),
            drop=0.02,
        ),
        4: replace(_bowl_to_plate(90, 0, 180), goal="wooden_cabinet_1_top_side"),
        6: Plan(item="cream_cheese_1", goal="akita_black_bowl_1", grasp=Grasp(angles=(90.0,)), drop=0.05),
        8: _bowl_to_plate(90, 0, 180),
    },
}
"""Suite -> task id -> plan."""
