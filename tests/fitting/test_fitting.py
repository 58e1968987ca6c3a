"""Recordings to models: files, windows, the training loop, cloning, the demonstrator."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.commands.collect import record, training_starts
from asyncrl.errors import AssetError, ConfigError, RunError
from asyncrl.fitting.fit_models import examples, fit_policy
from asyncrl.fitting.loop import Schedule, learning_rate_at, minimise
from asyncrl.fitting.recording_files import Recordings, must_be_new, write_part
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.wan import stream_of, windows
from asyncrl.fitting.world import Latents
from asyncrl.policies.action_tokens import encode
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import Demonstrator, SimulatorSource, SimulatorSpec, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rendering import find_backend
from asyncrl.simulators.rollout import Observations, SimulatedEpisode
from support.recorded import recordings_of
from support.simulated import COUNTING, simulated_episode
from support.tiny_models import small_policy

SPEC = SimulatorSpec(name="table", tasks=("put a on b",), trials=0, max_steps=48, image_size=4)


def episode(seed: int, decisions: int, *, solved_at: int = -1, task: str = "put a on b") -> SimulatedEpisode:
    """Action i is all i + 100 seed; row 0 is the dummy."""
    count = 1 + 8 * decisions
    actions = np.broadcast_to(np.arange(count)[:, None] + 100.0 * seed, (count, 7)).astype(np.float32)
    actions[0] = dummy_action()
    success = np.zeros(count, bool)
    if solved_at >= 0:
        success[solved_at] = True
    return simulated_episode(
        seed,
        task=task,
        frames=np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8),
        actions=actions,
        success=success,
    )


def joined(*episodes: SimulatedEpisode) -> Recordings:
    arrays = {n: np.concatenate([getattr(e, n) for e in episodes]) for n in ("frames", "actions", "success")}
    arrays["seeds"] = np.array([e.seed for e in episodes], np.int64)
    return recordings_of([len(e.frames) for e in episodes], tasks=[e.task for e in episodes], **arrays)


def test_recordings_come_back_as_they_were(tmp_path: Path) -> None:
    parts = [[episode(1, 2, solved_at=12), episode(2, 1, task="a longer task")], [episode(3, 3)]]
    for number, part in enumerate(parts):
        file = tmp_path / f"part-{number:05d}.h5"
        assert write_part(file, part, SPEC.name, SPEC.cameras, {"policy": "x"}) == len(part)
    read, expected = load_recordings([tmp_path]), joined(*parts[0], *parts[1])
    for name in ("frames", "actions", "success", "offsets", "seeds"):
        found, wanted = getattr(read, name)[:], getattr(expected, name)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    assert read.tasks == ["put a on b", "a longer task", "put a on b"]
    assert read.offsets.tolist() == [0, 17, 26, 51]
    assert read.solved().tolist() == [True, False, False]
    assert (len(read), read.span(1)) == (3, slice(17, 26))
    with h5py.File(tmp_path / "part-00000.h5") as file:
        assert json.loads(str(file.attrs["about"])) == {"policy": "x"}
    assert not list(tmp_path.glob("*.tmp"))


def test_folders_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="asyncrl collect --out"):
        load_recordings([tmp_path])
    write_part(tmp_path / "part-00000.h5", [episode(1, 1)], SPEC.name, SPEC.cameras, {})
    with pytest.raises(ConfigError, match="already holds recordings"):
        must_be_new(tmp_path)
    with h5py.File(tmp_path / "part-00000.h5", "a") as file:
        file.attrs["format"] = "other"
    with pytest.raises(ConfigError, match="'other'"):
        load_recordings([tmp_path])


def test_a_stream_repeats_the_first_frame_four_more_times() -> None:
    frames = torch.arange(9)[:, None, None, None].expand(9, 2, 2, 3)
    assert stream_of(frames)[:, 0, 0, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_windows_are_cut_where_decisions_are_made() -> None:
    recordings = joined(episode(0, 2), episode(1, 1))
    encoded = [
        torch.arange(first, first + count).float()[:, None, None, None].expand(count, 16, 2, 2)
        for first, count in ((0, 6), (50, 4))
    ]
    cut = windows(recordings, Latents(torch.cat(encoded), np.array([0, 6, 10])))
    assert len(cut.rows) == 3
    latents, actions = cut.take(torch.tensor([0, 1, 2]))
    assert latents.shape == (3, 16, 4, 2, 2)
    assert latents[:, 5, :, 1, 0].tolist() == [[0, 1, 2, 3], [0, 3, 4, 5], [50, 51, 52, 53]]
    assert actions.shape == (3, 13, 7)
    assert (actions[:, 0] == torch.tensor(dummy_action())).all()
    assert (actions[0, 1:5] == torch.tensor(dummy_action())).all()
    assert actions[0, 5:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert actions[1, 1:, 3].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert actions[2, 5:, 6].tolist() == [101, 102, 103, 104, 105, 106, 107, 108]


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0), (40, 1.5), (55, 1.0), (70, 0.5), (100, 0.0)]
)
def test_the_learning_rate_rises_and_then_follows_a_cosine(step: int, rate: float) -> None:
    schedule = Schedule(steps=100, batch=1, learning_rate=2.0, warmup=10)
    assert learning_rate_at(step, schedule) == pytest.approx(rate, abs=1e-12)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def distance(self, step: int) -> Tensor:
        return (self.at - torch.tensor([3.0, -1.0])).square().sum()


def test_minimising_finds_the_bottom_of_a_bowl() -> None:
    point = Point()
    schedule = Schedule(steps=200, learning_rate=0.1, warmup=10, batch=1)
    assert minimise("bowl", point, point.distance, schedule) < 1e-3
    torch.testing.assert_close(point.at.detach(), torch.tensor([3.0, -1.0]), atol=0.01, rtol=0)
    assert point.frozen.tolist() == [1, 1]


def test_averaging_follows_the_slow_formula() -> None:
    plain, averaged = Point(), Point()
    path: list[Tensor] = []

    def remembering(step: int) -> Tensor:
        path.append(plain.at.detach().clone())
        return plain.distance(step)

    schedule = Schedule(steps=30, learning_rate=0.1, warmup=5, batch=1)
    minimise("plain", plain, remembering, schedule)
    minimise("averaged", averaged, averaged.distance, schedule, average=0.8)
    mean = torch.zeros(2)
    for step, at in enumerate([*path[1:], plain.at.detach()]):
        decay = min(0.8, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * at
    torch.testing.assert_close(averaged.at.detach(), mean, atol=1e-5, rtol=0)


def test_a_loss_that_is_not_finite_stops_the_fit() -> None:
    point, schedule = Point(), Schedule(steps=3, learning_rate=0.1, batch=1)
    with pytest.raises(RunError, match="`bowl` is nan"):
        minimise("bowl", point, lambda step: point.distance(step) * float("nan"), schedule)


# ---- cloning -------------------------------------------------------------------------------------


def test_an_example_is_a_frame_with_a_whole_chunk_of_actions_after_it() -> None:
    recordings = joined(episode(0, 1), episode(1, 2))
    assert examples(recordings).tolist() == [0, 9, 10, 11, 12, 13, 14, 15, 16, 17]


def test_recordings_too_short_to_imitate_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to imitate"):
        examples(joined(episode(0, 0)))


def random_demonstration() -> Recordings:
    """16 frames of noise, each with an action of its own."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)
    actions = rng.uniform(-1, 1, (16, 7)).astype(np.float32)
    return recordings_of([16], frames=frames, actions=actions, tasks=["put the red cube on the white plate"])


def test_every_second_step_of_cloning_sees_the_redrawn_frames() -> None:
    recordings = random_demonstration()

    def weights_after(steps: int, drawn: np.ndarray | None) -> Tensor:
        policy = small_policy()
        schedule = Schedule(steps=steps, batch=4, learning_rate=1e-2)
        fit_policy(policy, recordings, schedule, drawn=drawn)
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    black = np.zeros_like(recordings.frames)
    assert torch.equal(weights_after(1, None), weights_after(1, black)), "the first step sees true frames"
    assert not torch.equal(weights_after(2, None), weights_after(2, black))
    assert torch.equal(weights_after(2, None), weights_after(2, recordings.frames))


def test_cloning_makes_the_demonstrated_actions_likely() -> None:
    recordings, policy = random_demonstration(), small_policy()

    def surprise() -> float:
        """Nats per token of the eight whole chunks there are."""
        chunks = np.stack([recordings.actions[row + 1 : row + 9] for row in range(8)])
        inputs = policy.preprocess(recordings.frames[:8], recordings.tasks * 8)
        with torch.no_grad():
            sample = {"tokens": torch.from_numpy(encode(chunks))}
            seen = policy.evaluate(inputs, sample, SamplingParams(temperature=1.0))
        return -float(seen.logprob.mean())

    assert surprise() > 5.0, "a policy that knows nothing has about log(256) = 5.5 nats per token"
    fit_policy(policy, recordings, Schedule(steps=60, batch=8, learning_rate=1e-2), jitter=0.0)
    assert surprise() < 4.0
    assert not policy.training


# ---- the demonstrator ----------------------------------------------------------------------------


def demonstrations(folder: Path, expert: Demonstrator, horizon: int, seeds: range) -> Recordings:
    source = SimulatorSource(name="tabletop", places=2, horizon=horizon)
    with SimulatorPool(source, workers=0) as pool:
        starts = [random_start(pool.spec, seed) for seed in seeds]
        record(folder, pool, expert, starts, extra_decisions=1, about={})
    return load_recordings([folder])


@pytest.mark.render
@pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")
def test_a_demonstration_follows_from_its_seed_and_ends_with_a_decision(tmp_path: Path) -> None:
    careful = Demonstrator()
    clumsy = Demonstrator(noise=(0.2, 0.4), offset=(0.01, 0.0), spread=0.01)
    first = demonstrations(tmp_path / "first", careful, 48, range(3, 6))
    other = demonstrations(tmp_path / "other", clumsy, 16, range(3, 4))
    again = demonstrations(tmp_path / "again", careful, 48, range(3, 4))
    alone = first.span(0)
    np.testing.assert_array_equal(first.frames[alone], again.frames[:])
    np.testing.assert_array_equal(first.actions[alone], again.actions)
    assert first.seeds.tolist() == [3, 4, 5]
    assert (len(again.frames) - 1) % 8 == (len(other.frames) - 1) % 8 == 0
    assert len(other.frames) <= 17
    assert (first.actions[1:9] != other.actions[1:9]).any()
    np.testing.assert_array_equal(first.actions[0], dummy_action())
    assert again.success.any()
    solving = (int(again.success.argmax()) - 1) // 8
    assert len(again.frames) == 1 + 8 * min(6, solving + 2)


def test_files_hold_the_episodes_in_the_order_of_their_starts(tmp_path: Path) -> None:
    def idle(shown: Observations) -> np.ndarray:
        return np.zeros((len(shown.tasks), 8, 7), np.float32)

    with SimulatorPool(SimulatorSource(name=COUNTING, places=3), workers=0) as pool:
        starts = training_starts(pool.spec, 40, 100)
        assert record(tmp_path, pool, idle, starts, extra_decisions=0, about={}) == 40
    read = load_recordings([tmp_path])
    assert read.seeds.tolist() == list(range(100, 140))
    with h5py.File(tmp_path / "part-00000.h5") as file:
        assert len(file["seeds"]) == 32
        assert file.attrs["simulator"] == "counting"
        assert file["states"].shape == (len(file["frames"]), 2)
        assert file["more_frames"].shape == (len(file["frames"]), 1, 2, 2, 3)
        assert file["starts"][1] == b"counting/seed-101"
        assert file["rewards"][:].sum() == file["success"][:].sum() == 24  # Of seeds 101 to 124.
        # Seed 100 is never solved: 24 steps. Seed 101 is in its first one, and its decision is carried out.
        assert file["offsets"][:3].tolist() == [0, 25, 34]
        assert file["truncated"][:2].tolist() == [1, 0]


def test_training_starts_keep_away_from_those_of_evaluation() -> None:
    with SimulatorPool(SimulatorSource(name=COUNTING, settings=("trials=3",)), workers=0) as pool:
        spec = pool.spec
    starts = training_starts(spec, 5, 0)
    assert [start.name for start in starts] == [
        *("counting/0/seed-0", "counting/0/seed-2", "counting/0/seed-4"),
        *("counting/1/seed-1", "counting/1/seed-3"),
    ]
    chosen = training_starts(spec, 2, 7, ("put c on d", "1"))
    assert [start.name for start in chosen] == ["counting/1/seed-15", "counting/1/seed-17"]
    with pytest.raises(ConfigError, match="held-out seeds"):
        training_starts(spec, 2, 500_000)
    with pytest.raises(ConfigError, match="the nearest is 0, 'put a on b'"):
        training_starts(spec, 2, 0, ("put a on a b",))
