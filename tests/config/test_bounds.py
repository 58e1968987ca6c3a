"""Every number of every command has two ends, and every text can be written and named."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands.audit import AuditConfig
from asyncrl.commands.collect import CollectConfig
from asyncrl.commands.convert import ConvertConfig
from asyncrl.commands.doctor import CheckConfig
from asyncrl.commands.evaluate import EvaluateConfig
from asyncrl.commands.replay import Imagine
from asyncrl.config.run import TrainConfig, load_file
from asyncrl.errors import ConfigError
from asyncrl.fitting.settings import FitDecoder, FitPolicy, FitReward, FitStarts, FitWorld
from asyncrl.launch.join import JoinOptions
from asyncrl.replay_tools.files import Prune
from asyncrl.replay_tools.pictures import Video
from asyncrl.replay_tools.tables import ListEpisodes, Stats
from asyncrl.simulators.interface import Demonstrator

NEEDED: dict[str, Any] = {
    **{"data": (Path("a"),), "out": Path("o.png"), "world": "w", "checkpoint": "c", "source": "s"},
    **{"path": Path("p"), "group": 1, "episodes": ("e",), "kind": "world", "name": "n", "join": "j"},
    "keep_gigabytes": 1.0,
}
SETTINGS: tuple[Any, ...] = (
    *(
        TrainConfig,
        AuditConfig,
        EvaluateConfig,
        CollectConfig,
        CheckConfig,
        JoinOptions,
        ConvertConfig,
        FitPolicy,
        FitWorld,
    ),
    *(FitReward, FitStarts, FitDecoder, Imagine, Prune, Stats, ListEpisodes, Video, Demonstrator),
)
IMPOSSIBLE = (10**40, math.inf, -math.inf, math.nan, -(10**40))


def made(kind: Any, **changes: Any) -> Any:
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    given = {name: NEEDED[name] for name in required} | changes
    if kind is FitStarts:
        given["data"] = NEEDED["data"]  # Or pictures: one of them.
    return kind(**given)


def numbers(kind: Any) -> Iterator[tuple[Any, str]]:
    """Every field of a class of settings, and of those within it, that takes a number."""
    settings = made(kind)
    for field in dataclasses.fields(kind):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from numbers(type(value))
        elif "int" in str(field.type) or "float" in str(field.type):
            yield kind, field.name


NUMBERS = sorted(
    {(kind.__name__, name): (kind, name) for one in SETTINGS for kind, name in numbers(one)}.items()
)


@pytest.mark.parametrize(
    "field", [where for _, where in NUMBERS], ids=[".".join(name) for name, _ in NUMBERS]
)
def test_a_number_beyond_every_bound_is_refused_by_the_name_of_its_flag(field: tuple[Any, str]) -> None:
    kind, name = field
    for value in IMPOSSIBLE:
        number: Any = (value, 0.0) if str(kind.__dataclass_fields__[name].type).startswith("tuple") else value
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            made(kind, **{name: number})


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"])
@pytest.mark.parametrize("name", ["policy", "run_dir"])
def test_a_text_that_is_no_name_is_refused(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match="a byte that is not UTF-8 text"):
        TrainConfig(**{name: text})
    with pytest.raises(ConfigError, match="a byte that is not UTF-8 text"):
        TrainConfig(policy_settings=(text,))


FILES: dict[str, tuple[str, bytes, str]] = {
    "not UTF-8": ("x.toml", b'world = "caf\xe9"', "not valid toml"),
    "deep": ("x.toml", b"x = " + b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "a large number": ("x.toml", b"seed = 1" + b"0" * 40, "it can be at most 9223372036854775807"),
    "infinity": ("x.toml", b"batch_timeout = inf", "it can be at most 1000000"),
    "JSON with 10^40": ("x.json", b'{"seed": 1' + b"0" * 40 + b"}", "which is too large"),
    "JSON of another type": ("x.json", b"[1]", "it holds a list, expected a dict"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_settings_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    file, content, why = FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load_file(tmp_path / file)
