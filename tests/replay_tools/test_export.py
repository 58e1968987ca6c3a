"""`asyncrl replay export`: what was written is read back with h5py and pyarrow."""

import dataclasses
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from asyncrl.commands.replay import main as run_inspection
from asyncrl.records import EndReason, Episode
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay_tools.lerobot_writer import level_counts, picture_statistics
from asyncrl.replay_tools.pictures import movie_of
from asyncrl.replay_tools.samples import Rate, samples_of
from support.episodes import make_episode, simulated
from support.recorded_run import IDS, IMAGE, episode_of, open_store

CAMERA = "observation.images.agentview"


def export(run: Path, out: Path, *flags: str) -> int:
    kind = "robomimic" if out.suffix else "lerobot"
    return run_inspection(["export", str(run), "--format", kind, "--out", str(out), *flags])


def test_robomimic_at_the_rate_of_steps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(run_dir)  # As on a live run.
    assert export(run_dir, run_dir / "x.h5") == 0
    store.close()
    printed = capsys.readouterr().out
    assert "2 episodes, 28 samples, one per step\nleft out: 6 episodes, whose video was not kept. " in printed
    assert "--replay.keep-video-every 1 in training keeps that of every group; --rate decision" in printed
    with h5py.File(run_dir / "x.h5") as file:
        assert file["data"].attrs["total"] == 28
        assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["sample"] == "step"
        assert sorted(file["data"]) == ["demo_0", "demo_1"]
        assert [name.decode() for name in file["mask/success"][...]] == ["demo_0"]
        assert [name.decode() for name in file["mask/failure"][...]] == ["demo_1"]
        demo = file["data/demo_0"]
        assert (demo.attrs["num_samples"], demo.attrs["episode_id"]) == (12, IDS[0][0])
        assert set(demo) == {"obs", "actions", "rewards", "dones"}
        images = demo["obs/agentview_image"]
        assert (images.dtype, images.shape) == (np.uint8, (12, IMAGE, IMAGE, 3))
        assert np.array_equal(images[1:], episode_of(0, 0).video[:11])
        assert (demo["actions"].dtype, demo["actions"].shape) == (np.float32, (12, 7))
        assert demo["rewards"][...].tolist() == [0.0] * 11 + [1.0]
        assert demo["dones"][...].tolist() == [0] * 11 + [1]


def test_robomimic_at_the_rate_of_decisions_has_every_episode(run_dir: Path) -> None:
    assert export(run_dir, run_dir / "x.hdf5", "--rate", "decision", "--task", "drawer") == 0
    with h5py.File(run_dir / "x.hdf5") as file:
        assert file["data"].attrs["total"] == 8
        assert len(file["data"]) == 4
        demo, episode = file["data/demo_1"], episode_of(2, 1)
        assert np.array_equal(demo["obs/agentview_image"], episode.frames)
        assert np.array_equal(demo["actions"], episode.actions[:, 0])
        assert np.array_equal(demo["actions_chunk"], episode.actions.reshape(2, 56))
        assert demo["rewards"][...].tolist() == [0.0, 1.0]
        assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["sample"] == "decision"


def test_episodes_without_video_are_not_invented(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run_dir, run_dir / "x.h5", "--task", "drawer") == 2
    said = capsys.readouterr().err
    assert "--replay.keep-video-every 1" in said
    assert "--rate decision" in said
    assert not (run_dir / "x.h5").exists()


def test_an_interrupted_export_is_noticed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "x.h5.tmp").write_bytes(b"half")
    with pytest.raises(SystemExit):
        export(run_dir, run_dir / "x.h5")
    assert "was interrupted" in " ".join(capsys.readouterr().err.split())


def test_lerobot_without_pyarrow_says_what_to_install(run_dir: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay_tools.lerobot_writer.find_spec", lambda name: None)
    assert export(run_dir, run_dir / "lerobot") == 2
    assert "pip install 'asyncrl[lerobot]'" in capsys.readouterr().err
    assert not (run_dir / "lerobot").exists()


def test_lerobot_folder_is_read_back(run_dir: Path) -> None:
    pytest.importorskip("pyarrow")
    av = pytest.importorskip("av")
    import pyarrow.parquet as pq

    out = run_dir / "lerobot"
    assert export(run_dir, out) == 0
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["splits"]) == ("v3.0", 20, {"train": "0:2"})
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 28, 1)
    assert info["features"][CAMERA]["shape"] == [IMAGE, IMAGE, 3]
    place = {"chunk_index": 0, "file_index": 0}
    rows = pq.read_table(out / info["data_path"].format(**place)).to_pylist()
    assert set(rows[0]) == info["features"].keys() - {CAMERA}
    assert [row["index"] for row in rows] == list(range(28))
    assert [row["episode_index"] for row in rows] == [0] * 12 + [1] * 16
    assert [row["frame_index"] for row in rows] == [*range(12), *range(16)]
    np.testing.assert_allclose([row["timestamp"] for row in rows[:12]], np.arange(12) / 20, atol=1e-6)
    actions = np.array([row["action"] for row in rows], np.float32)
    assert np.array_equal(actions[:12], episode_of(0, 0).actions.reshape(-1, 7)[:12])
    assert np.array_equal(actions[12:], episode_of(0, 1).actions.reshape(-1, 7))
    assert [n for n, row in enumerate(rows) if row["next.done"]] == [11, 27]
    assert [n for n, row in enumerate(rows) if row["next.success"]] == [11]
    episodes = pq.read_table(out / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(e["dataset_from_index"], e["dataset_to_index"], e["length"]) for e in episodes] == [
        (0, 12, 12),
        (12, 28, 16),
    ]
    assert episodes[0]["tasks"] == ["put the red cube into the bowl"]
    assert episodes[1][f"videos/{CAMERA}/from_timestamp"] == pytest.approx(0.6)
    assert episodes[1][f"videos/{CAMERA}/to_timestamp"] == pytest.approx(1.4)
    tasks = pq.read_table(out / "meta/tasks.parquet")
    assert tasks.to_pylist() == [{"task_index": 0, "task": "put the red cube into the bowl"}]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    with av.open(str(out / info["video_path"].format(video_key=CAMERA, **place))) as container:
        assert int(container.streams.video[0].average_rate) == 20
        short_path = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in short_path] == [(IMAGE, IMAGE, 3)] * 28
    grey = [frame.astype(float).mean(axis=2).ravel() for frame in [*short_path, episode_of(0, 1).frames[0]]]
    alike = np.corrcoef(grey)[-1, :-1]
    assert alike.argmax() == 12, "the second episode begins at frame 12"
    assert alike.max() > 0.8
    stats = json.loads((out / "meta/stats.json").read_text())
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(axis=0), rtol=1e-4)
    assert np.array(stats[CAMERA]["mean"]).shape == (3, 1, 1)
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(actions, 0.99, axis=0), rtol=1e-4)
    assert np.array(stats[CAMERA]["q50"]).shape == (3, 1, 1)
    np.testing.assert_allclose(
        episodes[1]["stats/action/q10"], np.quantile(actions[12:], 0.1, axis=0), rtol=1e-4
    )
    assert episodes[1]["stats/action/count"] == [16]


def test_statistics_of_pictures_are_those_of_all_pixels() -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(20 * n, 20 * n + 3 + n, (n + 1, 5, 7, 3)).astype(np.uint8) for n in range(4)]
    said, whole = (
        picture_statistics(sum(map(level_counts, parts)), 10),
        np.concatenate(parts).reshape(-1, 3) / 255,
    )
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(np.array(said[name])[:, 0, 0], getattr(whole, name)(axis=0), atol=1e-12)
    for name, share in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        found = np.array(said[name])[:, 0, 0]
        np.testing.assert_allclose(found, np.quantile(whole, share, axis=0, method="inverted_cdf"))
    assert said["count"] == [10]


@pytest.mark.parametrize("rate", ["step", "decision"])
@pytest.mark.parametrize("end", ["success", "terminated", "truncated"])
def test_dense_rewards_make_no_sample_a_success(rate: Rate, end: EndReason) -> None:
    played = simulated(make_episode(video=True), steps=12, end=end)
    assert (played.rewards > 0).sum() > 1, "rewards that are positive on the way"
    samples = samples_of(played, rate)
    assert samples is not None
    length = 12 if rate == "step" else 2
    assert samples.dones.tolist() == [False] * (length - 1) + [True]
    assert samples.successes.tolist() == [False] * (length - 1) + [end == "success"]
    assert samples.rewards.sum() == pytest.approx(played.total_reward, abs=1e-5)
    assert len(movie_of(played)) == 13


@pytest.fixture
def simulated_run(tmp_path: Path) -> Path:
    """Two groups of a simulator: two cameras, three numbers of state; the video of group 0 was kept."""
    store = EpisodeStore(tmp_path / "replay", group_size=2, max_bytes=10**9)
    for number in range(2):
        store.ledger.append(grant=number, actor="actor-0", turn=number, min_version=0)
        store.enter(store.write(number, played(number)))
    store.close()
    return tmp_path


def played(number: int) -> list[Episode]:
    made = (make_episode(number, member, video=number == 0, image=IMAGE) for member in range(2))
    return [simulated(episode, steps=12 + n, end="success") for n, episode in enumerate(made)]


def test_decisions_of_a_simulator_have_all_cameras_and_states(simulated_run: Path) -> None:
    assert export(simulated_run, simulated_run / "x.h5", "--rate", "decision") == 0
    with h5py.File(simulated_run / "x.h5") as file:
        for demo, episode in (("demo_0", played(0)[0]), ("demo_3", played(1)[1])):
            obs = file[f"data/{demo}/obs"]
            assert set(obs) == {"agentview_image", "camera_1_image", "robot_state"}
            assert episode.more_frames is not None
            assert np.array_equal(obs["camera_1_image"], episode.more_frames[:, 0])
            assert np.array_equal(obs["robot_state"], episode.states)


def test_steps_of_a_simulator_lack_further_cameras_and_states(simulated_run: Path, capsys) -> None:
    assert export(simulated_run, simulated_run / "x.h5") == 0
    printed = capsys.readouterr().out
    assert "2 episodes, 25 samples, one per step" in printed
    with h5py.File(simulated_run / "x.h5") as file:
        assert set(file["data/demo_0/obs"]) == {"agentview_image"}


def test_lerobot_at_the_rate_of_decisions_has_all_cameras_and_states(simulated_run: Path) -> None:
    pytest.importorskip("pyarrow")
    av = pytest.importorskip("av")
    import pyarrow.parquet as pq

    out = simulated_run / "lerobot"
    assert export(simulated_run, out, "--rate", "decision") == 0
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["fps"], info["total_episodes"], info["total_frames"]) == (2.5, 4, 8)
    keys = [CAMERA, "observation.images.camera_1"]
    assert [key for key, about in info["features"].items() if about["dtype"] == "video"] == keys
    assert info["features"]["observation.state"]["shape"] == [3]
    assert info["features"]["decision.actions"]["shape"] == [56]
    rows = pq.read_table(out / "data/chunk-000/file-000.parquet").to_pylist()
    episodes = [episode for number in range(2) for episode in played(number)]
    states = np.concatenate([episode.states for episode in episodes if episode.states is not None])
    assert np.array_equal(np.array([row["observation.state"] for row in rows], np.float32), states)
    chunks = np.concatenate([episode.actions.reshape(2, 56) for episode in episodes])
    assert np.array_equal(np.array([row["decision.actions"] for row in rows], np.float32), chunks)
    assert [row["timestamp"] for row in rows] == pytest.approx([0, 0.4] * 4)
    stats = json.loads((out / "meta/stats.json").read_text())
    np.testing.assert_allclose(stats["observation.state"]["q50"], np.median(states, axis=0), rtol=1e-5)
    assert stats.keys() == info["features"].keys()
    for key in keys:
        with av.open(str(out / f"videos/{key}/chunk-000/file-000.mp4")) as container:
            times = [frame.time for frame in container.decode(video=0)]
        assert times == pytest.approx(np.arange(8) / 2.5)


def test_a_policy_of_one_step_has_states_and_cameras_at_the_rate_of_steps() -> None:
    made = make_episode(versions=(0,) * 3)
    one = dataclasses.replace(
        made,
        rewards=made.rewards[:, :1],
        actions=made.actions[:, :1],
        video=np.zeros((3, 4, 4, 3), np.uint8),
        steps_taken=3,
        states=np.arange(6, dtype=np.float32).reshape(3, 2),
        more_frames=np.ones((3, 1, 4, 4, 3), np.uint8),
    )
    samples = samples_of(one, "step")
    assert samples is not None
    assert samples.states.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert samples.more_images.shape == (3, 1, 4, 4, 3)


def test_lerobot_episodes_of_different_layouts_are_refused_and_leave_nothing(tmp_path, capsys) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    store = EpisodeStore(tmp_path / "replay", group_size=2, max_bytes=10**9)
    for number, cameras in ((0, 2), (1, 3)):
        store.ledger.append(grant=number, actor="actor-0", turn=number, min_version=0)
        made = (make_episode(number, member, image=IMAGE) for member in range(2))
        store.enter(store.write(number, [simulated(episode, cameras=cameras) for episode in made]))
    store.close()
    assert export(tmp_path, tmp_path / "lerobot", "--rate", "decision") == 2
    assert "a data set has one layout" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replay"]
