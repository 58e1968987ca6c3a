"""Files of settings anywhere on the command line, several of them, and what --dry-run writes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings
from asyncrl.config.run import TrainConfig, load_file, load_files, parse, split_files, to_json, to_toml
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.errors import ConfigError

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
