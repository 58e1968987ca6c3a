"""Resolve names on the command line to classes: built-in ones, or the user's.

--world wan                                a short name of `BUILT_IN`
--world FOLDER                             a folder, whose content selects a built-in class
--world my_package.worlds:Mine@FOLDER      an importable class, and the folder that it loads
--simulator pouring                        an entry point of an installed package
"""
# Only the user names code, on the command line or in a TOML file: never a downloaded file, a checkpoint, or a
# peer.

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any, Final

from asyncrl.errors import ConfigError

_MANISKILL: Final = (
    *("pick_cube", "push_cube", "pull_cube", "pull_cube_tool", "poke_cube", "stack_cube", "stack_pyramid"),
    *("lift_peg_upright", "peg_insertion_side", "plug_charger", "place_sphere", "roll_ball"),
    *("assemble_board", "push_t", "draw_triangle", "two_robot_pick_cube", "two_robot_stack_cube"),
    *("place_apple_in_bowl", "transport_box", *(f"rotate_valve_{i}" for i in range(5))),
    *("rotate_in_hand_0", "rotate_in_hand_1", *(f"rotate_cube_{i}" for i in range(5))),
    *("put_on_plate_25", *(f"put_on_plate_25_{kind}" for kind in ("vision_image", "instruct", "position"))),
)
_LIBERO: Final = ("spatial", "object", "goal", "10", "90")
_MASKED: Final = "MaskedImportanceSampling"


def _classes(module: str, **names: str) -> dict[str, str]:
    return {name: f"asyncrl.{module}:{kind}" for name, kind in names.items()}


BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "policy": _classes("policies.openvla.policy", openvla_oft="OpenVLAOFTPolicy", openvla="OpenVLAPolicy"),
    "world": {
        **_classes("worlds.wan.world", wan="WanWorld"),
        **_classes("worlds.opensora.world", opensora="OpenSoraWorld"),
        **_classes("worlds.evac.world", evac="EvacWorld"),
    },
    "reward": _classes("rewards.resnet", resnet="ResNetReward"),
    "simulator": {
        **_classes("simulators.tabletop.simulator", tabletop="Tabletop"),
        **_classes("simulators.maniskill.simulator", **{f"maniskill_{task}": task for task in _MANISKILL}),
        **_classes("simulators.libero.simulator", **{f"libero_{s}": f"Libero{s.title()}" for s in _LIBERO}),
    },
    "correction": {
        **_classes(
            "learner.corrections", none="NoCorrection", naive="Naive", tis="TruncatedImportanceSampling"
        ),
        **_classes("learner.corrections", mis=_MASKED, decoupled=_MASKED, vtrace="VTrace"),
    },
    "advantage": _classes("learner.advantages", group_relative="GroupRelative", gae="GeneralizedAdvantage"),
    "objective": _classes(
        "learner.losses", ppo="ClippedObjective", cispo="CispoObjective", gspo="GspoObjective"
    ),
    "transport": {
        **_classes("weights.transports.shared_memory", shared_memory="SharedMemoryTransport"),
        **_classes("weights.transports.gpu", nccl="NcclTransport", cuda_ipc="CudaIpcTransport"),
    },
}
"""Kind of part -> short name -> 'module:Class'."""
ENTRY_POINTS: Final[Mapping[str, str]] = {"simulator": "asyncrl.simulators"}
"""Kind of part -> group of entry points by which installed packages give short names."""
_POLICY: Final = (
    *("load", "save", "saved_tensors", "action_spec", "sample_arrays", "image_size", "device", "dtype"),
    *("preprocess", "act", "evaluate", "parameter_groups", "trainable_parameters", "trainable_tensors"),
    *("acting_tensors", "blocks"),
)
REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "policy": _POLICY,
    "world": ("check", "load", "image_size", "action_spec", "modules", "start", "imagine"),
    "reward": ("check", "load", "image_size", "modules", "score"),
    "simulator": ("reset", "step", "look", "close"),
    "correction": ("weights",),
    "advantage": ("estimate",),
    "objective": ("loss",),
    "transport": ("build", "side_stream", "connect_root", "connect_member"),
}
"""Kind of part -> members that a user's class must have."""
FLAGS: Final[Mapping[str, str]] = {
    **{kind: f"--{kind}" for kind in ("policy", "world", "reward", "simulator")},
    "correction": "--correction.kind",
    **{kind: f"--algorithm.{kind}" for kind in ("advantage", "objective")},
    "transport": "--weights.transport",
}
EVALUATION: Final = "--evaluation.simulator"
MODELS: Final = ("policy", "world", "reward")
PARTS_OF_A_RUN: Final = tuple(kind for kind in FLAGS if kind != "simulator")  # `asyncrl train`
_CLASS: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]*:[A-Za-z_]\w*)(?:@(?P<folder>.*))?", re.S)


def split(text: str) -> tuple[str, str]:
    """Split 'package.module:Class@FOLDER' into class and folder; either may be empty."""
    match = _CLASS.fullmatch(text)
    return (match["name"], match["folder"] or "") if match else ("", text)


def resolve(kind: str, name: str) -> Any:
    """Return the class of a short name or of 'package.module:Class'; raise ConfigError if it is unusable."""
    check_name(kind, name)
    where = BUILT_IN[kind].get(name, name)
    if not names_code(where):
        where, *others = registered(kind)[name]
        if others:
            raise ConfigError(
                f"{FLAGS[kind]} is {name!r}, but several installed packages register that name. Write the "
                f"class that is meant: {' or '.join([where, *others])}."
            )
    module, _, attribute = where.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{FLAGS[kind]} is {name}, but importing it fails: {error}. Write package.module:Class, put its "
            "folder on PYTHONPATH or install the package, and install what it imports."
        ) from error
    if kind == "simulator" and callable(found) and not isinstance(found, type):
        return found  # A factory: the simulator itself is checked.
    if not isinstance(found, type):
        raise ConfigError(f"{FLAGS[kind]} is {name}, but that is a {type(found).__name__}, expected a class.")
    if lacking := [member for member in REQUIRED.get(kind, ()) if not hasattr(found, member)]:
        raise ConfigError(
            f"{FLAGS[kind]} names {name}, which lacks {', '.join(lacking)}. docs/extending.md has "
            "all that it needs."
        )
    return found


def registered(kind: str) -> dict[str, tuple[str, ...]]:
    """Return short name -> 'module:Class' of every installed package that registers it."""
    found: dict[str, tuple[str, ...]] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS[kind]) if kind in ENTRY_POINTS else ():
        known = found.get(point.name, ())
        found[point.name] = known if point.value in known else (*known, point.value)
    return found


def check_name(kind: str, name: str) -> None:
    """Raise ConfigError unless a name is built in, registered, or a class path; imports nothing."""
    if name in BUILT_IN[kind] or names_code(name) or name in (installed := registered(kind)):
        return
    near = difflib.get_close_matches(name, [*BUILT_IN[kind], *installed], n=1)
    hint = f"Perhaps you meant {near[0]!r}. " if near else ""
    others = f" Of installed packages: {', '.join(installed)}." if installed else ""
    raise ConfigError(
        f"{FLAGS[kind]} is {name!r}, but nothing of that kind is called so. {hint}"
        f"Built in: {', '.join(BUILT_IN[kind])}.{others} A class of your own is named package.module:Class."
    )


def keywords(flag: str, settings: Iterable[str]) -> dict[str, Any]:
    """Parse 'key=value' texts as keyword arguments; a value is TOML, or else a text.

    >>> keywords("--world-settings", ["steps=4", "name=wan", "noise=0.5", "sizes=[1, 2]"])
    {'steps': 4, 'name': 'wan', 'noise': 0.5, 'sizes': [1, 2]}
    """
    found: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in found:
            raise ConfigError(f"{flag} has {text!r}. Write key=value, each key once, like steps=4.")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


def names_code(text: str) -> bool:
    """Return True if a setting names a user's class."""
    return bool(split(text)[0])


def own_code(settings: Any, kinds: Iterable[str] = PARTS_OF_A_RUN) -> list[tuple[str, str]]:
    """List flag and value of the settings that name a user's class or module."""
    named = {*kinds}
    flags = [flag for kind, flag in FLAGS.items() if kind in named]
    lists = ["--world-settings"] if "world" in named else []
    if named == {*PARTS_OF_A_RUN}:
        flags, lists = [*flags, EVALUATION], [*lists, f"{EVALUATION}-settings"]

    def setting(flag: str) -> Any:
        return attrgetter(flag.removeprefix("--").replace("-", "_"))(settings)

    found = [(flag, text) for flag in flags if names_code(text := setting(flag))]
    return found + [(flag, text) for flag in lists for text in setting(flag) if names_module(text)]


def names_module(setting: str) -> bool:
    """Return True if a 'key=value' setting names a module to import, such as your ManiSkill environment."""
    return setting.partition("=")[0].strip() == "module"
