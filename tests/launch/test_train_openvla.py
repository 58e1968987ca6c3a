"""OpenVLA with 8 steps per decision trains like other policies; what cannot train is refused at the start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl import cli
from asyncrl.observability import metrics_training as m
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, OpenVLAPolicy, load_policy
from support.tiny_models import write_models
from support.whole_runs import rows


def with_policy(folder: Path, policy: OpenVLAOFTPolicy) -> list[str]:
    flags = write_models(folder)
    policy.save(folder / "policy")
    return [*flags, "--inline", "--updates", "1", "--run-dir", str(folder / "run")]


def test_a_folder_in_the_published_layout_is_trained_as_it_is(tmp_path: Path) -> None:
    flags = with_policy(tmp_path, OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny(llm_layers=1)))
    published = str(tmp_path / "published")
    assert cli.run("convert", [str(tmp_path / "policy"), published]) == 0
    assert json.loads((tmp_path / "published" / "config.json").read_text())["model_type"] == "openvla"
    # A critic gives every decision an advantage, also where no episode succeeds.
    settings = ["--policy-settings", "gripper=none", "--algorithm.kind", "ppo"]
    assert cli.run("train", [*flags, "--policy", published, *settings]) == 0
    (row,) = rows(tmp_path / "run")
    assert abs(row[m.MISMATCH_KL.name]) < 1e-6
    assert cli.run("train", [*flags, "--policy", published, "--policy-settings", "griper=none"]) == 2


@pytest.mark.parametrize("level", ["token", "decision"])
def test_openvla_trains_by_tokens_and_by_decisions(tmp_path: Path, level: str) -> None:
    torch.manual_seed(0)
    before = OpenVLAPolicy(OpenVLAOFTConfig.tiny(decoding="autoregressive", llm_layers=1))
    flags = with_policy(tmp_path, before)
    more = ["--algorithm.kind", "ppo", "--algorithm.level", level, "--algorithm.entropy-coef", "0.01"]
    assert cli.run("train", [*flags, *more]) == 0
    (row,) = rows(tmp_path / "run")
    assert abs(row[m.MISMATCH_KL.name]) < 1e-6  # the actors' log-probs are those that the learner finds
    assert row[m.GRAD_NORM.name] > 0
    after = load_policy(next((tmp_path / "run" / "checkpoints").iterdir()))
    assert isinstance(after, OpenVLAPolicy)
    changed = after.trainable_tensors()
    assert all(
        not torch.equal(t, changed[n]) for n, t in before.trainable_tensors().items() if "proj.weight" in n
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoding": "autoregressive", "chunk": 1}, "makes 1 steps"),
        ({"chunk": 25, "action_dim": 14}, "makes 25 steps"),
        ({"images": 2}, "looks at 2 pictures"),
        ({"proprio_dim": 8}, "needs proprioception"),
    ],
)
def test_a_policy_that_no_world_can_train_is_refused_before_the_run_has_a_folder(
    tmp_path: Path, changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = with_policy(
        tmp_path,
        (OpenVLAPolicy if changes.get("decoding") else OpenVLAOFTPolicy)(OpenVLAOFTConfig.tiny(**changes)),
    )
    assert cli.run("train", flags) == 2
    short_path = " ".join(capsys.readouterr().err.split())
    assert "--policy cannot be trained" in short_path
    assert said in short_path
    assert not (tmp_path / "run").exists()
