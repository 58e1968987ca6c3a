"""More than 150 ways to call asyncrl that cannot work, or only just. For tests and fuzzing.

`INVOCATIONS` has a name, and what follows `asyncrl` on the command line. {w} stands for a folder of odd
files (`make_files`), {m} for one with models and a run, {n} for a new one. Variables of the environment stand
before a name, and what standard output is instead of a file behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

HUGE: Final = "1" + "0" * 40
DIGITS: Final = "9" * 5000
"""More than Python reads."""
LONG: Final = "x" * 300
DEEP: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call."""

    arguments: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    output: Literal["", "full", "closed pipe"] = ""


INVOCATIONS: Final[dict[str, Invocation]] = {}


def _add(text: str, output: Literal["", "full", "closed pipe"] = "", **environ: str) -> None:
    name = " ".join(
        [*(f"{key}={value}" for key, value in environ.items()), text, f"> {output}" * bool(output)]
    )
    name = name.strip() if len(name) < 120 else f"{name[:117]}..."
    assert name not in INVOCATIONS, name
    parts = tuple(part.replace("%20", " ") for part in text.split(" ") if part)
    INVOCATIONS[name] = Invocation(arguments=parts, environ=environ, output=output)


TINY: Final = "{flags} --inline --updates 1 --run-dir {n}/fresh"
"""A run that would work: tiny models, one update."""

for _value in (HUGE, "-1", "1e400", "nan", "inf", DIGITS, "", "0x10", "١٢"):
    _add(f"train {TINY} --seed {_value or '%20'}")
for _flag in (
    *("--updates", "--learner.threads", "--lora.rank", "--algorithm.group-size", "--actor.slots"),
    *("--algorithm.groups-per-update", "--replay.max-lag", "--actor.max-decisions", "--imagination.steps"),
    *("--actor.max-respawns", "--checkpoint-every", "--algorithm.micro-batch"),
    *("--algorithm.epochs", "--algorithm.minibatches", "--replay.keep-video-every", "--algorithm.top-k"),
):
    _add(f"train {TINY} {_flag} 99999999999999999999")
for _flag in (
    *(
        "--batch-timeout",
        "--hang-timeout",
        "--startup-timeout",
        "--weights.timeout",
        "--replay.group-timeout",
    ),
    *("--replay.max-gigabytes", "--optimizer.learning-rate", "--algorithm.temperature", "--critic.gamma"),
    *("--algorithm.dual-clip", "--correction.max-weight", "--optimizer.eps", "--optimizer.max-grad-norm"),
    *("--algorithm.clip-high", "--correction.rho-cap", "--actor.success-threshold", "--lora.alpha"),
):
    _add(f"train {TINY} {_flag} inf")
for _flag in (
    "--batch-timeout",
    "--algorithm.dual-clip",
    "--algorithm.temperature",
    "--replay.max-gigabytes",
):
    _add(f"train {TINY} {_flag} nan")
    _add(f"train {TINY} {_flag} 1e308")
for _text in (
    *("learner=0-99999999999", "learner=0,actor=1-99999999999", f"learner={DIGITS}", "learner=0-4096"),
    *(
        "actor=0",
        "learner=",
        "learner=-1",
        "learner=0,learner=0",
        "learner=0,actor=5-1",
        "x" * 5000,
        ",,,",
        "②=1",
    ),
    *("learner=0,policy=1", "learner=0-3000,actor=3001"),
):
    _add(f"train --placement {_text}")
for _dir in (
    LONG,
    "{w}/" + "y/" * 2500,
    "{w}/file",
    "{w}/file/below",
    "{w}/pipe",
    "{w}/circle",
    "{w}/\udcff",
    "/proc/1/x",
):
    _add(f"train {TINY} --run-dir {_dir}")
_add(f"train --run-dir {LONG} --resume")
_add("train --run-dir {w} --resume")
_add("train --run-dir /dev/null --resume")
for _file in (
    *("bytes.toml", "deep.toml", "deep_table.toml", "bytes.json", "deep.json", "array.json", "huge.json"),
    *("infinity.json", "numbers.json", "empty.json", "zero.toml", "folder.toml", "pipe.toml", "circle.toml"),
    *("none.toml", "big.toml", "numbers.toml", "surrogate.json"),
):
    _add("train {w}/" + _file)
for _file in ("bytes.toml", "deep.json", "pipe.toml", "numbers.toml"):
    _add("doctor {w}/" + _file)
_add("doctor --seed " + HUGE)
_add("doctor --run-dir " + LONG)
_add("doctor --placement learner=0-99999999999")
for _part in ("policy", "world", "start-states", "reward"):
    for _place in (LONG, "{w}/pipe", "{w}/file", "{w}/folder"):
        _add(f"train {TINY} --{_part} {_place}")
_add(f"train {TINY} --world " + "{w}/index_infinity")
_add(f"train {TINY} --world " + "{w}/index_deep")
_add(f"train {TINY} --policy " + "{w}/policy_infinity")
_add(f"train {TINY} --policy " + "{w}/policy_layers")
_add(f"train {TINY} --start-states " + "{w}/bomb.npy")
_add(f"train {TINY} --start-states " + "{w}/bomb.h5")
for _env in (
    {"MASTER_PORT": "99999"},
    {"MASTER_PORT": "0"},
    {"MASTER_PORT": DIGITS},
    {"RANK": "5"},
    {"RANK": HUGE},
    {"WORLD_SIZE": HUGE},
    {"WORLD_SIZE": "0", "RANK": "0"},
    {"LOCAL_WORLD_SIZE": "two"},
    {"LOCAL_RANK": "99999999999999999999"},
):
    _rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    _add("train --placement learner=0,actor=1 --startup-timeout 2 --run-dir {n}/ranks", **(_rank | _env))
for _text in (
    *(
        "--workers 0",
        "--workers -1",
        f"--workers {HUGE}",
        "--episodes 0",
        f"--episodes {HUGE}",
        "--episodes nan",
    ),
    *(f"--seed {HUGE}", "--seed -1", "--temperature inf", "--temperature nan", "--max-decisions 0"),
    *(f"--max-decisions {HUGE}", "--device cuda:99", "--simulator nothing", "--json {w}/folder --episodes 0"),
):
    _add(f"evaluate tabletop {_text}")
_add(f"evaluate {LONG}")
_add("evaluate {w}/pipe")
for _text in (
    *(
        "--out {w}/file",
        "--out {n}/new --workers 0",
        f"--out {{n}}/new --workers {HUGE}",
        "--out {w}/file/below",
    ),
    *("--out {n}/new --episodes 0", "--out {n}/new --image-size 0", f"--out {{n}}/new --image-size {HUGE}"),
    *(f"--out {{n}}/new --seed {HUGE}", "--out {n}/new --max-decisions 0", "--out {w}/pipe", f"--out {LONG}"),
    *("--out {n}/new --expert.noise nan inf", "--out {n}/new --expert.extra-decisions -5"),
):
    _add(f"collect {_text}")
for _text in (
    *("--keep-gigabytes nan", "--keep-gigabytes inf", "--keep-gigabytes -inf", "--keep-gigabytes 1e308"),
    *(f"--older-than-version {HUGE}", "--older-than-version nan", "--keep-gigabytes -1"),
):
    _add("replay prune {m}/run --dry-run " + _text)
for _text in (
    *(
        "list {m}/run --limit -1",
        "list {m}/run --limit " + HUGE,
        f"list {LONG}",
        "list {w}/pipe",
        "list {w}/file",
    ),
    *(
        "list {m}/run --version " + HUGE,
        "stats {m}/run --min-lag nan",
        "stats {m}/run --out {w}/folder/x.png",
    ),
    *(
        "stats {m}/run --out {w}/none/x.png",
        "show {m}/run " + LONG,
        "show {m}/run 0 0",
        "video {m}/run 0 --rate 0",
    ),
    *(
        "sheet {m}/run --successes " + HUGE,
        "export {m}/run --out " + LONG,
        "verify {w}/circle",
        "verify \udcff",
    ),
    *("imagine {m}/run " + HUGE, "imagine {m}/run 1 --rows " + HUGE, "compact {m}/run --codec nothing"),
):
    _add(f"replay {_text}")
for _text in (
    *("policy --data {w}/file --out {n}/new", "policy --data {w}/folder --out {n}/new --steps 0"),
    *("policy --data {w}/parts --out {n}/new", f"policy --data {{w}}/folder --out {{n}}/new --batch {HUGE}"),
    *("starts --data {w}/folder --out {n}/new --count 0", "decoder --episodes 0", "decoder --seed " + HUGE),
    *(
        "world --data {w}/folder --out {n}/new --learning-rate nan",
        "reward --data {w}/folder --world {w}/pipe",
    ),
):
    _add(f"fit {_text}")
for _text in (
    *(
        "{w}/pipe {n}/new",
        "{w}/folder {n}/new --shard-gigabytes nan",
        "tabletop {w}/file",
        f"tabletop {LONG}",
    ),
    *("tabletop {n}/new --chunk " + HUGE, "tabletop {n}/new --images -1", f"{LONG} {{n}}/new"),
    *("{w}/policy_infinity {n}/new", "tabletop /proc/1/new"),
):
    _add(f"convert {_text}")
for _text in (
    *("actor --join tcp://127.0.0.1:99999", f"actor --join {LONG}", "actor --join x --threads -1"),
    *(f"actor --join x --threads {HUGE}", "actor --join tcp://127.0.0.1:1 --keys {w}/pipe"),
    *("check world {w}/pipe", "check world tabletop --image-size -1", f"check policy {LONG}"),
    *("check simulator tabletop --action-dim " + HUGE, "check correction os:system", "keys {w}/file"),
    *(f"keys {LONG}", "keys {n}/new --clients " + LONG, "keys {n}/new --clients ../x", f"status {LONG}"),
    *(
        "status {w}/pipe",
        "status {w}/folder",
        "status {m}/run --stacks",
        "nothing",
        "\udcff",
        "configs",
        "metrics",
    ),
):
    _add(_text)
for _text in (
    "metrics",
    "configs",
    "--help",
    "--version",
    "train --help",
    "replay list {m}/run",
    "status {m}/run",
):
    _add(_text, output="full")
    _add(_text, output="closed pipe")
_add("doctor --run-dir {n}/fresh", output="closed pipe")
_add("replay verify {m}/run", output="full")


def make_files(folder: Path) -> None:
    """Make the odd files."""
    folder.mkdir()
    for name in (
        "folder",
        "folder.toml",
        "parts",
        "index_infinity",
        "index_deep",
        "policy_infinity",
        "policy_layers",
    ):
        (folder / name).mkdir()
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(folder / name)
    for name in ("circle", "circle.toml"):
        (folder / name).symlink_to(name)
    deep_list, deep_object = b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP
    files = {
        "file": b"a file",
        "bytes.toml": b'world = "caf\xe9"\n',
        "deep.toml": b"x = " + deep_list,
        "deep_table.toml": b"x = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
        "zero.toml": b'policy = "a\\u0000b"\n',
        "big.toml": b"# " + b"x" * 2**21,
        "numbers.toml": b"seed = " + HUGE.encode() + b"\nbatch_timeout = inf\n",
        "bytes.json": b'{"world": "caf\xe9"}',
        "deep.json": deep_object,
        "array.json": b"[1]",
        "huge.json": b'{"seed": ' + HUGE.encode() + b"}",
        "infinity.json": b'{"batch_timeout": Infinity}',
        "numbers.json": b'{"updates": ' + DIGITS.encode() + b"}",
        "surrogate.json": b'{"policy": "\\ud800"}',
        "empty.json": b"",
        "parts/part-00000.h5": b"not HDF5",
        "index_infinity/model.safetensors.index.json": b'{"weight_map": {"a": Infinity}}',
        "index_deep/model.safetensors.index.json": deep_object,
        "policy_infinity/config.json": b'{"format": Infinity}',
        "policy_infinity/model.safetensors": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_bomb(folder / "bomb.npy")
    _hdf5_bomb(folder / "bomb.h5")


def policy_of_many_layers(policy: Path, folder: Path) -> None:
    """Copy a policy's folder, and let its config.json claim a billion layers."""
    shutil.copytree(policy, folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["asyncrl"]["llm_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(fields))


def write_bomb(path: Path, length: int = 700_000, copies: int = 100_000) -> None:
    """Write a pickled array of 1.4 MB whose instructions encode one text of 700 kB again and again."""
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (63 - (len(head) + 10) % 64) + b"\n"
    again = b"h\x00h\x01h\x02\x86R"  # encode(text, "latin1")
    pickle = b"\x80\x04(c_codecs\nencode\n\x94X" + struct.pack("<I", length) + b"a" * length
    pickle += b"\x94\x8c\x06latin1\x94" + again * copies + b"t."
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + pickle)


def _hdf5_bomb(path: Path) -> None:
    """Write start states whose pictures are 5 GB of black, compressed."""
    import h5py

    rows = 50_000
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "asyncrl-start-states-1"
        made = file.create_dataset(
            "frame", (8 * rows, 64, 64, 3), "u1", chunks=(rows, 64, 64, 3), compression="gzip"
        )
        packer = zlib.compressobj(9)
        packed = b"".join(packer.compress(bytes(rows * 12_288 // 100)) for _ in range(100)) + packer.flush()
        for number in range(8):
            made.id.write_direct_chunk((number * rows, 0, 0, 0), packed)


def filled_in(invocation: Invocation, work: Path, models: Path, new: Path, flags: list[str]) -> Iterator[str]:
    """Return the arguments with the folders and the flags of a run with tiny models in them."""
    for part in invocation.arguments:
        if part == "{flags}":
            yield from flags
        else:
            yield part.replace("{w}", str(work)).replace("{m}", str(models)).replace("{n}", str(new))
