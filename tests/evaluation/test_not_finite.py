"""Models whose weights hold NaN are refused at every door, in a sentence that names the model."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors

from asyncrl import cli
from asyncrl.config.run import load_file
from asyncrl.devices.tensors import all_finite, require_finite
from asyncrl.errors import CheckpointError, RunError
from asyncrl.evaluation.run_checkpoints import RunCheckpoints, read_evaluations
from asyncrl.launch.evaluator import VersionPlayer
from asyncrl.simulators.interface import SimulatorSource, random_start
from asyncrl.simulators.rollout import Play
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.storage.tensor_files import Spec, write_file, write_tensors
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import SIZE, write_models

CPU = torch.device("cpu")
FILES = {
    "policy": "policy/model.safetensors",
    "world": "world/transformer.safetensors",
    "vae": "world/vae.safetensors",
    "reward": "world/reward.safetensors",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, a run of them and recordings, and in NAME the same models with one spoiled."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "sound").mkdir()
    flags = [*write_models(folder / "sound"), "--inline", "--updates", "1", "--run-dir", str(folder / "run")]
    assert cli.run("train", flags) == 0
    spec = recorded_spec(SIZE, simulator="tabletop", tasks=tuple(TASKS), trials=0)
    (folder / "data").mkdir()
    write_recorded(folder / "data", spec, (20, 20))
    for name, file in FILES.items():
        for part in ("policy", "world"):
            shutil.copytree(folder / "sound" / part, folder / name / part)
        shutil.copy(folder / "sound" / "starts.h5", folder / name)
        tensors = safetensors.load_file(folder / name / file)
        one = next(key for key, tensor in tensors.items() if tensor.ndim > 1)
        safetensors.save_file(tensors | {one: tensors[one] * math.nan}, folder / name / file)
    return folder


PLAYED = "--device cpu --workers 1 --episodes 1"
FITTED = "--device cpu --steps 2 --batch 4 --data data"
DECODER = "fit decoder --device cpu --start-states sound/starts.h5 --steps 2 --decisions 1"
DECODER += " --episodes 1 --held-out 1"
POLICY, WORLD, REWARD = (
    "policy policy/policy are not",
    "frames of the world model are",
    "scores of the reward model are",
)
FIRST, PICTURES = "loss of `{}` is nan. That is its first step", "pictures of the world's autoencoder are not"
DOORS = {
    f"evaluate policy/policy {PLAYED}": POLICY,
    f"evaluate sound/policy {PLAYED} --world world/world --video out.gif": WORLD,
    f"collect --policy policy/policy --out out {PLAYED}": POLICY,
    f"audit policy/policy --world sound/world {PLAYED} --rows 1 --max-decisions 1": POLICY,
    f"audit sound/policy --world vae/world {PLAYED} --rows 1 --max-decisions 1": WORLD,
    f"audit sound/policy --world reward/world {PLAYED} --rows 1 --max-decisions 1": REWARD,
    "replay imagine run 0 --device cpu --world world/world": WORLD,
    "replay imagine run 0 --device cpu --world reward/world": REWARD,
    "replay imagine run 0 --device cpu --policy policy/policy": "log-probs of the policy are",
    f"fit policy {FITTED} --out out --refine policy/policy": FIRST.format("policy"),
    f"fit policy {FITTED} --out out --refine sound/policy --world vae/world": PICTURES,
    f"fit world {FITTED} --out out --refine vae/world": FIRST.format("world"),
    f"fit reward {FITTED} --world vae/world": PICTURES,
    f"{DECODER} --out out --world world/world --policy sound/policy": WORLD,
    f"{DECODER} --out out --world sound/world --policy policy/policy": "log-probs of the policy are",
    f"{DECODER} --out out --world reward/world --policy sound/policy": REWARD,
    "convert policy/policy out": "cls_token would hold NaN or infinity in torch.float32",
    "check policy policy/policy": "act is not finite everywhere",
    "check world world/world --start-states sound/starts.h5": "imagine()[1].finite is [False, False]",
    "check world vae/world --start-states sound/starts.h5": "start().finite is [False, False]",
    "check reward reward/world": "score is (nan, nan)",
}


@pytest.mark.render
@pytest.mark.parametrize("line", DOORS)
def test_nothing_is_measured_fitted_or_written_with_models_that_are_not_finite(
    models: Path, line: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(models)
    command, *arguments = line.split()
    assert cli.run(command, arguments) in (1, 2)
    error = capsys.readouterr().err
    assert DOORS[line] in error
    assert "Traceback" not in error
    assert not list(models.glob("out*/*.*")), "nothing that looks like a result is left"
    shutil.rmtree("out", ignore_errors=True)


@pytest.mark.render
def test_an_evaluator_measures_no_version_that_is_not_finite(models: Path) -> None:
    config = replace(
        load_file(models / "run" / "config.json"), policy=str(models / "policy" / "policy"), device="cpu"
    )
    config = replace(config, simulator=replace(config.simulator, workers=1))
    source = SimulatorSource(name="tabletop", image_size=SIZE, horizon=8)
    player = VersionPlayer(config, source, [Play(start=random_start(source.spec(), 0))], models, CPU)
    checkpoints = RunCheckpoints(models, player, every=1, last=1, simulator="tabletop", temperature=1.0)
    with pytest.raises(RunError, match="policy of version 0 are not finite"):
        checkpoints.round()
    player.close()
    assert read_evaluations(models) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_weights_that_are_not_finite_in_their_type_are_not_written(bad, dtype, tmp_path) -> None:
    tensor = torch.zeros(70, 3, dtype=torch.float64)
    tensor[69, 2] = bad
    with pytest.raises(CheckpointError, match=r"tensor b would hold NaN or infinity in torch\.\w+"):
        write_file(tmp_path / "x", {"b": Spec(dtype, (70, 3))}, iter([("b", tensor)]))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match="The scores of the reward model are not finite"):
        require_finite("reward model", scores=tensor.to(dtype))


def test_numbers_that_are_finite_or_none_are_written(tmp_path: Path) -> None:
    kinds = (
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.tensor([1, 2]),
        torch.tensor(1.0),
        torch.ones(2).half(),
    )
    assert all(all_finite(tensor) for tensor in kinds)
    write_tensors(tmp_path / "x", {str(number): tensor for number, tensor in enumerate(kinds)})
