"""Robomimic's files as --data, and our own exports read back."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from asyncrl.commands.collect import recordings as recordings_command
from asyncrl.commands.replay import main as replay_command
from asyncrl.errors import AssetError, ConfigError
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.fitting.sources import load_recordings
from asyncrl.records import Episode
from asyncrl.replay.store import EpisodeStore
from support.datasets import TOP, WRIST, Sampled, sampled, smooth_pictures
from support.episodes import make_episode, simulated


def write_robomimic_file(
    path: Path,
    episodes: Sequence[Sampled],
    *,
    task: str | None = "lift the cube",
    next_obs: bool = False,
    sparse: bool = True,
    channels_first: bool = False,
) -> Path:
    """Write a file as robomimic's image data sets are; its demonstrations are numbered 0, 10, 20, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20, "robots": ["Panda"]}}
        )
        for number, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{10 * number}")
            demo.attrs["num_samples"] = len(episode.actions)
            if task is not None:
                demo.attrs["ep_meta"] = json.dumps({"lang": task})
            demo["actions"] = episode.actions.astype(np.float64)
            demo["rewards"] = episode.success.astype(np.float64) if sparse else episode.rewards
            demo["dones"] = (np.arange(len(episode.actions)) == len(episode.actions) - 1).astype(np.int64)
            demo["states"] = np.zeros((len(episode.actions), 32))
            for name, key in (("agentview_image", TOP), ("robot0_eye_in_hand_image", WRIST)):
                if key in episode.pictures:
                    stored = episode.pictures[key]
                    demo[f"obs/{name}"] = stored.transpose(0, 3, 1, 2) if channels_first else stored
                    if next_obs:
                        demo[f"next_obs/{name}"] = np.concatenate([stored[1:], 255 - stored[-1:]])
            columns = {"robot0_eef_pos": (0, 3), "robot0_eef_quat": (3, 4), "robot0_gripper_qpos": (4, 5)}
            for name, (low, high) in columns.items():
                demo[f"obs/{name}"] = episode.states[:, low:high].astype(np.float64)
                if next_obs:
                    after = np.concatenate([episode.states[1:], -episode.states[-1:]])
                    demo[f"next_obs/{name}"] = after[:, low:high]
    return path


@pytest.fixture
def episodes() -> list[Sampled]:
    return [sampled(seed, 10 + seed, numbers=7, cameras=(TOP, WRIST)) for seed in range(3)]


def test_a_file_becomes_recordings_with_the_same_numbers(tmp_path, episodes: list[Sampled], caplog) -> None:
    read = load_recordings([write_robomimic_file(tmp_path / "lift.hdf5", episodes)])
    assert (read.simulator, read.tasks) == ("Lift", ["lift the cube"] * 3)
    assert read.seeds.tolist() == [0, 10, 20]
    assert read.offsets.tolist() == [0, 11, 23, 36]
    for number, episode in enumerate(episodes):
        span = read.span(number)
        np.testing.assert_array_equal(read.actions[span][1:], episode.actions)
        np.testing.assert_array_equal(read.frames[span][:-1], episode.pictures[TOP])
        np.testing.assert_array_equal(read.frames[span][-1], episode.pictures[TOP][-1])
    assert read.solved().tolist() == [False, True, False]
    assert "camera agentview_image of agentview_image, robot0_eye_in_hand_image" in caplog.text


def test_what_was_seen_after_the_last_action_is_taken_where_it_is_stored(tmp_path, episodes) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes, next_obs=True)
    out = tmp_path / "data"
    assert recordings_command(["import", str(path), "--out", str(out)]) == 0
    read = load_recordings([out])
    np.testing.assert_array_equal(read.frames[10], 255 - episodes[0].pictures[TOP][-1])
    assert np.flatnonzero(read.success).tolist() == [22], "no picture stands for another one"
    with h5py.File(out / "part-00000.h5") as file:
        np.testing.assert_array_equal(file["states"][11:22], episodes[1].states)
        np.testing.assert_array_equal(file["states"][22], -episodes[1].states[-1])
        np.testing.assert_array_equal(file["rewards"][12:23], episodes[1].success)
        assert json.loads(str(file.attrs["about"]))["steps_per_second"] == 20


def test_a_folder_of_files_and_pictures_with_channels_first(tmp_path: Path, episodes: list[Sampled]) -> None:
    write_robomimic_file(tmp_path / "in" / "a.hdf5", episodes[:1], channels_first=True)
    write_robomimic_file(tmp_path / "in" / "b.h5", episodes[1:])
    read = load_recordings([tmp_path / "in"], DataSetSettings(flip="vertical"))
    assert len(read) == 3
    np.testing.assert_array_equal(read.frames[:10], episodes[0].pictures[TOP][:, ::-1])


def test_a_stride_keeps_every_third_picture(tmp_path: Path) -> None:
    episode = sampled(0, 15, numbers=7)
    path = write_robomimic_file(tmp_path / "lift.hdf5", [episode])
    frames = load_recordings([path], DataSetSettings(stride=3)).frames
    np.testing.assert_array_equal(frames[:5], episode.pictures[TOP][::3])


def test_an_attribute_that_is_no_json_is_named(tmp_path, episodes: list[Sampled], caplog) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes[1:2])
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = '{"env_name": "Lift", "env_kwargs": {"control_freq": 20'
    assert load_recordings([path]).simulator == "robomimic"
    assert "/data: env_args is not read (" in caplog.text


def test_a_demonstration_that_alone_says_nothing_of_success_is_told(tmp_path, episodes, caplog) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    load_recordings([path])
    assert "counts as solved" not in caplog.text
    with h5py.File(path, "a") as file:
        del file["data/demo_10/rewards"]
        file["data/demo_10/rewards"] = np.linspace(0, 1, len(file["data/demo_10/actions"]))
    assert not load_recordings([path]).solved()[1]
    assert "no key marks when a task is solved: no such episode counts as solved" in caplog.text


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("data/demo_10", "num_samples", 7, "demo_10 has 11 actions, but num_samples 7"),
        *(
            ("data", "env_args", f'{{"env_kwargs": {{"control_freq": {rate}}}}}', "steps a second")
            for rate in ('"20"', "-20", "true", "1e6")
        ),
    ],
)
def test_attributes_that_cannot_be_are_refused(tmp_path, episodes, where, name, value, said) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    with h5py.File(path, "a") as file:
        file[where].attrs[name] = value
    with pytest.raises(ConfigError, match=said):
        load_recordings([path])


def test_dense_rewards_are_no_verdicts(tmp_path, episodes: list[Sampled], caplog) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes[1:2], sparse=False)
    assert not load_recordings([path]).success.any()
    assert "no such episode counts as solved" in caplog.text
    read = load_recordings([path], DataSetSettings(success="rewards"))
    assert read.success[1:-2].tolist() == (episodes[1].rewards[:-2] > 0.5).tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cameras": ("front",)}, r"has no front .*There are: agentview_image, robot0_eye_in_hand_image"),
        ({"state": ("joints",)}, r"There are: robot0_eef_pos, robot0_eef_quat, robot0_gripper_qpos"),
        ({"action": "act"}, r"has no act .*There are: actions, dones, rewards, states"),
        ({"action": "dones", "task": "x", "success": "wins"}, r"has no wins \(--dataset.success\)"),
    ],
)
def test_a_key_that_is_not_there_is_refused_with_those_that_are(tmp_path, episodes, settings, said) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    with pytest.raises(ConfigError, match=said):
        load_recordings([path], DataSetSettings(**settings))  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("obs/agentview_image", lambda stored: stored[:-1], r"uint8\[10, 48, 48, 3\], expected uint8\[11,"),
        (
            "next_obs/agentview_image",
            lambda stored: stored[:-1],
            r"uint8\[10, 48, 48, 3\], expected uint8\[11,",
        ),
        ("actions", lambda stored: stored * math.nan, "demo_10: actions are not all finite"),
        (
            "actions",
            lambda stored: np.zeros((11, 8)),
            "demo_10 has 8 numbers of an action, where the data set has 7",
        ),
    ],
)
def test_a_damaged_file_is_named_and_an_import_of_it_writes_nothing(
    tmp_path: Path, episodes: list[Sampled], name: str, change: Callable[[np.ndarray], object], said: str
) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes, next_obs=True)
    with h5py.File(path, "a") as file:
        demo = file["data/demo_10"]
        stored = demo[name][:]
        del demo[name]
        demo[name] = change(stored)
    with pytest.raises(ConfigError, match=said):
        load_recordings([path])
    with pytest.raises(ConfigError, match=said):
        recordings_command(["import", str(path), "--out", str(tmp_path / "data")])
    assert not list((tmp_path / "data").glob("*"))


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _rename_demo(path: Path, name: str) -> None:
    with h5py.File(path, "a") as file:
        file.move("data/demo_10", f"data/{name}")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("b.hdf5", _shorten, "cannot be read .*truncated"),
        ("B.HDF5", _shorten, "cannot be read .*truncated"),
        ("b.H5", lambda path: path.write_bytes(b""), "cannot be read"),
        ("b.hdf5", _pipe, "cannot be read .*named pipe"),
        ("b.h5", lambda path: h5py.File(path, "w").close(), "neither a recording"),
        *((("b.hdf5", lambda path, name=name: _rename_demo(path, name), f"data/{name} is not called demo_"))
          for name in ("demo_x", "demo_1_aug", "episode_3", "demo_²")),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_understood_is_named_at_every_door(
    tmp_path: Path, episodes: list[Sampled], name: str, damage: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "set"
    write_robomimic_file(folder / "a.hdf5", episodes)
    path = write_robomimic_file(folder / name, episodes)
    damage(path)
    doors = (
        lambda: load_recordings([folder]),
        lambda: load_recordings([path]),
        lambda: recordings_command(["import", str(folder), "--out", str(tmp_path / "data")]),
    )
    for door in doors:
        with pytest.raises(ConfigError, match=rf"{name}.*{said}"):
            door()
    for command in ("list", "stats"):
        with pytest.raises(ConfigError, match=r"set/[abB]\."):
            recordings_command([command, str(folder)])


def test_endings_in_capitals_are_read_and_files_below_are_named(tmp_path, episodes, caplog) -> None:
    write_robomimic_file(tmp_path / "in" / "a.hdf5", episodes)
    write_robomimic_file(tmp_path / "in" / "B.HDF5", episodes)
    path = write_robomimic_file(tmp_path / "in" / "c.H5", episodes)
    _rename_demo(path, "demo_007")
    write_robomimic_file(tmp_path / "in" / "more" / "d.H5", episodes)
    (tmp_path / "in" / "._a.hdf5").write_bytes(b"what macOS adds to a copy")
    found = load_recordings([tmp_path / "in"])
    assert found.seeds.tolist() == [0, 10, 20, 0, 10, 20, 0, 7, 20]
    assert "more/d.H5 lies in a folder below and is not read" in caplog.text
    with pytest.raises(AssetError, match=r"holds no .*or name .*/in\."):
        load_recordings([tmp_path])


def test_numbers_without_a_picture_after_the_last_action_leave_the_last_picture(tmp_path, episodes) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes, next_obs=True)
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            del demo["next_obs/agentview_image"]
    read = load_recordings([path])
    np.testing.assert_array_equal(read.frames[10], read.frames[9])
    assert read.offsets.tolist() == [0, 11, 23, 36]


def _lead_away(path: Path, *names: str) -> None:
    """Put links to a named pipe in the place of what is there."""
    os.mkfifo(path.parent / "pipe")
    with h5py.File(path, "a") as file:
        for name in names:
            if name in file:
                del file[name]
            file[name] = h5py.ExternalLink("pipe", "/data")


@pytest.mark.timeout(60)
def test_links_to_other_files_beside_what_is_read_are_not_followed(tmp_path, episodes: list[Sampled]) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    _lead_away(path, "data/demo_0/obs/zz", "data/demo_0/zz")
    assert len(load_recordings([path])) == 3
    for settings in (DataSetSettings(cameras=("zz",)), DataSetSettings(action="zz")):
        with pytest.raises(ConfigError, match="has no zz"):
            load_recordings([path], settings)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data/demo_0/obs", "there is no group data/demo_0/obs"),
        ("data/demo_0/actions", "has no actions"),
        ("data/demo_10/actions", "data/demo_10/actions is not a dataset of this file"),
        ("data/demo_10", "data/demo_10/actions is not a dataset of this file"),
        ("data/demo_10/next_obs", "there is no group next_obs"),
    ],
)
def test_links_to_other_files_in_the_place_of_what_is_read_are_refused(
    tmp_path: Path, episodes: list[Sampled], name: str, said: str
) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    _lead_away(path, name)
    with pytest.raises(ConfigError, match=said):
        load_recordings([path])


def test_without_the_extra_one_line_says_how_to_install_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "towel" / "meta").mkdir(parents=True)
    (tmp_path / "towel" / "meta" / "info.json").write_text("{}")
    monkeypatch.setattr("asyncrl.fitting.lerobot.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyarrow and av\. Install .*pip install 'asyncrl\[lerobot\]'"):
        load_recordings([tmp_path / "towel"])


def test_what_looks_into_recordings_says_how_to_make_some(tmp_path: Path, episodes: list[Sampled]) -> None:
    path = write_robomimic_file(tmp_path / "lift.hdf5", episodes)
    for command in ("list", "stats"):
        with pytest.raises(ConfigError, match=r"data set of another program.*asyncrl recordings import"):
            recordings_command([command, str(path)])


def run_with(run: Path, group: list[Episode]) -> Path:
    store = EpisodeStore(run / "replay", group_size=2, max_bytes=10**9)
    store.ledger.append(grant=0, actor="actor-0", turn=0, min_version=0)
    store.enter(store.write(0, group))
    store.close()
    return run


def smooth(member: int, **changes: object) -> Episode:
    """An episode whose pictures a codec keeps."""
    made = make_episode(0, member, video=True, success=member == 0, image=32)
    seen = smooth_pictures(member, 17, 32, 32)
    made = replace(made, frames=seen[[0, 8]], video=seen[1:], final_frame=seen[16])
    return replace(made, **changes) if changes else made  # pyright: ignore


def exported(kind: str, group: list[Episode], folder: Path) -> Path:
    """Write an export of a run with a group, and import it into ``folder / "data"``."""
    if kind == "lerobot":
        for package in ("pyarrow", "av"):
            pytest.importorskip(package, reason=f"needs {package} (extra 'lerobot')")
    run, out = run_with(folder, group), folder / ("out" if kind == "lerobot" else "out.hdf5")
    assert replay_command(["export", str(run), "--format", kind, "--out", str(out)]) == 0
    assert recordings_command(["import", str(out), "--out", str(folder / "data")]) == 0
    return out


@pytest.mark.parametrize("kind", ["robomimic", "lerobot"])
def test_an_export_comes_back_with_the_same_actions_rewards_and_pictures(kind: str, tmp_path: Path) -> None:
    group = [smooth(0), smooth(1)]
    out = exported(kind, group, tmp_path)
    read = load_recordings([out])
    assert read.tasks == ["put the red cube into the bowl"] * 2
    assert read.solved().tolist() == [True, False]
    with h5py.File(tmp_path / "data" / "part-00000.h5") as file:
        rewards = file["rewards"][:]
    for number, episode in enumerate(group):
        span, steps = read.span(number), episode.steps
        assert span.stop - span.start == steps + 1
        np.testing.assert_array_equal(read.actions[span][1:], episode.actions.reshape(-1, 7)[:steps])
        np.testing.assert_array_equal(rewards[span][1:], episode.rewards.reshape(-1)[:steps])
        seen = np.concatenate([episode.frames[:1], episode.video[: steps - 1]])
        difference = np.abs(read.frames[span][:-1].astype(float) - seen)
        assert difference.mean() <= (3.0 if kind == "lerobot" else 0.0)


@pytest.mark.parametrize("kind", ["robomimic", "lerobot"])
def test_states_come_back_where_a_decision_is_one_step(kind: str, tmp_path: Path) -> None:
    group = []
    for member in (0, 1):
        long = smooth(member)
        seen = np.concatenate([long.frames[:1], long.video])
        short = replace(
            long,
            frames=seen[:6],
            final_frame=seen[6],
            video=seen[1:7],
            sample={"tokens": np.zeros((6, 1, 7), np.int32)},
            logprobs=long.logprobs.reshape(-1, 1, 7)[:6],
            actions=long.actions.reshape(-1, 1, 7)[:6],
            rewards=np.zeros((6, 1), np.float32),
            success_scores=np.zeros((6, 1), np.float32),
            values=np.full(6, np.nan, np.float32),
            policy_versions=np.zeros(6, np.int64),
            noise_seeds=np.zeros(6, np.int64),
        )
        group.append(simulated(short, steps=6, state=3, cameras=1))
    exported(kind, group, tmp_path)
    with h5py.File(tmp_path / "data" / "part-00000.h5") as file:
        for number, episode in enumerate(group):
            states = file["states"][7 * number : 7 * number + 6]
            np.testing.assert_array_equal(states, episode.states)
            np.testing.assert_array_equal(
                file["rewards"][7 * number + 1 : 7 * number + 7], episode.rewards[:, 0]
            )


def test_an_export_at_the_rate_of_decisions_is_refused(tmp_path: Path) -> None:
    run, out = run_with(tmp_path, [smooth(0), smooth(1)]), tmp_path / "out.hdf5"
    flags = ["--format", "robomimic", "--rate", "decision", "--out", str(out)]
    assert replay_command(["export", str(run), *flags]) == 0
    with pytest.raises(ConfigError, match=r"one sample per decision.*--rate step"):
        load_recordings([out])
