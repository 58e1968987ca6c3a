"""`asyncrl doctor` on GPUs: what it says about devices, memory and NCCL between every pair."""

import pytest
import torch

from asyncrl.config.run import TrainConfig
from asyncrl.doctor import gpus, links, models
from asyncrl.doctor.checks import Examination, Verdict

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_one_gpu_forms_a_group_alone_and_one_that_is_not_there_is_named() -> None:
    (result,) = links.measure(["cuda:0"], links.GPU_BYTES, links.GPU_TIMES)
    assert result == links.Result(pair="cuda:0")
    assert links.judge("GPU links", [result], links.GPU_BYTES, "nccl").seen == (
        "nccl forms a group on cuda:0, which is alone"
    )
    (result,) = links.measure(["cuda:0", f"cuda:{GPUS}"], 1 << 20, 1)
    assert f"cuda:{GPUS}" in result.problem


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_every_pair_is_measured_both_ways() -> None:
    results = links.measure([f"cuda:{i}" for i in range(GPUS)], links.GPU_BYTES, links.GPU_TIMES)
    assert [result.problem for result in results] == [""] * (GPUS * (GPUS - 1) // 2)
    assert all(len(result.rates) == 2 and min(result.rates) > 0.5 for result in results)
    finding = links.check_links(Examination(config=TrainConfig()))
    assert (finding.name, finding.verdict) == ("GPU links", Verdict.OK), finding


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_memory_is_compared_with_what_the_gpu_has() -> None:
    examination = Examination(config=TrainConfig())
    assert models.check_models(examination).verdict is Verdict.OK
    finding = gpus.check_device_memory(examination)
    assert finding is not None
    assert finding.verdict is Verdict.OK
    assert "cuda:0: " in finding.seen
    placed = gpus.check_placement(examination)
    assert placed.verdict is Verdict.OK
    assert "rank 0 (learner + actor) on cuda:0; weights by cuda_ipc" in placed.seen
