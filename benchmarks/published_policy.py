"""A full-size OpenVLA-OFT checkpoint with random weights; how fast and in how much memory it is read.

    python benchmarks/published_policy.py OUT                  write OUT/published, convert it, load it
    python benchmarks/published_policy.py OUT --only-write     write OUT/published
    python benchmarks/published_policy.py OUT --scale tiny     the same with two million parameters

The folder has the published names, shapes, types and shards: 982 tensors, 7.54 B parameters, bfloat16,
15.1 GB in 4 files, with the action statistics of LIBERO-Spatial. Its tokenizer is asyncrl's word tokenizer,
padded to the size of Llama's vocabulary. Weights are normal numbers of the usual size per layer; speed and
memory do not depend on them. Each reading runs in a process of its own: its peak is that of host memory above
what the process had after its imports. The rate of plain reads of the same files stands beside it. Needs
numpy, torch, safetensors and transformers only.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from asyncrl.policies.checkpoints.convert import PublishedOptions, convert
from asyncrl.policies.checkpoints.folder import build_on_meta
from asyncrl.policies.checkpoints.published_names import (
    dropped_tensors,
    native_specs,
    published_config,
    published_specs,
    tensor_map,
)
from asyncrl.policies.checkpoints.published_policy import SECTION, STATISTICS
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.policies.openvla.tokenizer import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.storage.atomic import write_json
from asyncrl.storage.tensor_reader import Spec
from asyncrl.storage.tensor_writer import write_file
from asyncrl.storage.weight_files import INDEX
from support.published_exports import load_openvla

KEY = "libero_spatial_no_noops"
ACTION = {
    "q01": [-0.74547, -0.66161, -0.9375, -0.10714, -0.20679, -0.18429, 0.0],
    "q99": [0.9375, 0.87589, 0.93214, 0.10393, 0.17679, 0.14571, 1.0],
    "mask": [True] * 6 + [False],
}
PROPRIO = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
SHARDS = 4
BLOCK = 2**24
"""Random numbers that a host without a GPU draws once and repeats, from another place in every tensor."""
MIB = 2**20


# --- writing ------------------------------------------------------------------


def write_checkpoint(folder: Path, config: OpenVLAOFTConfig, *, sizes_in_config: bool) -> int:
    """Write a published folder with random weights in bfloat16; returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = padded_tokenizer(config)
    policy = build_on_meta(config, tokenizer)
    specs = published_specs(tensor_map(policy), native_specs(policy))
    specs |= {name: Spec(torch.bfloat16, shape) for name, shape in dropped_tensors(config).items()}
    specs = {name: Spec(torch.bfloat16, spec.shape) for name, spec in sorted(specs.items())}
    total = sum(spec.nbytes for spec in specs.values())
    group_files = _even(specs, total)
    files = [f"model-{i + 1:05d}-of-{len(group_files):05d}.safetensors" for i in range(len(group_files))]
    draw = random_source()
    with ThreadPoolExecutor(len(group_files)) as writers:
        jobs = [
            writers.submit(write_file, folder / file, shard, _values(shard, draw))
            for file, shard in zip(files, group_files, strict=True)
        ]
        for job in jobs:
            job.result()
    weight_map = {name: file for file, shard in zip(files, group_files, strict=True) for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    statistics = {KEY: {"action": ACTION, "proprio": PROPRIO}}
    fields = published_config(config) | {"torch_dtype": "bfloat16", "norm_stats": statistics}
    if sizes_in_config:
        fields[SECTION] = config.to_json()
    write_json(folder / STATISTICS, statistics)
    write_json(folder / "config.json", fields)
    tokenizer.save(folder / "tokenizer.json")
    return total


def padded_tokenizer(config: OpenVLAOFTConfig) -> PromptTokenizer:
    """The word tokenizer with LIBERO's words and words nobody says, up to the first action token."""
    words = words_for(task for suite in SUITES.values() for task in suite)
    known = build_word_tokenizer(words).get_vocab_size()
    unsaid = [f"unsaid{i}" for i in range(config.first_action_id - known)]
    return PromptTokenizer(build_word_tokenizer([*words, *unsaid]), pad_id=config.token_count)


def random_source() -> Callable[[int], Tensor]:
    """A function that gives so many normal float32 numbers, on the GPU if there is one."""
    if torch.cuda.is_available():
        return lambda count: torch.randn(count, device="cuda")
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))

    def repeat(count: int) -> Tensor:
        first = count % 9973
        repeats = -(-(first + count) // BLOCK)
        return (block if repeats == 1 else block.repeat(repeats))[first : first + count]

    return repeat


def _values(specs: Mapping[str, Spec], draw: Callable[[int], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        numbers = draw(math.prod(spec.shape)).view(spec.shape)
        if len(spec.shape) > 1:
            scaled = numbers * math.prod(spec.shape[1:]) ** -0.5
        elif name.endswith(".bias"):
            scaled = numbers * 0.02
        else:  # norms and layer scales
            scaled = 1 + 0.02 * numbers
        yield name, scaled.bfloat16()


def _even(specs: Mapping[str, Spec], total: int) -> list[dict[str, Spec]]:
    group_files: list[dict[str, Spec]] = [{} for _ in range(SHARDS)]
    index = 0
    for name, spec in specs.items():
        group_files[min(SHARDS - 1, index * SHARDS // total)][name] = spec
        index += spec.nbytes
    return [shard for shard in group_files if shard]


# --- reading, each in a process of its own ------------------------------------


def read_plainly(folder: Path) -> None:
    """Read all weight files into one reused buffer per thread."""
    files = sorted(folder.glob("*.safetensors"))

    def read(file: Path) -> None:
        buffer = bytearray(8 * MIB)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    with ThreadPoolExecutor(len(files)) as readers:
        list(readers.map(read, files))


def step(name: str, out: Path, device: str) -> None:
    """Do one thing and print its seconds and its peak of host memory in bytes as JSON."""
    published, own = out / "published", out / "asyncrl"
    if device == "cuda":
        torch.zeros(1, device=device)  # The context is not the loader's.
    before = memory_peak(reset=True)
    began = time.monotonic()
    if name == "plain":
        read_plainly(published)
    elif name == "convert":
        convert(published, own, to="asyncrl", choices=PublishedOptions())
    elif name == "back":
        convert(own, out / "back", to="openvla", choices=PublishedOptions())
    elif name == "load_policy":
        load_policy(own, device=device)
    else:
        fields = json.loads((published / "config.json").read_text())
        tiny = SECTION in fields
        config = OpenVLAOFTConfig.from_json(fields[SECTION]) if tiny else OpenVLAOFTConfig.full()
        load_openvla(published, config, norm_key=KEY, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "peak": memory_peak() - before}))


def memory_peak(*, reset: bool = False) -> int:
    """Largest resident memory of this process so far, in bytes; from now on, after a reset.

    `ru_maxrss` will not do: a process starts with that of the process that started it.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return 1024 * int(line.split()[1])


def measure(out: Path, total: int, device: str) -> list[dict[str, Any]]:
    """Run every step in a fresh process and print a row for each."""
    print(f"{'step':<14}{'seconds':>9}{'GB/s':>8}{'peak GB':>9}{'peak / model':>14}")
    rows = []
    for name in ("plain", "convert", "load_policy", "load_openvla", "back"):
        command = [sys.executable, __file__, str(out), "--step", name, "--device", device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = {"step": name, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        rate, peak = total / row["seconds"] / 1e9, row["peak"] / 1e9
        ratio = row["peak"] / total
        print(f"{name:<14}{row['seconds']:>9.2f}{rate:>8.2f}{peak:>9.2f}{ratio:>14.2f}", flush=True)
    return rows


def main() -> None:
    """Write, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the checkpoints: 45 GB at full scale, 15 to write")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--only-write", action="store_true", help="write OUT/published and end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        step(chosen.step, chosen.out, chosen.device)
        return
    tiny = chosen.scale == "tiny"
    config = OpenVLAOFTConfig.tiny() if tiny else OpenVLAOFTConfig.full()
    began = time.monotonic()
    total = write_checkpoint(chosen.out / "published", config, sizes_in_config=tiny)
    seconds = time.monotonic() - began
    print(f"wrote {total / 1e9:.2f} GB into {chosen.out / 'published'} in {seconds:.1f} s", flush=True)
    if not chosen.only_write:
        measure(chosen.out, total, chosen.device)


if __name__ == "__main__":
    main()
