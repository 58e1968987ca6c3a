"""Start states whose episodes take longer are used as often as they are granted, by a simulation."""

from __future__ import annotations

import pytest

from support.lag_drops import SETTINGS, Setting, simulate


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_hard_start_states_are_used_as_often_as_they_are_granted(setting: Setting) -> None:
    found = simulate(setting, updates=120)
    assert found.used_hard == pytest.approx(found.granted_hard, abs=0.005)
    if not setting.overtaking:
        assert found.dropped == 0
        assert abs(found.first_hard - 0.5) < 0.06
