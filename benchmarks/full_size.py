"""The flags of a run at full size with random weights, whose files are written where they are missing.

    python benchmarks/full_size.py models/random                     45 GB: policy, converted policy, world
    python benchmarks/full_size.py models/tiny --scale tiny          the same layouts, a few MB

The policy is a published OpenVLA-OFT folder (982 tensors, 7.54 B parameters, bfloat16, 4 files, statistics of
LIBERO-Spatial), converted; the world is a Wan folder as RLinf publishes it, with a reward model and start
states.
Speed and memory do not depend on the weights. Batches are small, so that an update takes seconds.
"""

from __future__ import annotations

import math
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import SECTION, STATISTICS
from asyncrl.policies.openvla.names import published_config, published_shapes, unused_shapes
from asyncrl.policies.openvla.preprocess import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.rewards.resnet import PUBLISHED, RewardConfig, RewardNetwork
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.storage.atomic import write_json
from asyncrl.storage.tensor_files import INDEX, Spec, write_file, write_tensors
from asyncrl.worlds.wan.files import HEAD_DIM, IMAGE_SIZE, WAN_TRANSFORMER, WAN_VAE, vae_name
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig, transformer_name
from asyncrl.worlds.wan.vae import VaeConfig, WanVae

ROOT: Final = Path(__file__).resolve().parents[1]
RECIPE: Final = ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml"
BATCH: Final = (
    *("--lora.rank", "32", "--optimizer.learning-rate", "1e-4"),
    *("--algorithm.groups-per-update", "4", "--algorithm.minibatches", "1"),
    *("--actor.slots", "16", "--actor.max-decisions", "2"),
)
KEY: Final = "libero_spatial_no_noops"
ACTION: Final = {
    "q01": [-0.74547, -0.66161, -0.9375, -0.10714, -0.20679, -0.18429, 0.0],
    "q99": [0.9375, 0.87589, 0.93214, 0.10393, 0.17679, 0.14571, 1.0],
    "mask": [True] * 6 + [False],
}
PROPRIO: Final = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
SHARDS: Final = 4
STARTS: Final = 40
KEYFRAMES: Final = 20
NOISE: Final = torch.randn(2**22, generator=torch.Generator().manual_seed(0))
"""Repeated from another place for every tensor: drawing as many numbers takes a hundred times as long."""
Scale = Literal["full", "tiny"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Write a policy and a world with random weights."""

    folder: Annotated[Path, tyro.conf.Positional]
    scale: Scale = "full"
    """tiny: small ones in the same layouts, to try a script on a CPU."""


def full_size_flags(folder: Path) -> list[str]:
    policy, world = written(folder)
    return [str(RECIPE), "--policy", str(policy), "--world", str(world), *BATCH]


def run_flags(full: str, flags: str, *, compile: bool) -> list[str]:
    """Return the flags of a benchmark's runs; later ones win.

    Args:
        full: Folder of models for `full_size_flags`; empty: `flags` name theirs.
        flags: Further ones, as on a command line.
        compile: Learner and actors are.
    """
    models = full_size_flags(Path(full)) if full else []
    fast = ["--imagination.compile", "--learner.compile"] if compile else []
    return [*models, *fast, *shlex.split(flags)]


def written(folder: Path, scale: Scale = "full") -> tuple[Path, Path]:
    policy, world = folder / "policy", folder / "world"
    if not (policy / "config.json").is_file():
        write_policy(policy, OpenVLAOFTConfig.tiny() if scale == "tiny" else OpenVLAOFTConfig.full())
    if not (world / "dataset").is_dir():
        write_world(world, scale)
    return policy, world


def noise(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    rolled = NOISE.roll(zlib.crc32(name.encode()) % len(NOISE))
    return rolled.repeat(-(-count // len(NOISE)))[:count].view(shape)


def write_policy(folder: Path, config: OpenVLAOFTConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = words_for(task for suite in INSTRUCTIONS.values() for task in suite)
    known = build_word_tokenizer(words).get_vocab_size()
    unused = [f"unused{i}" for i in range(config.first_action_id - known)]
    tokenizer = PromptTokenizer(build_word_tokenizer([*words, *unused]), pad_id=config.token_count)
    shapes = published_shapes(config) | unused_shapes(config)
    specs = {name: Spec(torch.bfloat16, shape) for name, shape in sorted(shapes.items())}
    total = sum(spec.nbytes for spec in specs.values())
    shards = split_evenly(specs, total)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(len(shards)) as writers:
        parts = zip(files, shards, strict=True)
        jobs = [writers.submit(write_file, folder / f, part, policy_values(part)) for f, part in parts]
        for job in jobs:
            job.result()
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    statistics = {KEY: {"action": ACTION, "proprio": PROPRIO}}
    fields = published_config(config) | {"torch_dtype": "bfloat16", "norm_stats": statistics}
    if config != OpenVLAOFTConfig.full():
        fields[SECTION] = {k: v for k, v in config.to_json().items() if k not in ("norm_key", "norm_stats")}
    write_json(folder / STATISTICS, statistics)
    write_json(folder / "config.json", fields)
    tokenizer.save(folder / "tokenizer.json")


def policy_values(specs: Mapping[str, Spec]) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        numbers = noise(name, spec.shape)
        if len(spec.shape) > 1:
            numbers = numbers * math.prod(spec.shape[1:]) ** -0.5
        else:  # norms and layer scales are around 1
            numbers = 0.02 * numbers + (not name.endswith(".bias"))
        yield name, numbers.bfloat16()


def split_evenly(specs: Mapping[str, Spec], total: int) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{} for _ in range(SHARDS)]
    offset = 0
    for name, spec in specs.items():
        shards[min(SHARDS - 1, offset * SHARDS // total)][name] = spec
        offset += spec.nbytes
    return [shard for shard in shards if shard]


def write_world(folder: Path, scale: Scale) -> None:
    transformer_size, vae_size, reward_size = (
        TransformerConfig.full(),
        VaeConfig.full(),
        RewardConfig.full(),
    )
    if scale == "tiny":
        small = {"heads": 1, "head_dim": HEAD_DIM, "layers": 2, "ffn_dim": 256, "freq_dim": 64}
        transformer_size = replace(transformer_size, **small)
        vae_size = replace(vae_size, base_dim=4, decoder_base_dim=4, res_blocks=1)
        reward_size = replace(reward_size, widths=(4, 8, 16, 32))
    with torch.device("meta"):
        transformer, vae = ActionWanTransformer(transformer_size), WanVae(vae_size)
        reward = RewardNetwork(reward_size)
    folder.mkdir(parents=True, exist_ok=True)
    known = published_names("wan_action_transformer", transformer_name)
    names = {known[n]: t.shape for n, t in transformer.state_dict().items()}
    write_tensors(folder / WAN_TRANSFORMER, {n: world_value(n, s, torch.bfloat16) for n, s in names.items()})
    known = published_names("wan_vae", vae_name)
    names = {known[n]: t.shape for n, t in vae.state_dict().items()}
    torch.save({n: world_value(n, s, torch.float32) for n, s in names.items()}, folder / WAN_VAE)
    scores = {n: world_value(n, t.shape, t.dtype) for n, t in reward.state_dict().items()}
    scores[list(scores)[-1]] -= 5.0  # No frame is a success, so that every imagined episode has full length.
    torch.save(scores, folder / PUBLISHED[False])
    write_dataset(folder / "dataset", INSTRUCTIONS["libero_spatial"])


def published_names(listed: str, rename: Callable[[str], str]) -> dict[str, str]:
    rows = (ROOT / "tests" / "data" / f"{listed}.txt").read_text().splitlines()
    return {rename(name): name for name in (row.partition(" ")[0] for row in rows)}


def world_value(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int64 or name.endswith(("bias", "running_mean")):
        return torch.zeros(shape, dtype=dtype)
    if name.endswith(("gamma", "running_var")) or (len(shape) == 1 and name.endswith("weight")):
        return torch.ones(shape, dtype=dtype)
    return (0.02 * noise(name, shape)).to(dtype)


def write_dataset(folder: Path, tasks: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def frame(number: int) -> dict[str, object]:
        coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return {
            "image": coarse.repeat(IMAGE_SIZE // 8, axis=0).repeat(IMAGE_SIZE // 8, axis=1),
            "delta_action": random.normal(size=7) * 0.1,
            "instruction": tasks[number % len(tasks)],
            "init_ee_pose": random.normal(size=8),
        }

    for number in range(STARTS + KEYFRAMES):
        count, suffix = (1, "") if number < STARTS else (5, "_kir")
        frames = np.empty(count, dtype=object)
        frames[:] = [frame(number) for _ in range(count)]
        np.save(folder / f"traj{number}{suffix}.npy", frames, allow_pickle=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    print(*written(settings.folder, settings.scale))


if __name__ == "__main__":
    main()
