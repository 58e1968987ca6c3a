"""True and imagined episodes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.commands.evaluate import main
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.evaluation.contact_sheet import (
    check_imagines,
    check_suffix,
    imagine_again,
    write_contact_sheet,
)
from asyncrl.records import ActionSpec, StartState
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld
from support.simulated import simulated_episode


def episode(seed: int, decisions: int, *, solved: bool = False, size: int = 2) -> SimulatedEpisode:
    """Frame i is all 10 seed + i; action i is all i."""
    count = 1 + 8 * decisions
    numbers = np.arange(count)
    success = np.zeros(count, bool)
    success[-1] = solved
    return simulated_episode(
        seed,
        task="put the red cube on the white plate",
        frames=np.broadcast_to((10 * seed + numbers)[:, None, None, None], (count, size, size, 3)).astype(
            np.uint8
        ),
        actions=np.broadcast_to(numbers[:, None], (count, 7)).astype(np.float32),
        success=success,
    )


@dataclass
class Sum:
    """State of the world below: one number per slot."""

    total: np.ndarray

    def __len__(self) -> int:
        return len(self.total)


class AddingWorld:
    """Frame after an action: the start frame plus all actions so far."""

    version, image_size, action_spec = 0, 2, ActionSpec()

    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> Any:
        assert all(len(state.context_frames) == 0 for state in states)
        return Sum(np.array([int(state.frame[0, 0, 0]) for state in states]))

    def imagine(self, state: Any, actions: Any, noise_seeds: Sequence[int]) -> tuple[torch.Tensor, Any]:
        assert len(noise_seeds) == len(state)
        values = state.total[:, None] + np.cumsum(actions[:, :, 0], axis=1)
        frames = torch.from_numpy(values.astype(np.uint8))[:, :, None, None, None].expand(-1, -1, 2, 2, 3)
        return frames, Sum(values[:, -1])


def test_only_the_first_frame_and_the_actions_are_used() -> None:
    long, short = episode(1, 2), episode(2, 1)
    drawn = imagine_again(AddingWorld(), [long, short, episode(3, 2)])
    triangular = [i * (i + 1) // 2 for i in range(17)]
    assert drawn[0][:, 0, 0, 0].tolist() == [10 + t for t in triangular]
    assert drawn[1][:, 1, 1, 2].tolist() == [20 + t for t in triangular[:9]]
    assert drawn[2][:, 0, 0, 0].tolist() == [30 + t for t in triangular]


def test_the_world_is_told_where_the_hand_is_where_that_is_known() -> None:
    class Told(AddingWorld):
        def start(self, states: Sequence[StartState], *, decisions: int = 0) -> Any:
            poses.extend(state.ee_pose for state in states)
            return super().start(states, decisions=decisions)

    poses: list[np.ndarray | None] = []
    known = replace(episode(1, 1), poses=np.arange(72, dtype=np.float32).reshape(9, 8))
    imagine_again(Told(), [known, episode(2, 1)])
    assert poses[0] is not None
    assert poses[0].tolist() == list(range(8))
    assert poses[1] is None


def test_a_world_that_needs_poses_cannot_redraw_a_simulator_without() -> None:
    class Needing(AddingWorld):
        needs_pose = True

    silent = SimulatorSpec(name="lab", tasks=(), trials=0, max_steps=8, image_size=2)
    world: Any = Needing()
    with pytest.raises(ConfigError, match="where the robot's hand is, but lab does not say it"):
        check_imagines(world, silent)
    check_imagines(world, replace(silent, poses=True))
    plain: Any = AddingWorld()
    check_imagines(plain, silent)


def test_an_episode_that_ends_within_a_chunk_is_imagined_to_its_end() -> None:
    whole = episode(1, 2)
    cut = replace(whole, frames=whole.frames[:12], actions=whole.actions[:12], success=whole.success[:12])
    (drawn,) = imagine_again(AddingWorld(), [cut])
    assert drawn[:, 0, 0, 0].tolist() == [10 + i * (i + 1) // 2 for i in range(12)]


def test_another_suffix_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.gif or \.mp4"):
        check_suffix(tmp_path / "sheet.png")


def test_a_world_that_is_not_there_is_named_before_an_episode_is_played(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--world nowhere"):
        main(["tabletop", "--video", str(tmp_path / "sheet.gif"), "--world", "nowhere"])


def test_a_sheet_has_a_frame_per_step_and_an_edge_per_outcome(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = TransformerConfig(heads=2, head_dim=24, layers=1, ffn_dim=40, channels=32, patch=2, freq_dim=32)
    vae = WanVae(replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4))
    world = WanWorld(ActionWanTransformer(size), vae, image_size=64, schedule_steps=1)
    episodes = [episode(0, 1, solved=True, size=64), episode(1, 1, size=64)]
    path = tmp_path / "videos" / "sheet.gif"
    write_contact_sheet(path, episodes, world)
    with Image.open(path) as sheet:
        last = np.asarray(sheet.convert("RGB")).astype(int)
        durations = 0
        for index in range(getattr(sheet, "n_frames", 0)):
            sheet.seek(index)
            durations += sheet.info["duration"]
            last = np.asarray(sheet.convert("RGB")).astype(int)
    assert durations == 9 * 100  # frames that do not change are joined
    width, below = 2 * 128 + 2 + 10, 24 + 5 + 18 + 128 + 8
    (r, g, _), (r2, g2, _) = last[below, 11], last[below, width + 11]
    assert g > r + 50, "solved: green"
    assert r2 > g2 + 50, "not solved: red"
