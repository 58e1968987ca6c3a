"""What the tests of EVAC's world share: published names, and small networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.records import StartState
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig

POSE = (-0.1, 0.02, 0.88, 0.1, 0.0, 0.0, 1.0, 0.5)
DATA = Path(__file__).parents[1] / "data"


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published network, from tests/data, in the order of its file."""
    rows = (row.split() for row in (DATA / f"{name}.txt").read_text().splitlines())
    return {key: tuple(int(size) for size in shape.split("x")) for key, shape in rows}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def randomised(module: nn.Module, seed: int, spread: float = 0.3) -> nn.Module:
    """Give every parameter random values, so that none is zero or one by default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan = max(parameter[0].numel(), 1) if parameter.ndim > 1 else 1
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) / fan**0.5)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return module.eval()


def tiny_networks(config: EvacConfig, seed: int = 0) -> EvacNetworks:
    """Small networks with random weights, of which every input matters."""
    torch.manual_seed(seed)
    networks = EvacNetworks.build(config)
    for number, module in enumerate(networks.by_name().values()):
        randomised(module, seed + number, 0.6)
        module.requires_grad_(False)
    # Poses in front of the camera, that move a little.
    mean = torch.tensor([-0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 1.0, 0.0])
    networks.pose_model.abs_action_mean.copy_(mean)
    networks.pose_model.abs_action_std.copy_(torch.full((8,), 0.05))
    return networks


def start_state(
    seed: int, *, context: int = 0, size: int = 32, pose: Sequence[float] | None = POSE
) -> StartState:
    rng = np.random.default_rng(seed)
    return StartState(
        name=f"start-{seed}",
        task="put the red cube in the bowl",
        frame=rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
        context_frames=rng.integers(0, 256, (context, size, size, 3), dtype=np.uint8),
        context_actions=rng.normal(size=(context, 7)).astype(np.float32),
        ee_pose=None if pose is None else np.array(pose, np.float32),
    )


def some_actions(batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 8, 7, generator=torch.Generator().manual_seed(seed))
