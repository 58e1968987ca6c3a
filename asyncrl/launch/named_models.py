"""Turns --policy, --world and --reward into a class, a folder and keyword settings. Loads nothing.

A name is a shipped one, a folder that a built-in class reads, or 'package.module:Class@FOLDER'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.rewards.libero_tasks import reward_kind
from asyncrl.storage import asset_paths
from asyncrl.storage.atomic import read_json
from asyncrl.worlds.kinds import world_class, world_title


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that was named, before anything of it is read."""

    kind: type[Any]
    """Its class, with everything that its protocol requires."""
    folder: Path
    settings: Mapping[str, Any]
    """Keywords of its `check` and `load`."""


def named_policy(text: str, settings: Iterable[str] = ()) -> NamedModel:
    """Find what --policy means.

    Raises:
        ConfigError: There is no such class.
        CheckpointError: There is no such folder.
    """
    if registry.names_code(text):
        return _of_user("policy", text, settings)
    folder, keywords = _policy_folder(text), registry.keywords("--policy-settings", settings)
    saved = read_json(folder / "config.json").get("asyncrl")  # openvla.files.SECTION
    decoding = keywords.get("decoding") or (saved.get("decoding") if isinstance(saved, dict) else "")
    name = "openvla" if decoding == "autoregressive" else "openvla_oft"
    return NamedModel(kind=registry.resolve("policy", name), folder=folder, settings=keywords)


def named_world(text: str, settings: Iterable[str] = ()) -> NamedModel:
    """Find what --world means; see `named_policy`."""
    if registry.names_code(text):
        return _of_user("world", text, settings)
    folder, keywords = asset_paths.world_folder(text), registry.keywords("--world-settings", settings)
    return NamedModel(kind=world_class(folder), folder=folder, settings=keywords)


def named_reward(text: str, world_folder: Path, settings: Iterable[str] = ()) -> NamedModel:
    """Find what --reward means; left out, it is the model in the world's folder. See `named_policy`."""
    if registry.names_code(text):
        return _of_user("reward", text, settings)
    folder = Path(text) if text else world_folder
    return NamedModel(
        kind=registry.resolve("reward", reward_kind(folder)),
        folder=folder,
        settings=registry.keywords("--reward-settings", settings),
    )


def folder_part(text: str) -> str:
    """The folder in a name: what stands behind the @ of a class, else the name itself."""
    name, folder = registry.split(text)
    return folder if name else text


def refuse_foreign_code(
    config: TrainConfig, own: TrainConfig, source: str, kinds: Iterable[str] = registry.PARTS_OF_A_RUN
) -> None:
    """Refuse classes that a run names and the user of this process did not: a file or peer never names code.

    Raises:
        ConfigError: Says which flag to give.
    """
    for flag, text in registry.own_code(config, kinds):
        if (flag, text) not in registry.own_code(own, kinds):
            raise ConfigError(
                f"{source} names {text}, which is code. Code is named on the command line only: if you trust "
                f"that class and have it here, add {flag} {text}"
            )


def _policy_folder(text: str) -> Path:
    """Find a policy's folder; a world's, which may look like one, is refused as what it is."""
    try:
        folder = asset_paths.policy_folder(text)
    except CheckpointError as error:
        if title := world_title(Path(text)):
            raise _is_world(text, title) from error
        raise
    if title := world_title(folder):
        raise _is_world(text, title)
    return folder


def _is_world(text: str, title: str) -> CheckpointError:
    return CheckpointError(f"--policy {text} is a world model ({title}'s). Give it as --world.")


def _of_user(kind: str, text: str, settings: Iterable[str]) -> NamedModel:
    name, folder = registry.split(text)
    return NamedModel(
        kind=registry.resolve(kind, name),
        folder=asset_paths.newest_checkpoint(Path(folder)) if kind == "policy" else Path(folder),
        settings=registry.keywords(f"--{kind}-settings", settings),
    )
