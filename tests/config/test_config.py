"""Settings: flags and files in, one configuration out, or an answer that helps; the short help."""

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli, registry
from asyncrl.commands import audit, collect, convert, doctor, evaluate
from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings, idle_settings
from asyncrl.config.help import TRAIN, WIDTH
from asyncrl.config.run import TrainConfig, gone_settings, load_file, overlay, parse, to_json
from asyncrl.config.sections import (
    ActorSettings,
    GuardSettings,
    LearnerSettings,
    OptimizerSettings,
    ReplaySettings,
)
from asyncrl.errors import ConfigError
from asyncrl.launch.simulated import refuse_idle
from asyncrl.storage.assets import simulator_named
from support import ROOT

CONFIGS = ROOT / "configs"


def toml(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_flags_reach_nested_settings() -> None:
    assert parse([]) == TrainConfig()
    words = "--updates 3 --inline --algorithm.group-size 4 --replay.max-lag 0 --run-dir a"
    assert parse(words.split()) == TrainConfig(
        updates=3,
        inline=True,
        run_dir="a",
        algorithm=AlgorithmSettings(group_size=4),
        replay=ReplaySettings(max_lag=0),
    )


def test_a_whole_number_may_stand_for_a_real_one() -> None:
    assert overlay(TrainConfig(), {"batch_timeout": 30}, "here").batch_timeout == 30.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("update = 3", "sets 'update', which does not exist. Perhaps you meant 'updates'"),
        (
            "[replay]\nmax-lags = 3",
            r"\[replay\] sets 'max-lags', which does not exist. Perhaps you meant 'max_lag'",
        ),
        ("zzz = 3", "which does not exist. Known: actor, algorithm"),
        ("updates = 'three'", "updates is 'three', expected int like 10"),
        ("updates = true", "updates is True, expected int"),
        ("batch_timeout = true", "batch_timeout is True, expected float"),
        ("replay = 3", "must be a table of settings, found int"),
        ("updates = ", "is not valid toml"),
        ("[correction]\nkind = 'tiss'", r"kind is 'tiss'.*Perhaps you meant 'tis'"),
        ("[actor]\nmax-decision = 2", "Perhaps you meant 'max_decisions'"),
    ],
)
def test_a_wrong_file_is_answered_with_what_is_wrong(tmp_path: Path, text: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        load_file(toml(tmp_path, text))


@pytest.mark.parametrize(
    ("settings", "wrong", "flag"),
    [
        (AlgorithmSettings, {"group_size": 1}, "--algorithm.group-size is 1"),
        (AlgorithmSettings, {"temperature": 0.0}, "--algorithm.temperature is 0.0"),
        (AlgorithmSettings, {"temperature": float("nan")}, "--algorithm.temperature is nan"),
        (AlgorithmSettings, {"top_k": 257}, "--algorithm.top-k is 257.*at most 256"),
        (AlgorithmSettings, {"clip_low": 1.5}, "--algorithm.clip-low is 1.5"),
        (AlgorithmSettings, {"dual_clip": 0.9}, "--algorithm.dual-clip is 0.9"),
        (CorrectionSettings, {"trust_region": 1.5}, "--correction.trust-region is 1.5"),
        (CorrectionSettings, {"min_weight": 1.0}, "--correction.min-weight is 1.0.*must be below 1"),
        (OptimizerSettings, {"max_grad_norm": 0.0}, "--optimizer.max-grad-norm is 0.0.*trains nothing"),
        (OptimizerSettings, {"beta2": -0.1}, "--optimizer.beta2 is -0.1"),
        (LearnerSettings, {"threads": 0}, "--learner.threads is 0.*at least 1"),
        (
            LearnerSettings,
            {"gradient_checkpointing_every": 2},
            "every is 2.*but without --learner.gradient-ch",
        ),
        (ActorSettings, {"success_threshold": 0.0}, "--actor.success-threshold is 0.0"),
        (ActorSettings, {"success_frames": 0}, "--actor.success-frames is 0.*Use 1, or the word last"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_flag(settings: Any, wrong: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        settings(**wrong)


def test_a_setting_may_be_a_number_or_a_word(tmp_path: Path) -> None:
    assert TrainConfig().actor.success_frames == 1
    for text, expected in (("3", 3), ("last", "last")):
        assert parse(["--actor.success-frames", text]).actor.success_frames == expected
        value = text if text.isdigit() else f'"{text}"'
        (tmp_path / "a.toml").write_text(f"[actor]\nsuccess_frames = {value}\n")
        config = load_file(tmp_path / "a.toml")
        assert config.actor.success_frames == expected
        (tmp_path / "config.json").write_text(to_json(config))
        assert load_file(tmp_path / "config.json") == config
    for wrong in ('"first"', "true", "1.5"):
        (tmp_path / "a.toml").write_text(f"[actor]\nsuccess_frames = {wrong}\n")
        with pytest.raises(ConfigError, match=r"success_frames is .*, expected int like 1, or 'last'"):
            load_file(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction.kind": "vtrace"}, "vtrace.*--algorithm.kind ppo"),
        ({"algorithm.minibatches": 200}, "--algorithm.minibatches is 200.*128 episodes"),
        ({"algorithm.objective": "gspo"}, "gspo.*--algorithm.level decision"),
        (
            {"algorithm.level": "decision", "correction.level": "token"},
            "--correction.level is token.*coarser",
        ),
        (
            {"algorithm.kind": "ppo", "critic.level": "action", "algorithm.level": "decision"},
            "--critic.level is action.*an advantage per step",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes: dict[str, Any], message: str) -> None:
    table: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, field = name.split(".")
        table.setdefault(part, {})[field] = value
    with pytest.raises(ConfigError, match=message):
        overlay(TrainConfig(), table, "test")


GRPO = {
    **{"algorithm.kind": "grpo", "algorithm.level": "token", "algorithm.group_size": 8},
    **{"algorithm.groups_per_update": 64 * 16 // 8, "algorithm.minibatches": 4, "algorithm.micro_batch": 32},
    **{"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28},
    **{"algorithm.temperature": 1.6, "algorithm.top_k": 0, "optimizer.learning_rate": 2e-5},
}
"""Environments times rollout epochs are 64 * 16 episodes, the global batch is 8192 decisions."""
IMAGINED = GRPO | {"actor.max_decisions": 32, "actor.success_threshold": 0.9, "actor.success_frames": "last"}
WAN = IMAGINED | {
    **{"optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-5},
    **{"optimizer.weight_decay": 0.01, "optimizer.max_grad_norm": 1.0, "lora.rank": 0},
    **{"learner.precision": "bf16", "learner.gradient_checkpointing": True},
    **{"imagination.context": "frames", "imagination.decoder": "full", "imagination.steps": 5},
    **{"keyframes": True, "seed": 1234},
}
OPENSORA = IMAGINED | {
    **{"optimizer.eps": 1e-8, "imagination.context": "latents", "imagination.steps": 10},
    **{"keyframes": False, "checkpoint_every": 25, "seed": 1234},
}
LIBERO = {"simulator.horizon": 512, "optimizer.eps": 1e-8, "world_settings": ("settle=15", "wrist=false")}
PPO = {
    **{"algorithm.kind": "ppo", "algorithm.group_size": 1, "algorithm.micro_batch": 16},
    **{"algorithm.temperature": 1.0, "algorithm.top_k": 50, "critic.level": "decision"},
    **{"critic.learning_rate": 3e-3, "optimizer.learning_rate": 5e-6, "lora.rank": 32},
}
MANISKILL = {
    **{"world": "maniskill_put_on_plate_25", "simulator.horizon": 80, "world_settings": ('reward="shaped"',)},
    **{"algorithm.micro_batch": 40, "algorithm.level": "token", "algorithm.clip_high": 0.28},
    **{"optimizer.learning_rate": 1e-4, "optimizer.max_grad_norm": 10.0, "lora.rank": 32},
    **{"algorithm.temperature": 1.0, "algorithm.top_k": 0, "actor.slots": 64},
}
CRITIC = {"critic.level": "action", "critic.learning_rate": 3e-3, "actor.slots": 32}
RECIPES: dict[str, dict[str, Any]] = {
    **{f"wan_libero_{suite}_grpo_openvlaoft": WAN for suite in ("spatial", "object", "goal")},
    **{
        f"opensora_libero_{suite}_grpo_openvlaoft": OPENSORA
        | {"world": f"models/RLinf-OpenSora-LIBERO-{suite.capitalize()}"}
        for suite in ("spatial", "object")
    },
    "evac_libero_spatial_grpo_openvlaoft": GRPO
    | {
        **{"world": "models/evac_for_rlinf", "imagination.steps": 50, "algorithm.group_size": 2},
        **{"world_settings": (), "keyframes": False},
        # Siblings, groups and rollout epochs are 2 * 8 * 16 episodes, the global batch is 256 decisions.
        **{"algorithm.groups_per_update": 8 * 16, "algorithm.minibatches": 32, "actor.max_decisions": 32},
    },
    "wan_libero_spatial_ppo_openvlaoft": PPO
    | {
        **{"algorithm.level": "token", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28},
        **{"critic.gamma": 0.99, "critic.lam": 0.95, "critic.value_clip": 0.2, "critic.huber": 10.0},
    },
    **{
        f"libero_{suite}_grpo_openvlaoft": GRPO | LIBERO | {"world": f"libero_{suite}"}
        for suite in ("spatial", "object", "goal", "10")
    },
    "libero_10_ppo_openvlaoft": PPO
    | {"world": "libero_10", "algorithm.groups_per_update": 64, "algorithm.minibatches": 4},
    "maniskill_ppo_openvla": MANISKILL
    | CRITIC
    | {"algorithm.micro_batch": 80, "algorithm.level": "action", "algorithm.clip_high": 0.2},
    "maniskill_ppo_openvlaoft": MANISKILL | CRITIC,
    "maniskill_grpo_openvla": MANISKILL
    | {
        **{"optimizer.learning_rate": 1e-5, "optimizer.max_grad_norm": 1.0},
        **{"algorithm.top_k": 50, "lora.rank": 0},
    },
    "maniskill_grpo_openvlaoft": MANISKILL,
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_have_rlinfs_values(name: str) -> None:
    config = load_file(CONFIGS / f"{name}.toml")
    assert {key: attrgetter(key)(config) for key in RECIPES[name]} == RECIPES[name]
    chosen = config.algorithm
    if name.startswith("maniskill"):  # The global batch.
        assert chosen.group_size * chosen.groups_per_update * 80 / chosen.minibatches == 640
    if name.startswith("libero") and "grpo" in name:
        assert config.actor.slots == config.simulator.workers, "LIBERO has one episode in a process"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_slots_of_every_recipe_fit_its_simulator(file: Path) -> None:
    config = load_file(file)
    if not (name := simulator_named(config.world)):
        return
    places = -(-config.actor.slots // max(1, config.simulator.workers))
    assert places <= getattr(registry.resolve("simulator", name), "most_places", places)
    refuse_idle(config)


def test_settings_of_the_users_classes_come_back_from_a_runs_folder(tmp_path: Path) -> None:
    text = '[correction]\nkind = "my.fix:Mine"\n[correction.settings]\ntolerance = 0.5\nname = "a"\n'
    config = load_file(toml(tmp_path, text))
    assert config.correction.settings == ("tolerance=0.5", 'name="a"')
    (tmp_path / "config.json").write_text(to_json(config))
    assert load_file(tmp_path / "config.json") == config
    flags = ["--correction.kind", "my.fix:Mine", "--correction.settings", "tolerance=0.5", 'name="a"']
    assert parse(flags) == config


def test_a_lasting_success_is_that_of_a_decisions_last_frame() -> None:
    lasting = GuardSettings(kind="lasting")
    assert TrainConfig().success_frames == 1
    assert TrainConfig(guard=lasting).success_frames == "last"
    assert TrainConfig(actor=ActorSettings(success_frames=3)).success_frames == 3
    with pytest.raises(ConfigError, match=r"lasting and --actor\.success-frames is 3"):
        TrainConfig(guard=lasting, actor=ActorSettings(success_frames=3))


def test_a_setting_that_is_gone_is_left_out_of_the_settings_of_an_older_run(tmp_path: Path) -> None:
    run = tmp_path / "config.json"
    run.write_text(json.dumps({"updates": 7, "pace": {"every": 0}, "replay": {"max_world_lag": 1}}))
    assert load_file(run) == TrainConfig(updates=7)
    assert gone_settings(run) == "--replay.max-world-lag 1", "those that were off are not named"
    with pytest.raises(ConfigError, match="sets 'pace', which does not exist"):
        load_file(toml(tmp_path, "[pace]\nevery = 0\n"))


@pytest.mark.parametrize(
    ("max_lag", "chosen", "holds"),
    [
        (0, "auto", 0.2),
        (2, "auto", 0.2),
        (3, "auto", 0.02),
        (16, "auto", 0.02),
        (16, 0.1, 0.1),
        (16, 0.0, 0.0),
    ],
)
def test_auto_follows_from_the_lag_that_holds(max_lag, chosen, holds) -> None:
    config = TrainConfig(
        replay=ReplaySettings(max_lag=max_lag), correction=CorrectionSettings(trust_region=chosen)
    )
    assert config.trust_region == holds


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, {}, []),
    ({"clip_high": 0.5}, {}, {}, ["--algorithm.clip-high"]),
    ({"clip_high": 0.5, "minibatches": 2}, {}, {}, []),
    ({"clip_low": 0.1}, {"kind": "naive"}, {}, []),
    ({"dual_clip": 5.0}, {"kind": "none"}, {}, ["--algorithm.dual-clip"]),
    ({"objective": "cispo", "dual_clip": 5.0, "epochs": 2}, {}, {}, ["--algorithm.dual-clip"]),
    ({"kind": "ppo", "advantage_scale": "none"}, {}, {}, ["--algorithm.advantage-scale"]),
    ({}, {}, {"gamma": 0.5}, ["--critic.gamma"]),
    ({"kind": "ppo"}, {}, {"gamma": 0.5}, []),
    ({}, {"kind": "none", "max_weight": 3.0}, {}, ["--correction.max-weight"]),
    ({}, {"kind": "decoupled", "min_weight": 0.5}, {}, ["--correction.min-weight"]),
    ({}, {"kind": "mis"}, {}, ["--correction.kind mis"]),
    ({}, {"kind": "mis", "min_weight": 0.5}, {}, []),
    ({}, {"kind": "mine.corrections:Own", "max_weight": 3.0}, {}, []),
    ({}, {"kind": "none", "trust_region": 0.1}, {}, []),
]


@pytest.mark.parametrize(("algorithm", "correction", "critic", "named"), CASES)
def test_what_cannot_act_is_named(algorithm, correction, critic, named) -> None:
    lines = idle_settings(
        AlgorithmSettings(**algorithm), CorrectionSettings(**correction), CriticSettings(**critic)
    )
    assert len(lines) == len(named)
    assert all(line.startswith(name) for line, name in zip(lines, named, strict=True))


SETTINGS = {
    "train": (TRAIN, TrainConfig()),
    "doctor": (doctor.HELP, TrainConfig()),
    "evaluate": (evaluate.HELP, evaluate.EvaluateConfig()),
    "audit": (audit.HELP, audit.AuditConfig()),
    "collect": (collect.HELP, collect.CollectConfig(out=Path())),
    "convert": (convert.HELP, convert.ConvertConfig(source="", out=Path())),
}
LONGEST = 60
"""Lines of a help above which a command has a short one."""


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", SETTINGS)
def test_it_fits_one_screen_and_names_the_way_to_the_rest(command: str) -> None:
    help_text, settings = SETTINGS[command]
    lines = help_text.text(settings).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == f"usage: asyncrl {command} {help_text.usage}"
    assert lines[-1].endswith(f"asyncrl {command} --help-all")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_no_command_has_a_long_help(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        cli.run(command, ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: asyncrl " + command)
    assert len(text.splitlines()) <= LONGEST
    assert ("--help-all" in text) == (command in SETTINGS)


@pytest.mark.parametrize("command", ["evaluate", "collect"])
def test_help_all_of_another_command_shows_what_the_short_one_leaves_out(command: str, capsys) -> None:
    help_text, settings = SETTINGS[command]
    with pytest.raises(SystemExit):
        cli.run(command, ["--help-all"])
    everything = capsys.readouterr().out
    assert "--horizon" in everything
    assert "--horizon" not in help_text.text(settings)
    for name in " ".join(help_text.groups.values()).split():
        assert f"--{name.replace('_', '-')}" in everything


def test_defaults_stand_behind_what_a_flag_does() -> None:
    rows = dict(
        re.fullmatch(r"  (--\S+).*?(?: \(([^()]*)\))?", line).groups()
        for line in TRAIN.text(TrainConfig()).splitlines()
        if line.startswith("  --")
    )
    assert rows["--updates"] == "10"
    assert rows["--seed"] == "0"
    assert rows["--run-dir"] == "runs/{time}"
    assert rows["--optimizer.learning-rate"] == "0.0001"
    assert rows["--resume"] is rows["--reward"] is rows["--dry-run"] is None


def test_help_shows_what_a_file_on_the_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("updates = 77\n")
    for line in (["--help", f"{tmp_path}/mine.toml"], [f"{tmp_path}/mine.toml", "-h"]):
        assert re.search(r"--updates N .*\(77\)", printed(line, capsys))


def test_help_all_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(["--help-all"], capsys)
    assert everything.startswith("usage: asyncrl train [CONFIG.toml ...]")
    for flag in ("--dry-run", "--hang-timeout", "--imagination.fixed-shape", "--critic.lam"):
        assert flag in everything
        assert (flag in TRAIN.text(TrainConfig())) == (flag == "--dry-run")
