"""Bounds of every number and text of every command; files of settings anywhere on the command line."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.commands.audit import AuditConfig
from asyncrl.commands.collect import CollectConfig
from asyncrl.commands.convert import ConvertConfig
from asyncrl.commands.doctor import CheckConfig
from asyncrl.commands.evaluate import EvaluateConfig
from asyncrl.commands.replay import Imagine
from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings
from asyncrl.config.run import TrainConfig, load_file, load_files, parse, split_files, to_json, to_toml
from asyncrl.config.sections import ActorSettings, ReplaySettings
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


SPLITS = {
    "a.toml --updates 3": (["a.toml"], "--updates 3"),
    "--updates 3 a.toml": (["a.toml"], "--updates 3"),
    "--updates=3 a.toml": (["a.toml"], "--updates=3"),
    "a.toml --inline runs/x/config.json --seed 1 b.toml": (
        ["a.toml", "runs/x/config.json", "b.toml"],
        "--inline --seed 1",
    ),
    "--no-inline a.toml": (["a.toml"], "--no-inline"),
    "--actor.no-offload a.toml": (["a.toml"], "--actor.no-offload"),
    "--start-states=a.json b.toml": (["b.toml"], "--start-states=a.json"),
    "--world-settings files=a.toml more=b.json c.toml": (
        ["c.toml"],
        "--world-settings files=a.toml more=b.json",
    ),
    "runs/lr=3/config.json": (["runs/lr=3/config.json"], ""),
    "--help a.toml": (["a.toml"], "--help"),
    "--help-all a.toml": (["a.toml"], "--help-all"),
    "mine --updates 3": ([], "mine --updates 3"),
}


@pytest.mark.parametrize("line", SPLITS)
def test_words_with_a_suffix_are_files_but_flags_and_key_values(line: str) -> None:
    files, rest = split_files(line.split())
    expected_files, expected_rest = SPLITS[line]
    assert ([str(file) for file in files], " ".join(rest)) == (expected_files, expected_rest)


@pytest.fixture
def layers(tmp_path: Path) -> tuple[str, str]:
    below, above = tmp_path / "below.toml", tmp_path / "above.toml"
    below.write_text(
        "updates = 7\nseed = 5\n[replay]\nmax_lag = 1\nkeep_video_every = 2\n[actor]\nslots = 3\n"
    )
    above.write_text("seed = 6\n[replay]\nmax_lag = 4\n")
    return str(below), str(above)


def test_a_later_file_wins_and_flags_win_over_all(layers: tuple[str, str]) -> None:
    below, above = layers
    expected = TrainConfig(
        updates=9, seed=6, replay=ReplaySettings(max_lag=4, keep_video_every=2), actor=ActorSettings(slots=3)
    )
    assert parse([below, "--updates", "9", above]) == expected
    assert parse(["--updates", "9", above, below]).seed == 5
    assert parse([below, above, "--seed", "8"]).seed == 8


def test_only_all_files_together_must_work(tmp_path: Path) -> None:
    vtrace, ppo = tmp_path / "vtrace.toml", tmp_path / "ppo.toml"
    vtrace.write_text('[correction]\nkind = "vtrace"\n')
    ppo.write_text('[algorithm]\nkind = "ppo"\n')
    config = load_files([vtrace, ppo])
    assert (config.correction.kind, config.algorithm.kind) == ("vtrace", "ppo")
    with pytest.raises(ConfigError, match="V-trace corrects"):
        load_file(vtrace)


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_wrong_in_one_of_several_files_names_it_and_the_key(wrong, layers) -> None:
    Path(layers[wrong]).write_text("[replay]\nmax_lag = 'two'\n")  # Also when the other one wins over it.
    name = Path(layers[wrong]).name
    with pytest.raises(ConfigError, match=rf"{name} \[replay\]: max_lag is 'two', expected int like 2"):
        parse(list(layers))


def test_a_file_that_is_missing_among_several_is_named(layers: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        parse([*layers, "absent.toml"])


def test_settings_of_a_class_are_those_of_the_later_file_alone(tmp_path: Path) -> None:
    below, above = tmp_path / "below.toml", tmp_path / "above.toml"
    below.write_text('[world]\nname = "my.worlds:A"\n[world.settings]\nsize = 3\n')
    above.write_text('[world]\nname = "my.worlds:B"\n')
    config = load_files([below, above])
    assert (config.world, config.world_settings) == ("my.worlds:B", ())


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)


@settings(deadline=None)
@given(
    run_dir=texts,
    seed=st.integers(0, 2**63 - 1),
    own=st.lists(texts, max_size=3),
    temperature=st.floats(1e-300, 1000),
    region=st.floats(0, 1) | st.just("auto"),
    frames=st.integers(1, 10**9) | st.just("last"),
)
def test_any_settings_come_back(tmp_path_factory, run_dir, seed, own, temperature, region, frames) -> None:
    config = TrainConfig(
        run_dir=run_dir,
        seed=seed,
        policy_settings=tuple(own),
        algorithm=AlgorithmSettings(temperature=temperature),
        correction=CorrectionSettings(trust_region=region),  # type: ignore[arg-type]
        actor=ActorSettings(success_frames=frames),  # type: ignore[arg-type]
    )
    for name, text in (("any.toml", to_toml(config)), ("any.json", to_json(config))):
        written = tmp_path_factory.getbasetemp() / name
        written.write_text(text, encoding="utf-8", newline="")
        assert load_file(written) == config
