"""Read and write folders of EVAC worlds: our own layout (``world.json``), and the published one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_reader import TensorFiles, check_fit, fill
from asyncrl.storage.tensor_writer import write_tensors
from asyncrl.worlds.evac import published
from asyncrl.worlds.evac.conditions import NETWORKS, EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.evac.published import PublishedFiles, fill_published, find_published
from asyncrl.worlds.evac.recognition import MARK
from asyncrl.worlds.files import AS_SAVED, WeightTypes

FORMAT: Final = "asyncrl-world-1"
KIND: Final = "evac"


@dataclass(frozen=True, kw_only=True)
class EvacFiles:
    """A world on disk: everything about it but the numbers."""

    config: EvacConfig
    version: int
    own: dict[str, TensorFiles]
    """Of a folder of ours: the file of each network, by our names; else empty."""
    published: PublishedFiles | None
    """Of a published folder; else None."""

    def types(self, settings: ImaginationSettings = AS_SAVED) -> WeightTypes:
        """Say what the weights become, but for those of the model of poses."""
        rounded = self.published is not None or settings.precision == "bf16"
        return WeightTypes(dtype=torch.bfloat16 if rounded else torch.float32)

    def defaults(self) -> WorldDefaults:
        """Say how episodes are imagined where nothing was set."""
        if not self.published:
            return WorldDefaults(source="the world's folder", steps=self.config.schedule_steps)
        return WorldDefaults(
            source="published defaults",
            steps=self.config.schedule_steps,
            max_decisions=published.MAX_DECISIONS,
            temperature=published.TEMPERATURE,
        )

    def build(self) -> EvacNetworks:
        """Build the networks without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            return EvacNetworks.build(self.config)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """Check that all tensors are there and fit; return the bytes that the loaded world takes.

        Raises:
            CheckpointError: A tensor is missing, unknown or has the wrong shape.
        """
        networks = self.build()
        modules, dtypes = networks.by_name(), self._dtypes(self.types(settings).dtype)
        if self.published:
            self.published.check(networks)
        for name, files in self.own.items():
            check_fit(modules[name], files, unused=False)
        return sum(p.numel() * dtypes[n].itemsize for n, m in modules.items() for p in m.parameters())

    def load(self, device: torch.device | str, dtype: torch.dtype | None) -> EvacNetworks:
        """Load the networks for inference, one tensor at a time, straight to `device`.

        Args:
            device: Where the weights go.
            dtype: What they become, see `types`; None: as the folder says.

        Raises:
            CheckpointError: See `check`.
        """
        self.check()
        networks, dtypes = self.build(), self._dtypes(dtype or self.types().dtype)
        modules = networks.by_name()
        if self.published:
            fill_published(networks, self.published, self.config, dtypes=dtypes, device=device)
        for name, files in self.own.items():
            fill(modules[name], files, dtype=dtypes[name], device=device)
        networks.image_encoder.set_constants(device)
        for module in modules.values():
            module.eval().requires_grad_(False)
        return networks

    def _dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Say what each network's weights become: poses add up over an episode, so theirs stay float32."""
        return {name: torch.float32 if name == "pose_model" else dtype for name in NETWORKS}


def open_evac(folder: Path) -> EvacFiles:
    """Read what a folder says about its world, without its numbers.

    Args:
        folder: One of ours (``world.json``), or one with the published files.

    Raises:
        CheckpointError: A file is missing, cannot be read, or is of a kind that is not known.
    """
    if (folder / "world.json").is_file():
        return _open_own(folder)
    found = find_published(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} holds no EVAC world: neither a world.json of kind {KIND!r} nor a checkpoint (*.ckpt, "
            f"*.pt) with tensor {MARK}."
        )
    return EvacFiles(config=found.config(), version=0, own={}, published=found)


def _open_own(folder: Path) -> EvacFiles:
    content = read_json(folder / "world.json")
    if content.get("format") != FORMAT or content.get("kind") != KIND:
        raise CheckpointError(
            f"{folder / 'world.json'} describes {content.get('kind')!r} in format {content.get('format')!r}; "
            f"this reads {KIND!r} in format {FORMAT!r}."
        )
    try:
        config, version = EvacConfig.from_json(content["config"]), int(content["version"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / 'world.json'} is incomplete or impossible ({error}). Save the world again."
        ) from error
    own = {name: TensorFiles(folder / f"{name}.safetensors") for name in NETWORKS}
    return EvacFiles(config=config, version=version, own=own, published=None)


def write_evac(folder: Path, networks: EvacNetworks, config: EvacConfig, version: int) -> None:
    """Write one safetensors file per network, and ``world.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in networks.by_name().items():
        write_tensors(folder / f"{name}.safetensors", nn.Module.state_dict(module))
    content = {"format": FORMAT, "kind": KIND, "version": version, "config": config.to_json()}
    write_json(folder / "world.json", content)
