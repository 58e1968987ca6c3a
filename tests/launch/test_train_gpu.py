"""Whole runs on GPUs: one shared by learner and actor, and learners and actors with one each."""

import pytest
import torch

from asyncrl.observability import metrics_training as m
from asyncrl.storage import checkpoint
from support import ROOT
from support.tiny_models import write_models
from support.whole_runs import TORCHRUN, Program, left_over, rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
FOUR = "learner=0-1,actor=2-3"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    written = write_models(tmp_path_factory.mktemp("models"))
    more = ["--device", "cuda", "--algorithm.groups-per-update", "2", "--updates", "3"]
    evaluated = ["--algorithm.entropy-coef", "0.001"]  # Groups without signal are evaluated too.
    return [*written, *more, *evaluated]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (1, ["--algorithm.kind", "ppo", "--lora.rank", "2", "--learner.precision", "bf16"]),
        (2, ["--algorithm.kind", "ppo", "--learner.gradient-checkpointing"]),
        (4, ["--placement", FOUR, "--learner.precision", "bf16", "--algorithm.kl-coef", "0.1"]),
    ],
    ids=["shared", "shared-ppo-lora-bf16", "nccl", "four-bf16"],
)
def test_a_run_on_gpus_trains_saves_and_goes_on(flags, tmp_path, ranks, more) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    start = [*TORCHRUN, "--nproc-per-node", str(ranks), str(ROOT / "torchrun_scripts" / "train.sh")]
    run = tmp_path / "run"
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))}
    for command in ([*flags, *more], [*flags, *more, "--resume", "--updates", "5"]):
        Program(tmp_path, "said", [*start, *command, "--run-dir", str(run)], more=gpus).ends()
    made = rows(run)
    assert [row["step"] for row in made] == [1, 2, 3, 4, 5]
    assert made[-1][m.GRAD_NORM.name] >= 0
    # GRPO with random models may find no advantage, and what is taught nothing is not read.
    fresh = m.MISMATCH_KL_AT_LAG[0].name  # Of episodes by the weights that evaluate them.
    found = [row[fresh] for row in made if fresh in row]
    assert found or "ppo" not in more
    assert all(kl < 0.01 for kl in found), "actor and learner compute the same, up to bfloat16"
    assert checkpoint.latest(run) == run / "checkpoints" / "update_000005"
    assert left_over(tmp_path) == []
