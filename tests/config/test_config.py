"""Settings: flags and files in, one configuration out, or an answer that helps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl import registry
from asyncrl.config.algorithm import (
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    LearnerSettings,
    LoraSettings,
    OptimizerSettings,
)
from asyncrl.config.loading import load_file, overlay, parse, to_json
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, GuardSettings, ReplaySettings, WeightSettings
from asyncrl.errors import ConfigError
from asyncrl.launch.simulated import refuse_idle
from asyncrl.storage.asset_paths import simulator_named
from asyncrl.worlds.evac.state import EvacOptions
from support import ROOT

CONFIGS = ROOT / "configs"


def toml(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_without_arguments_the_defaults_hold() -> None:
    assert parse([]) == TrainConfig()


def test_flags_reach_nested_settings() -> None:
    config = parse(
        [
            "--updates",
            "3",
            "--inline",
            "--algorithm.group-size",
            "4",
            "--replay.max-lag",
            "0",
            "--run-dir",
            "a",
        ]
    )
    assert config == TrainConfig(
        updates=3,
        inline=True,
        run_dir="a",
        algorithm=AlgorithmSettings(group_size=4),
        replay=ReplaySettings(max_lag=0),
    )


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, "updates = 7\nseed = 5\n[actor]\nslots = 3\nmax-decisions = 2\n")
    config = parse([str(path), "--updates", "9"])
    assert config == TrainConfig(updates=9, seed=5, actor=ActorSettings(slots=3, max_decisions=2))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = TrainConfig(
        updates=11,
        synchronous=True,
        algorithm=AlgorithmSettings(kind="ppo"),
        optimizer=OptimizerSettings(learning_rate=3e-5),
        correction=CorrectionSettings(kind="vtrace"),
        weights=WeightSettings(transport="nccl", timeout=9.5),
    )
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert load_file(path) == config


def test_synchronous_means_a_lag_of_zero() -> None:
    settings = ReplaySettings(max_lag=3)
    assert TrainConfig(replay=settings).max_lag == 3
    assert TrainConfig(replay=settings, synchronous=True).max_lag == 0


def test_overlay_leaves_the_original_alone() -> None:
    config = TrainConfig()
    changed = overlay(config, {"replay": {"max_lag": 5}}, "here")
    assert (config.replay.max_lag, changed.replay.max_lag, changed.replay.group_timeout) == (2, 5, 300.0)


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
    ],
)
def test_a_wrong_file_is_answered_with_what_is_wrong(tmp_path: Path, text: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        load_file(toml(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        load_file(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("settings", "wrong", "flag"),
    [
        (AlgorithmSettings, {"group_size": 1}, "--algorithm.group-size is 1"),
        (AlgorithmSettings, {"temperature": 0.0}, "--algorithm.temperature is 0.0"),
        (AlgorithmSettings, {"temperature": float("nan")}, "--algorithm.temperature is nan"),
        (AlgorithmSettings, {"top_k": 257}, "--algorithm.top-k is 257"),
        (AlgorithmSettings, {"clip_low": 1.5}, "--algorithm.clip-low is 1.5"),
        (AlgorithmSettings, {"dual_clip": 0.9}, "--algorithm.dual-clip is 0.9"),
        (AlgorithmSettings, {"minibatches": 0}, "--algorithm.minibatches is 0"),
        (CorrectionSettings, {"max_weight": 0.5}, "--correction.max-weight is 0.5"),
        (CorrectionSettings, {"min_weight": 1.0}, "--correction.min-weight is 1.0"),
        (CorrectionSettings, {"rho_cap": 0.5}, "--correction.rho-cap is 0.5"),
        (CriticSettings, {"gamma": 1.1}, "--critic.gamma is 1.1"),
        (CriticSettings, {"huber": 0.0}, "--critic.huber is 0.0"),
        (OptimizerSettings, {"final_lr_share": 2.0}, "--optimizer.final-lr-share is 2.0"),
        (OptimizerSettings, {"max_grad_norm": -1.0}, "--optimizer.max-grad-norm is -1.0.*gradient ascent"),
        (OptimizerSettings, {"max_grad_norm": 0.0}, "--optimizer.max-grad-norm is 0.0.*trains nothing"),
        (OptimizerSettings, {"max_grad_norm": math.nan}, "--optimizer.max-grad-norm is nan"),
        (OptimizerSettings, {"learning_rate": -1e-4}, "--optimizer.learning-rate is -0.0001"),
        (OptimizerSettings, {"learning_rate": math.nan}, "--optimizer.learning-rate is nan"),
        (OptimizerSettings, {"beta1": 1.0}, "--optimizer.beta1 is 1.0"),
        (OptimizerSettings, {"beta2": -0.1}, "--optimizer.beta2 is -0.1"),
        (OptimizerSettings, {"weight_decay": -0.1}, "--optimizer.weight-decay is -0.1"),
        (OptimizerSettings, {"eps": 0.0}, "--optimizer.eps is 0.0"),
        (CriticSettings, {"learning_rate": math.inf}, "--critic.learning-rate is inf"),
        (TrainConfig, {"seed": -1}, "--seed is -1"),
        (LoraSettings, {"rank": -1}, "--lora.rank is -1"),
        (LearnerSettings, {"threads": 0}, "--learner.threads is 0"),
        (LearnerSettings, {"gradient_checkpointing_every": 0}, "--learner.gradient-checkpointing-every is 0"),
        (
            LearnerSettings,
            {"gradient_checkpointing_every": 2},
            "every is 2.*but without --learner.gradient-ch",
        ),
        (ReplaySettings, {"max_lag": -1}, "--replay.max-lag is -1"),
        (ActorSettings, {"success_threshold": 0.0}, "--actor.success-threshold is 0.0"),
        (ActorSettings, {"success_frames": 0}, "--actor.success-frames is 0.*Use 1, or the word last"),
        (WeightSettings, {"timeout": 0.0}, "--weights.timeout is 0.0"),
        (TrainConfig, {"updates": 0}, "--updates is 0"),
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


def test_a_bad_flag_exits_with_two_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--algorithm.group-size", "1"])
    assert left.value.code == 2
    said = " ".join((capsys.readouterr().err).replace("│", " ").split())
    assert "advantage is always zero" in said


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
        ({"correction.proximal": "log_linear", "correction.veto": 0.1}, "log_linear.*recomputed"),
        ({"correction.proximal": "log_linear", "correction.level": "episode"}, "log_linear.*recomputed"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes: dict[str, Any], message: str) -> None:
    table: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, field = name.split(".")
        table.setdefault(part, {})[field] = value
    with pytest.raises(ConfigError, match=message):
        overlay(TrainConfig(), table, "test")


def test_a_choice_that_does_not_exist_is_refused_in_a_file_as_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"kind is 'tiss'.*Perhaps you meant 'tis'"):
        overlay(TrainConfig(), {"correction": {"kind": "tiss"}}, "run.toml")


@pytest.mark.parametrize("suite", ["spatial", "object", "goal"])
def test_the_wan_recipes_have_rlinfs_values(suite: str) -> None:
    config = load_file(CONFIGS / f"wan_libero_{suite}_grpo_openvlaoft.toml")
    chosen, optimizer = config.algorithm, config.optimizer
    assert (chosen.kind, chosen.level, chosen.group_size) == ("grpo", "token", 8)
    assert chosen.group_size * chosen.groups_per_update == 64 * 16  # environments times rollout epochs
    assert config.actor.max_decisions * 8 == 256
    assert 64 * 16 * 32 / chosen.minibatches == 8192  # the global batch
    assert (chosen.micro_batch, chosen.clip_low, chosen.clip_high) == (32, 0.2, 0.28)
    assert (chosen.temperature, chosen.top_k) == (1.6, 0)
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (2e-5, 0.9, 0.999)
    assert (optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm) == (1e-5, 0.01, 1.0)
    assert (config.lora.rank, config.learner.precision, config.learner.gradient_checkpointing) == (
        0,
        "bf16",
        True,
    )
    assert (config.imagination.context, config.imagination.decoder, config.imagination.steps) == (
        "frames",
        "full",
        5,
    )
    assert (config.actor.success_threshold, config.keyframes, config.seed) == (0.9, True, 1234)
    assert config.actor.success_frames == "last"


@pytest.mark.parametrize("suite", ["spatial", "object"])
def test_the_opensora_recipes_have_rlinfs_values(suite: str) -> None:
    config = load_file(CONFIGS / f"opensora_libero_{suite}_grpo_openvlaoft.toml")
    chosen, optimizer = config.algorithm, config.optimizer
    assert config.world == f"models/RLinf-OpenSora-LIBERO-{suite.capitalize()}"
    assert (chosen.kind, chosen.level, chosen.group_size) == ("grpo", "token", 8)
    assert chosen.group_size * chosen.groups_per_update == 64 * 16  # environments times rollout epochs
    assert config.actor.max_decisions * 8 == 256
    assert 64 * 16 * 32 / chosen.minibatches == 8192  # the global batch
    assert (chosen.micro_batch, chosen.clip_low, chosen.clip_high) == (32, 0.2, 0.28)
    assert (chosen.temperature, chosen.top_k, optimizer.learning_rate, optimizer.eps) == (1.6, 0, 2e-5, 1e-8)
    assert (config.imagination.context, config.imagination.steps) == ("latents", 10)
    assert (config.keyframes, config.checkpoint_every, config.seed) == (False, 25, 1234)
    assert (config.actor.success_threshold, config.actor.success_frames) == (0.9, "last")


def test_the_evac_recipe_has_rlinfs_values() -> None:
    config = load_file(CONFIGS / "evac_libero_spatial_grpo_openvlaoft.toml")
    chosen = config.algorithm
    assert (config.world, config.imagination.steps) == ("models/evac_for_rlinf", 50)
    assert config.world_settings == ("guidance=1.0", "guidance_rescale=0.7", "eta=1.0")
    assert EvacOptions.from_settings(
        config.imagination, registry.keywords("--world-settings", config.world_settings)
    ) == EvacOptions(steps=50)
    assert (chosen.kind, chosen.level, chosen.group_size) == ("grpo", "token", 2)
    assert chosen.group_size * chosen.groups_per_update == 2 * 8 * 16  # siblings, groups, rollout epochs
    assert config.actor.max_decisions * 8 == 256
    assert 2 * 8 * 16 * 32 / chosen.minibatches == 256  # the global batch
    assert (chosen.micro_batch, chosen.clip_low, chosen.clip_high) == (32, 0.2, 0.28)
    assert (chosen.temperature, config.optimizer.learning_rate, config.keyframes) == (1.6, 2e-5, False)


def test_the_wan_ppo_recipe_has_rlinfs_values() -> None:
    config = load_file(CONFIGS / "wan_libero_spatial_ppo_openvlaoft.toml")
    chosen, critic = config.algorithm, config.critic
    assert (chosen.kind, chosen.level, critic.level, chosen.group_size) == ("ppo", "token", "decision", 1)
    assert (chosen.micro_batch, chosen.clip_low, chosen.clip_high) == (16, 0.2, 0.28)
    assert (chosen.temperature, chosen.top_k) == (1.0, 50)
    assert (critic.learning_rate, critic.gamma, critic.lam) == (3e-3, 0.99, 0.95)
    assert (critic.value_clip, critic.huber) == (0.2, 10.0)
    assert (config.optimizer.learning_rate, config.lora.rank) == (5e-6, 32)


@pytest.mark.parametrize("suite", ["spatial", "object", "goal", "10"])
def test_the_libero_recipes_have_rlinfs_values(suite: str) -> None:
    config = load_file(CONFIGS / f"libero_{suite}_grpo_openvlaoft.toml")
    chosen, optimizer = config.algorithm, config.optimizer
    assert (config.world, config.simulator.horizon) == (f"libero_{suite}", 512)
    assert config.world_settings == ("settle=15", "wrist=false")
    assert (chosen.kind, chosen.level, chosen.group_size) == ("grpo", "token", 8)
    assert chosen.group_size * chosen.groups_per_update == 64 * 16  # environments times rollout epochs
    assert 64 * 16 * 64 / chosen.minibatches == 16384  # the global batch
    assert (chosen.micro_batch, chosen.clip_low, chosen.clip_high) == (32, 0.2, 0.28)
    assert (chosen.temperature, chosen.top_k, optimizer.learning_rate, optimizer.eps) == (1.6, 0, 2e-5, 1e-8)
    assert config.actor.slots == config.simulator.workers, "LIBERO has one episode in a process"


def test_the_libero_ppo_recipe_has_rlinfs_values() -> None:
    config = load_file(CONFIGS / "libero_10_ppo_openvlaoft.toml")
    chosen, critic = config.algorithm, config.critic
    assert (config.world, config.simulator.horizon, config.lora.rank) == ("libero_10", 512, 32)
    assert (chosen.kind, chosen.group_size, chosen.groups_per_update) == ("ppo", 1, 64)
    assert 64 * 64 / chosen.minibatches == 1024  # the global batch
    assert (chosen.micro_batch, chosen.temperature, chosen.top_k) == (16, 1.0, 50)
    assert (critic.level, critic.learning_rate, config.optimizer.learning_rate) == ("decision", 3e-3, 5e-6)


@pytest.mark.parametrize(
    ("name", "micro_batch", "level", "clip_high", "learning_rate", "norm", "top_k", "rank"),
    [
        ("ppo_openvla", 80, "action", 0.2, 1e-4, 10.0, 0, 32),
        ("ppo_openvlaoft", 40, "token", 0.28, 1e-4, 10.0, 0, 32),
        ("grpo_openvla", 40, "token", 0.28, 1e-5, 1.0, 50, 0),
        ("grpo_openvlaoft", 40, "token", 0.28, 1e-4, 10.0, 0, 32),
    ],
)
def test_the_maniskill_recipes_have_rlinfs_values(
    name: str,
    micro_batch: int,
    level: str,
    clip_high: float,
    learning_rate: float,
    norm: float,
    top_k: int,
    rank: int,
) -> None:
    config = load_file(CONFIGS / f"maniskill_{name}.toml")
    chosen, optimizer = config.algorithm, config.optimizer
    assert (config.world, config.simulator.horizon) == ("maniskill_put_on_plate_25", 80)
    assert config.world_settings == ('reward="shaped"',)
    assert (chosen.micro_batch, chosen.level, chosen.clip_high) == (micro_batch, level, clip_high)
    assert (optimizer.learning_rate, optimizer.max_grad_norm) == (learning_rate, norm)
    assert (chosen.temperature, chosen.top_k, config.lora.rank) == (1.0, top_k, rank)
    assert chosen.group_size * chosen.groups_per_update * 80 / chosen.minibatches == 640  # the global batch
    if chosen.kind == "ppo":
        assert (config.critic.level, config.critic.learning_rate) == ("action", 3e-3)
    assert config.actor.slots * 4 == (128 if chosen.kind == "ppo" else 256)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_slots_of_every_recipe_fit_its_simulator(file: Path) -> None:
    config = load_file(file)
    if not (name := simulator_named(config.world)):
        return
    places = -(-config.actor.slots // max(1, config.simulator.workers))
    assert places <= getattr(registry.resolve("simulator", name), "most_places", places)
    refuse_idle(config)


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


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
    with pytest.raises(ConfigError, match="sets 'pace', which does not exist"):
        load_file(toml(tmp_path, "[pace]\nevery = 0\n"))
