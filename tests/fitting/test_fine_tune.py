"""A policy is fine-tuned alike on one rank or two, in parts or at once, by adapters or all of its weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_models import fit_policy
from asyncrl.fitting.loop import Schedule, parts_of
from asyncrl.fitting.sources import load_recordings
from asyncrl.policies.lora import add_lora, merged_tensors
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.export import convert
from asyncrl.policies.openvla.files import open_folder
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, load_policy
from asyncrl.simulators.tabletop.scene import TASKS
from support.recorded import recorded_spec, write_recorded
from support.whole_runs import on_two_ranks, refused

STEPS = ("--steps", "3", "--batch", "8", "--learning-rate", "1e-2", "--average", "0", "--device", "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Recordings and a tiny policy to begin with."""
    folder = tmp_path_factory.mktemp("fine")
    torch.manual_seed(0)
    OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()).save(folder / "policy")
    write_recorded(folder / "data", recorded_spec(64, tasks=TASKS[:3]), (20, 20, 20))
    return folder


def fit(folders: Path, out: Path, *more: str) -> Path:
    named = ["--data", str(folders / "data"), "--refine", str(folders / "policy"), "--out", str(out)]
    assert cli.run("fit", ["policy", *named, *STEPS, *more]) == 0
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_folder(folder).natives())


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= atol, name


def slow_adapters(folders: Path, rank: int) -> dict[str, torch.Tensor]:
    """The same three steps by a plain loop over one policy in this process."""
    torch.manual_seed(0)
    policy = load_policy(folders / "policy")
    policy.drop_critic()
    add_lora(policy, rank, 0.0, "all")
    recordings = load_recordings([folders / "data"])
    fit_policy(policy, recordings, Schedule(steps=3, batch=8, learning_rate=1e-2), average=0.0)
    return {name: tensor.detach() for name, tensor in merged_tensors(policy)}


def test_adapters_alone_are_trained_and_written_merged_and_alone(folders, tmp_path, capsys) -> None:
    found = tensors(fit(folders, tmp_path / "out", "--lora.rank", "4"))
    assert_close(found, slow_adapters(folders, 4), 1e-6)
    before = tensors(folders / "policy")
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed), "what has no adapter stays"
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    assert "adapters of rank 4" in capsys.readouterr().out


def test_a_step_is_the_same_in_parts(folders, tmp_path) -> None:
    whole = tensors(fit(folders, tmp_path / "whole", "--lora.rank", "4"))
    parts = tensors(fit(folders, tmp_path / "parts", "--lora.rank", "4", "--micro-batch", "2"))
    assert_close(parts, whole, 2e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "more",
    [
        ("--gradient-checkpointing", "--average", "0.5"),
        pytest.param(("--lora.rank", "4"), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_fit_what_one_does(folders, tmp_path, more) -> None:
    alone = tensors(fit(folders, tmp_path / "alone", *more))
    named = ["--data", str(folders / "data"), "--refine", str(folders / "policy")]
    flags = ["policy", *named, "--out", str(tmp_path / "two"), *STEPS, *more]
    done = on_two_ranks(tmp_path, ["-m", "asyncrl", "fit"], flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nats per action token") == 1, "one rank speaks"
    found, before = tensors(tmp_path / "two"), tensors(folders / "policy")
    # AdamW moves every number by as much, also one whose gradient is rounding alone: few of them may differ.
    differing = torch.cat([((found[name] - alone[name]).abs() > 1e-4).flatten() for name in alone])
    moved = torch.cat([((before[name].float() - alone[name]).abs() > 1e-3).flatten() for name in alone])
    assert differing.float().mean() < 1e-3
    assert moved.float().mean() > 0.05


def test_statistics_can_be_taken_anew(folders, tmp_path) -> None:
    fit(folders, tmp_path / "out", "--statistics", "q01_q99")
    config = load_policy(tmp_path / "out").config
    actions = load_recordings([folders / "data"]).actions
    low = np.quantile(np.delete(actions, [0, 20, 40], axis=0).astype(np.float64), 0.01, axis=0)
    assert config.norm_stats[config.norm_key].q01 == pytest.approx(low.tolist())


@pytest.mark.parametrize("kind", ["policy", "world"])
def test_flags_of_fine_tuning_need_weights(folders, tmp_path, capsys, kind) -> None:
    flags = ["--data", str(folders / "data"), "--out", str(tmp_path / "out"), "--lora.rank", "4"]
    said = refused(capsys, "fit", [kind, *flags])
    assert f"--lora.rank is about fine-tuning, but --refine names no {kind}" in said


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    assert (parts_of(8, 1, 0), parts_of(8, 2, 0), parts_of(8, 2, 2)) == (1, 1, 2)
    with pytest.raises(ConfigError, match="a multiple of 6"):
        parts_of(8, 2, 3)
    with pytest.raises(ConfigError, match="--batch is 3 for 4 ranks"):
        parts_of(3, 4, 0)


def test_a_published_policy_needs_no_flag_besides(folders, tmp_path) -> None:
    convert(folders / "policy", tmp_path / "published")
    flags = ["policy", "--data", str(folders / "data"), "--out", str(tmp_path / "out")]
    assert cli.run("fit", [*flags, "--refine", str(tmp_path / "published"), *STEPS]) == 0
    assert load_policy(tmp_path / "out").config.dtype == "float32"
