"""A fit that is interrupted goes on and leaves no trace; rounded weights and CUDA graphs of its passes."""

import math
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl import cli
from asyncrl.errors import RunError
from asyncrl.fitting import loop
from asyncrl.fitting.loop import Rounded, learning_rate_at, prepared_network
from asyncrl.observability import signals
from asyncrl.storage.tensor_files import TensorFiles
from asyncrl.worlds.evac.unet import EvacUNet
from support.evac import TINY_UNET
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import write_models

STEPS = ["--steps", "3", "--batch", "4", "--device", "cpu"]
WORLD = ["--vae-steps", "2", "--vae-batch", "1", *STEPS]
SMALL = ["--episodes", "2", "--held-out", "1", "--decisions", "1", "--steps", "4", "--batch", "2"]
FITS = {
    "policy": (["policy", "--data", "{data}/64", "--out", "{out}", *STEPS], 4, "policy"),
    "vae": (["world", "--data", "{data}/32", "--out", "{out}", *WORLD], 2, "world"),
    **{
        kind: (["world", "--kind", kind, "--data", "{data}/32", "--out", "{out}", *WORLD], at, "world")
        for kind, at in (("wan", 6), ("opensora", 6), ("evac", 11))
    },
    "reward": (["reward", "--data", "{data}/64", "--world", "{out}", *STEPS], 3, "reward"),
    "decoder": (["decoder", "--out", "{out}", *SMALL, "--device", "cpu"], 2, "decoder"),
}
"""Name -> command line, the setting of a learning rate (two a step) that is interrupted, and the model."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    for size in (32, 64):
        spec = recorded_spec(size, simulator="tabletop", trials=0, poses=True)
        write_recorded(folder / str(size), spec, (17, 25, 33))
    write_models(folder)
    return folder


def fail(*_: object, **__: object) -> None:
    raise RunError("the disk is full")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.name} {name}": TensorFiles(file).read(name)
        for file in sorted(folder.rglob("*.safetensors"))
        for name in TensorFiles(file).names()
    }


class Line(nn.Module):
    """Learns where drawn numbers lie; its buffer counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def loss_at(self, rngs: tuple[torch.Generator, np.random.Generator]) -> Callable[[int], torch.Tensor]:
        def loss(step: int) -> torch.Tensor:
            self.get_buffer("calls").add_(1)
            drawn = torch.randn(3, generator=rngs[0]) + torch.from_numpy(rngs[1].normal(size=3)).float()
            return (self.at - drawn - torch.rand(3)).square().sum()

        return loss


@pytest.mark.parametrize(
    ("stage", "keeps", "ranks"),
    [("line", 300.0, 1), ("line", 0.0, 1), ("first", 300.0, 1), ("line", 300.0, 2), ("first", 300.0, 2)],
)
def test_a_stage_goes_on_with_its_weights_moments_averages_buffers_and_order(
    stage: str, keeps: float, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first` is followed by another one: its end is kept, and is not made again.

    Of two ranks, which get the same signal, each ends after the next step whose number is a multiple of 8.
    """
    shared, done = loop.FitRanks(size=ranks, sum=lambda value: ranks * value), {1: 5, 2: 8}[ranks]
    made = list[int]()
    monkeypatch.setattr(loop, "KEPT_AFTER", keeps)

    def fit(kept: loop.Kept | None, ends_at: int = 100) -> tuple[float, list[float], int]:
        torch.manual_seed(1)
        line, rngs = Line(), (torch.Generator().manual_seed(2), np.random.default_rng(3))
        schedule = loop.Schedule(steps=12, batch=2, learning_rate=0.1, warmup=2, kept=kept, ranks=shared)
        loss_at = line.loss_at(rngs)

        def loss(step: int) -> torch.Tensor:
            made.append(step)
            assert ends_at == 100 or kept is None or kept.folder.exists() == (step > 0 and keeps == 0)
            if step == ends_at:
                signals.interrupt(signal.SIGINT, None)
            return loss_at(step)

        monkeypatch.setattr(signals, "_asked", -math.inf)
        result = loop.minimise(stage, line, loss, schedule, average=0.9, rngs=rngs)
        return result, line.at.tolist(), int(line.get_buffer("calls"))

    kept = loop.Kept(folder=tmp_path / "out.fit-line", settings={"steps": 12})
    whole = fit(None)
    with pytest.raises(KeyboardInterrupt) as ended:
        fit(kept, ends_at=4)
    assert ended.value.__notes__ == [
        f"step {done} of 12 of `{stage}` is kept: the same command goes on from it"
    ]
    assert fit(kept) == whole
    assert made == [*range(12), *range(done), *range(done, 12)]
    if stage == "first":
        assert fit(kept) == whole
        assert made[24:] == []


def test_a_fit_whose_output_is_no_terminal_writes_no_line_before_its_time(capsys) -> None:
    line, rngs = Line(), (torch.Generator(), np.random.default_rng(3))
    schedule = loop.Schedule(steps=60, batch=1, learning_rate=0.1)
    loop.minimise("line", line, line.loss_at(rngs), schedule, rngs=rngs)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_an_interrupted_fit_goes_on_and_becomes_what_it_would_have_become(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, interrupted_at, model = FITS[name]
    steps = list[int]()

    def rate(step: int, schedule: loop.Schedule) -> float:
        steps.append(step)
        if len(steps) == interrupted_at:
            signals.interrupt(signal.SIGTERM, None)
        return learning_rate_at(step, schedule)

    def fit(out: str, *more: str) -> int:
        if model == "reward" and not (tmp_path / out).exists():
            shutil.copytree(data / "world", tmp_path / out)
        places = {"data": data, "out": tmp_path / out}
        return cli.run("fit", [*(word.format(**places) for word in words), *more])

    assert fit("whole") == 0
    monkeypatch.setattr(loop, "learning_rate_at", rate)
    monkeypatch.setattr(signals, "_asked", -math.inf)
    capsys.readouterr()
    assert fit("out") == 128 + signal.SIGTERM
    assert f"asyncrl fit: interrupted; step {steps[-1] + 1} of " in capsys.readouterr().err
    state = tmp_path / f"out.fit-{model}"
    assert fit("out", "--seed", "7") == 2
    assert f"{state} holds an unfinished fit with seed 0, not 7" in capsys.readouterr().err
    assert fit("out") == 0
    assert f"goes on with the unfinished fit in {state}" in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if ".fit-" in path.name]
    whole, found = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert whole.keys() == found.keys()
    assert [key for key, tensor in whole.items() if not torch.equal(tensor, found[key])] == []


@pytest.mark.slow
def test_a_state_that_is_damaged_is_named(data: Path, tmp_path, monkeypatch, capsys) -> None:
    words = [word.format(data=data, out=tmp_path / "out") for word in FITS["policy"][0]]
    monkeypatch.setattr(loop, "KEPT_AFTER", 0.0)
    monkeypatch.setattr("asyncrl.policies.openvla.policy.OpenVLAOFTPolicy.save", fail)
    assert cli.run("fit", words) == 1
    state = tmp_path / "out.fit-policy"
    (state / "policy" / "progress.json").write_text("{}")
    capsys.readouterr()
    assert cli.run("fit", words) == 2
    assert f"The unfinished fit in {state / 'policy'} cannot be read ('rngs')" in capsys.readouterr().err


CPU = torch.device("cpu")
BATCH, FRAMES, SIDE = 2, 12, 8


def network() -> EvacUNet:
    torch.manual_seed(0)
    unet = EvacUNet(TINY_UNET)
    for parameter in unet.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return unet


def inputs(seed: int, device: torch.device) -> list[Tensor]:
    size, generator = TINY_UNET, torch.Generator().manual_seed(seed)
    noise = [
        torch.randn(shape, generator=generator)
        for shape in (
            (BATCH, size.in_channels, FRAMES, SIDE, SIDE),
            (BATCH, 16, size.context_dim),
            (BATCH, FRAMES, 4, size.context_dim),
        )
    ]
    times = torch.randint(0, 1000, (BATCH, FRAMES), generator=generator)
    speed, robot = torch.full((BATCH,), 5.0), torch.zeros(BATCH, dtype=torch.int64)
    window, image, actions = (tensor.to(device) for tensor in noise)
    rest = [tensor.to(device) for tensor in (speed, robot)]
    return [window, times.to(device), image.requires_grad_(), actions.requires_grad_(), *rest]


def answer_and_gradients(
    run: Callable[..., Tensor], given: Sequence[Tensor], unet: EvacUNet
) -> tuple[Tensor, list[Tensor]]:
    answer = run(*given)
    sources = [*unet.parameters(), given[2], given[3]]
    loss = (answer.float() * torch.linspace(-1, 1, SIDE, device=answer.device)).square().mean()
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return answer.detach().float().clone(), [g.float().clone() for g in found if g is not None]


def apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Root mean square of the difference, in that of the others."""
    assert len(some) == len(others) > 0
    difference = sum(float((x - y).square().sum()) for x, y in zip(some, others, strict=True))
    return math.sqrt(difference / sum(float(y.square().sum()) for y in others))


def test_rounded_weights_give_nearly_the_same_gradients_to_the_exact_ones() -> None:
    unet, given = network(), inputs(1, CPU)
    exact, wanted = answer_and_gradients(unet, given, unet)
    answer, gradients = answer_and_gradients(Rounded(unet), given, unet)
    assert Rounded(unet)(*given).dtype == torch.bfloat16
    assert 0 < apart([answer], [exact]) < 0.03
    assert 0 < apart(gradients, wanted) < 0.05
    assert all(parameter.dtype == torch.float32 for parameter in unet.parameters())


def test_on_a_cpu_nothing_is_rounded() -> None:
    unet, given = network(), inputs(1, CPU)
    assert torch.equal(prepared_network(unet, CPU, compiled=False)(*given), unet(*given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_of_both_passes_follows_inputs_and_weights() -> None:
    device = torch.device("cuda")
    unet = network().to(device)
    run = prepared_network(unet, device, compiled=False)
    answer_and_gradients(run, inputs(0, device), unet)  # captures
    for seed in (1, 2):
        given = inputs(seed, device)
        wanted = answer_and_gradients(Rounded(unet), given, unet)
        answer, gradients = answer_and_gradients(run, given, unet)
        assert apart([answer], [wanted[0]]) < 1e-3
        assert apart(gradients, wanted[1]) < 1e-2
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.mul_(1.1)
