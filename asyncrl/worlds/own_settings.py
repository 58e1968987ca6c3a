"""Refuse settings of a world's own where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError


def refuse_own_settings(own: Mapping[str, Any], world: str) -> None:
    """Refuse what --world-settings says to a world that takes none.

    Args:
        own: The settings.
        world: What people call it, with its article.

    Raises:
        ConfigError: There are some; says what can be chosen instead.
    """
    if own:
        unguided = " and draws without guidance" if "guidance" in own else ""
        raise ConfigError(
            f"--world-settings has {', '.join(own)}, but {world} takes none{unguided}. Leave it out; what "
            "can be chosen are --imagination.steps, .context, .decoder and .precision."
        )
