"""A Wan world folder as RLinf publishes them, random weights of the true size; how fast and lean it loads.

    python benchmarks/published_world.py /tmp/wan                 write 12.1 GiB, then load and measure
    python benchmarks/published_world.py /tmp/wan --only load     measure a folder that is there
    python benchmarks/published_world.py /tmp/wan --scale tiny    a few MB, for tests

Speed and memory do not depend on the values, so jobs of the true size can be timed without the true weights:
`asyncrl train --world /tmp/wan`. Weights are normal with deviation 0.02, norms 1, biases 0: activations stay
finite. Loading is measured in a process of its own, whose peak memory is compared with the world's size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.launch.placement import pick_device
from asyncrl.rewards.files import PUBLISHED
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.rewards.model import load_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.storage.tensor_writer import write_pth, write_tensors
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.published_world import (
    HEAD_DIM,
    IMAGE_SIZE,
    transformer_to_published,
    vae_to_published,
)
from asyncrl.worlds.wan.recognition import WAN_TRANSFORMER, WAN_VAE
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import load_world

GIB = 2**30
DEVIATION = 0.02
_NOISE = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * DEVIATION


def sizes(scale: str) -> tuple[TransformerConfig, VaeConfig, RewardConfig]:
    """Sizes of the published models, or of small ones in the same layout."""
    if scale == "full":
        return TransformerConfig.full(), VaeConfig.full(), RewardConfig.full()
    transformer = replace(
        TransformerConfig.full(), heads=1, head_dim=HEAD_DIM, layers=2, ffn_dim=256, freq_dim=64
    )
    vae = replace(VaeConfig.full(), base_dim=4, decoder_base_dim=4, res_blocks=1)
    return transformer, vae, replace(RewardConfig.full(), widths=(4, 8, 16, 32))


def draw(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Random values that keep activations finite; a function of the name and the shape alone."""
    if dtype == torch.int64:
        return torch.zeros(shape, dtype=dtype)
    if name.endswith(("bias", "running_mean")):
        return torch.zeros(shape, dtype=dtype)
    if name.endswith(("gamma", "running_var")) or (len(shape) == 1 and name.endswith("weight")):
        return torch.ones(shape, dtype=dtype)
    # Repeating one stretch of noise takes a hundredth of the time of drawing so many numbers.
    noise = _NOISE.to(dtype).roll(zlib.crc32(name.encode()) % len(_NOISE))
    count = shape.numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape)


def write_folder(
    folder: Path, scale: str, suite: str, trajectories: int, keyframes: int, embeds: bool
) -> None:
    """Write transformer, autoencoder, reward model and ``dataset/``."""
    transformer_size, vae_size, reward_size = sizes(scale)
    if embeds:
        reward_size = replace(reward_size, tasks=SUITES[suite])
    with torch.device("meta"):
        transformer, vae = ActionWanTransformer(transformer_size), WanVae(vae_size)
        reward = build_network(reward_size)
    folder.mkdir(parents=True, exist_ok=True)
    names = {transformer_to_published(n): t.shape for n, t in transformer.state_dict().items()}
    write_tensors(folder / WAN_TRANSFORMER, {n: draw(n, s, torch.bfloat16) for n, s in names.items()})
    blocks = vae_size.res_blocks
    names = {vae_to_published(n, res_blocks=blocks): t.shape for n, t in vae.state_dict().items()}
    write_pth(folder / WAN_VAE, {n: draw(n, s, torch.float32) for n, s in names.items()})
    scores = {n: draw(n, t.shape, t.dtype) for n, t in reward.state_dict().items()}
    scores[list(scores)[-1]] -= 5.0  # No frame is a success, so that every imagined episode has full length.
    write_pth(folder / PUBLISHED[embeds], scores)
    write_dataset(folder / "dataset", SUITES[suite], trajectories, keyframes)


def write_dataset(folder: Path, tasks: tuple[str, ...], trajectories: int, keyframes: int) -> None:
    """Write ``traj*.npy`` with one frame and ``traj*_kir.npy`` with five, as numpy.save does."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(trajectories + keyframes):
        kir = number >= trajectories
        items = []
        for _ in range(5 if kir else 1):
            coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            items.append(
                {
                    "image": coarse.repeat(IMAGE_SIZE // 8, axis=0).repeat(IMAGE_SIZE // 8, axis=1),
                    "delta_action": random.normal(size=7) * 0.1,
                    "instruction": tasks[number % len(tasks)],
                    "init_ee_pose": random.normal(size=8),
                }
            )
        frames = np.empty(len(items), dtype=object)
        frames[:] = items
        np.save(folder / f"traj{number}{'_kir' if kir else ''}.npy", frames, allow_pickle=True)


def measure_loading(folder: Path, device: torch.device) -> None:
    """Load world, reward model and start states; print seconds and memory."""
    torch.zeros(1, device=device)  # a context of CUDA takes host memory of its own
    before, began = _peak_memory(), time.perf_counter()
    world = load_world(folder, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, after = time.perf_counter() - began, _peak_memory()
    tensors = [*world.transformer.parameters(), *world.vae.parameters()]
    held = sum(tensor.nbytes for tensor in tensors)
    on_disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    began = time.perf_counter()
    starts = load_start_states(folder / "dataset", image_size=world.image_size)
    load_reward(folder, tasks={state.task for state in starts}, device=device)
    rest = time.perf_counter() - began
    print(
        f"world of {sum(t.numel() for t in tensors) / 1e6:.1f} M parameters, {held / GIB:.2f} GiB on {device}"
    )
    print(f"files {on_disk / GIB:.2f} GiB, loaded in {seconds:.1f} s ({on_disk / seconds / GIB:.2f} GiB/s)")
    print(f"{len(starts)} start states and the reward model in {rest:.2f} s")
    grown = after - before
    kept = held if device.type == "cpu" else 0
    print(
        f"peak host memory {after / GIB:.2f} GiB, {grown / GIB:.2f} more than before loading; "
        f"beyond the weights that stay in host memory: {(grown - kept) / GIB:.2f} GiB"
    )


def _peak_memory() -> int:
    """Bytes, mapped pages of files included; `getrusage` would begin with the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Write the folder and measure loading it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--suite", choices=tuple(SUITES), default="libero_spatial")
    parser.add_argument(
        "--task-embedding", action="store_true", help="taskemb_resnet_rm.pth, not resnet_rm.pth"
    )
    parser.add_argument("--trajectories", type=int, default=40)
    parser.add_argument("--keyframes", type=int, default=20)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--only", choices=("write", "load"))
    chosen = parser.parse_args()
    if chosen.only != "load":
        began = time.perf_counter()
        counts = (chosen.trajectories, chosen.keyframes)
        write_folder(chosen.folder, chosen.scale, chosen.suite, *counts, chosen.task_embedding)
        print(f"written to {chosen.folder} in {time.perf_counter() - began:.1f} s", flush=True)
    if chosen.only is None:
        command = [sys.executable, __file__, str(chosen.folder), "--only", "load", "--device", chosen.device]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    if chosen.only == "load":
        measure_loading(chosen.folder, pick_device(chosen.device))


if __name__ == "__main__":
    main()
