"""The doctor's estimate of the fitter's memory, against what fits of tiny models are seen to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.doctor import gpus
from asyncrl.doctor.findings import Examination, Sizes, Verdict
from asyncrl.doctor.fitter import AVERAGE, OPTIMIZER, most_episodes, reward_refit, round_phases, world_refit
from asyncrl.fitting import fit_reward as reward_fit
from asyncrl.fitting import loop
from asyncrl.fitting.kept_bytes import FLOAT32, kept_bytes
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds import evac, opensora, wan
from asyncrl.fitting.worlds.interface import CountsFit, WorldOptions, load_fitted
from asyncrl.launch import refits
from asyncrl.records import ActionSpec
from asyncrl.rewards.model import load_reward
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.start_states import save_start_states
from support.published_worlds import write_published_world
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import WORLDS, start_state, write_models

CPU, META = torch.device("cpu"), torch.device("meta")
BATCH, PICTURES = 4, 17
GIB = 2**30
MODULES = {"wan": wan, "opensora": opensora, "evac": evac}


@pytest.fixture(scope="module", params=WORLDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    write_models(folder, kind)
    spec = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0, poses=True)
    write_recorded(folder / "recorded", spec, (PICTURES,) * 4)
    return folder


@pytest.fixture
def recordings(folder: Path) -> Recordings:
    return load_recordings([folder / "recorded"])


@dataclass
class Seen:
    """What a fit was seen to hold, in bytes."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    average: int = 0
    kept: int = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        """Look into the fits of a module, which go on as they are."""
        minimise, adamw = module.minimise, loop._adamw
        averages = loop.get_ema_multi_avg_fn

        def watched(name: str, network: nn.Module, loss_at: Callable[[int], Tensor], **more: Any) -> float:
            parameters = [p for p in network.parameters() if p.requires_grad]
            made = []

            def noted(*arguments: Any) -> Any:
                made.append(adamw(*arguments))
                return made[-1]

            def averaged(decay: float) -> Any:
                def update(mean: list[Tensor], present: list[Tensor], step: Any) -> None:
                    self.average = sum(tensor.nbytes for tensor in mean)
                    averages(decay)(mean, present, step)

                return update

            monkeypatch.setattr(loop, "_adamw", noted)
            monkeypatch.setattr(loop, "get_ema_multi_avg_fn", averaged)
            loss = minimise(name, network, loss_at, **more)
            self.weights = sum(p.nbytes for p in parameters)
            self.gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
            states = (tensor for state in made[-1].state.values() for tensor in state.values())
            self.moments = sum(tensor.nbytes for tensor in states if tensor.ndim)
            self.kept = kept_bytes(lambda: loss_at(0), [network])
            return loss

        monkeypatch.setattr(module, "minimise", watched)


def test_a_fit_of_a_world_holds_what_is_estimated(
    kind: str, folder: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    seen.watch(monkeypatch, MODULES[kind])
    fit = load_fitted(folder / "world", CPU, torch.float32)
    steps = Schedule(steps=2, batch=BATCH, learning_rate=1e-4, seed=0, warmup=1)
    fit.fit_network(recordings, steps, WorldOptions())
    estimated = load_fitted(folder / "world", META, torch.float32)
    assert isinstance(estimated, CountsFit)
    trained = sum(
        p.numel()
        for name, part in estimated.trained().items()
        if name != "pose_model"
        for p in part.parameters()
    )
    assert (seen.weights, seen.average) == pytest.approx((trained * FLOAT32, trained * AVERAGE), rel=0.01)
    held = seen.gradients + seen.moments  # What a step did not use has none.
    assert 0.95 * trained * OPTIMIZER < held <= trained * OPTIMIZER
    assert estimated.step_bytes(BATCH) == pytest.approx(seen.kept, rel=0.1)
    latents = fit.encode(recordings).all
    maps = 2 if kind == "evac" else 1
    assert len(recordings) * estimated.episode_bytes(PICTURES) == maps * latents.nbytes


def test_what_is_kept_grows_with_the_batch(folder: Path) -> None:
    fit: Any = load_fitted(folder / "world", META, torch.float32)
    one, two, three = (fit.step_bytes(windows) for windows in (1, 2, 3))
    assert two / one == pytest.approx(2, rel=0.02)
    assert three / one == pytest.approx(3, rel=0.02)


def test_a_fit_of_a_reward_model_holds_what_is_estimated(
    folder: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    seen.watch(monkeypatch, reward_fit)
    judge = load_reward(folder / "world", device=CPU)
    judge.network.requires_grad_(True)
    reward_fit.fit_reward(
        judge, recordings, recordings.frames, steps=2, batch=BATCH, learning_rate=1e-4, seed=0, warmup=1
    )
    config = config_of(folder)
    weights = FLOAT32 * sum(p.numel() for p in (*judge.network.parameters(), *judge.network.buffers()))
    fit = load_fitted(folder / "world", META)
    redrawing = FLOAT32 * sum(p.numel() for part in fit.world.modules().values() for p in part.parameters())
    estimated = reward_refit(config, refits.first_world(config))
    assert estimated >= weights + redrawing
    larger = replace(config, pace=replace(config.pace, batch=1024))  # Where that is the larger part.
    fitted = seen.gradients + seen.moments + seen.kept * 1024 // BATCH
    assert reward_refit(larger, refits.first_world(config)) == pytest.approx(weights + fitted, rel=0.1)


def config_of(folder: Path, **pace: Any) -> TrainConfig:
    given: dict[str, Any] = {"every": 2, "episodes": 8, "batch": BATCH} | pace
    config = TrainConfig(
        policy=str(folder / "policy"),
        world=str(folder / "world"),
        start_states=str(folder / "starts.h5"),
        device="cpu",
        pace=PaceSettings(**given),
    )
    return replace(config, actor=replace(config.actor, max_decisions=2))


# ---- the sum -------------------------------------------------------------------------------------

SIZES = Sizes(
    policy=3 * GIB,
    parameters=GIB,
    trained=0,
    float32_masters=0,
    unsharded=0,
    version=0,
    environment=2 * GIB,
    frame=1,
    action_spec=ActionSpec(),
    rounds={"playing": 5 * GIB, "refitting the world": 7 * GIB},
)


def test_phases_are_those_that_a_round_has(folder: Path) -> None:
    config = config_of(folder)
    phases = round_phases(config, SIZES)
    assert list(phases) == ["playing", "judging", "refitting the world", "refitting the reward model"]
    assert (phases["playing"], phases["judging"]) == (3 * GIB, (3 + 2) * GIB)
    at = refits.first_world(config)
    assert phases["refitting the world"] == 3 * GIB + world_refit(config, at)
    assert phases["refitting the reward model"] == 3 * GIB + reward_refit(config, at)
    mining = round_phases(replace(config, keyframe_share=0.5), replace(SIZES, acting=GIB))
    assert mining["choosing key frames"] == mining["judging"] + 32 * GIB == (3 + 2 + 32) * GIB
    assert list(round_phases(config_of(folder, reward_steps=0), SIZES)) == list(phases)[:3]
    assert list(round_phases(config_of(folder, world_steps=0), SIZES)) == [*list(phases)[:2], list(phases)[3]]
    later = replace(config, updates=1000)
    assert world_refit(later, at) - world_refit(config, at) == 8 * (499 - 4) * latents_of(folder)


def latents_of(folder: Path) -> int:
    fit: Any = load_fitted(folder / "world", META, torch.float32)
    return fit.episode_bytes(PICTURES)


@pytest.mark.parametrize(
    ("updates", "pace", "episodes"),
    [
        (10, {}, 4 * 8 - 2),
        (10, {"budget": 17}, 2 * 8 - 2),
        (2, {}, 0),
        (10, {"base": ("x",), "fresh": 0.25}, 4 * (4 * 8 - 2)),
    ],
)
def test_the_last_round_fits_all_true_episodes_of_the_run(
    updates: int, pace: dict[str, Any], episodes: int
) -> None:
    settings = PaceSettings(**({"every": 2, "episodes": 8, "held_out": 0.25} | pace))
    assert most_episodes(TrainConfig(updates=updates, pace=settings)) == episodes


@pytest.mark.parametrize(
    ("placement", "device", "place"),
    [
        ("auto", "auto", "cuda:0"),
        ("learner=0,actor=0,fitter=1", "auto", "cuda:1"),
        ("auto", "cpu", gpus.HOST),
    ],
)
def test_the_fitter_is_counted_where_it_is(monkeypatch, placement: str, device: Any, place: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = TrainConfig(placement=placement, pace=PaceSettings(every=2, device=device))
    needs = gpus.fitter_needs(config, SIZES, gpus.placement_of(config), range(2))
    assert needs is not None
    assert (needs.place, needs.phase, needs.nbytes) == (place, "refitting the world", 7 * GIB)


@pytest.mark.parametrize(
    ("device", "inline", "phase", "gib"),
    [
        ("cpu", False, "refitting world and reward model", 7 + 5 - 3),
        ("cpu", True, "refitting the world", 7),
        ("auto", False, "refitting the world", 7),
    ],
)
def test_what_a_round_does_at_once_is_added_up_on_a_cpu(
    monkeypatch, device: Any, inline: bool, phase: str, gib: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    rounds = {
        "judging": 5 * GIB,
        "refitting the world": 7 * GIB,
        "refitting the reward model": 5 * GIB,
    }
    config = TrainConfig(inline=inline, pace=PaceSettings(every=2, device=device))
    sizes = replace(SIZES, rounds=rounds)
    needs = gpus.fitter_needs(config, sizes, gpus.placement_of(config), range(2))
    assert needs is not None
    assert (needs.phase, needs.nbytes) == (phase, gib * GIB)


def test_a_fitter_that_does_not_fit_is_a_finding_with_a_remedy(monkeypatch) -> None:
    config = TrainConfig(device="cpu", pace=PaceSettings(every=2))
    without = replace(SIZES, rounds={})
    monkeypatch.setattr(gpus, "free_on", lambda name: 10 * GIB)
    fits = gpus.check_device_memory(Examination(config=config, sizes=without))
    assert fits is not None
    assert (fits.verdict, "fitter" in fits.seen) == (Verdict.OK, False)
    tight = gpus.check_device_memory(Examination(config=config, sizes=SIZES))
    assert tight is not None
    assert tight.verdict is Verdict.WARNING
    assert "of memory of the host the fitter 7.00, refitting the world" in tight.seen
    assert "for the fitter a smaller --pace.batch, --pace.device cpu, or a rank of its own" in tight.advice
    monkeypatch.setattr(gpus, "free_on", lambda name: 20 * GIB)
    roomy = gpus.check_device_memory(Examination(config=config, sizes=SIZES))
    assert roomy is not None
    assert roomy.verdict is Verdict.OK


def test_a_published_wan_without_room_for_its_refit_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Actors hold it in bfloat16; a refit takes it in float32, with gradient, moments and average."""
    world = write_published_world(tmp_path / "published", "wan")
    save_start_states(tmp_path / "starts.h5", [start_state(0, 256)])
    pace = PaceSettings(every=2, batch=4)
    config = TrainConfig(
        world=str(world), start_states=str(tmp_path / "starts.h5"), device="cpu", pace=pace, updates=3
    )
    first = refits.first_world(config)
    held: Any = refits.load_world(config, first, CPU)[0]
    numbers = sum(tensor.numel() for tensor in held.transformer.state_dict().values())
    phases = round_phases(config, replace(SIZES, policy=0, environment=0))
    assert phases["refitting the world"] > numbers * (FLOAT32 + OPTIMIZER + AVERAGE)
    examination = Examination(config=config, sizes=replace(SIZES, policy=0, rounds=phases))
    monkeypatch.setattr(gpus, "free_on", lambda name: max(phases.values()) - 1)
    found = gpus.check_device_memory(examination)
    assert found is not None
    assert found.verdict is Verdict.BROKEN
    for said in ("--pace.every is 2", str(world), "memory of the host while refitting"):
        assert said in found.seen
    assert "--pace.device cpu" in found.advice
    monkeypatch.setattr(gpus, "free_on", lambda name: 1000 * GIB)
    roomy = gpus.check_device_memory(examination)
    assert roomy is not None
    assert roomy.verdict is Verdict.OK
