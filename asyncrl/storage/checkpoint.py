"""Write and read all that a run needs to go on: policy, optimizer, random states and counters. No pickle.

    run_dir/checkpoints/update_000040/
      (policy files)           written by a function that the caller passes, so the folder is a --policy too
      state/*.safetensors      float32 weights and optimizer, a part from every rank (see `checkpoint_state`)
      random-00000.safetensors state of torch's generators, one file per rank
      state.json               counters, Python's random state, versions, size and SHA-256 of every file, what
                               the replay's ledger was, and a SHA-256 of all this

A checkpoint is written in this order, so that a crash at any point leaves the previous one the newest:
1. `save` copies the state to host memory and returns; the rest happens on a thread of every rank;
2. all ranks write into `update_000040.tmp`; when the last is done, rank 0 adds the policy, sums up all files
   and adds state.json;
3. every file and folder is flushed to the disk (fsync), then renamed to `update_000040`, then the parent is
   flushed, and old checkpoints are deleted.
A folder without the suffix is therefore complete; one with it is a leftover and deleted by the next save.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from asyncrl import __version__
from asyncrl.errors import CheckpointError
from asyncrl.observability.process_status import activity
from asyncrl.storage.atomic import publish, read_json, unfinished
from asyncrl.storage.checkpoint_state import (
    Parameters,
    Ranks,
    WriterThread,
    copy_generators,
    copy_state,
    random_file,
    read_state,
    restore_generators,
    unreadable,
    write_state,
)
from asyncrl.storage.checksums import Checksum, checksum_of_lines, digest_of
from asyncrl.storage.untrusted import check_types, remove

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMAT: Final = 2
"""Version of state.json. Raise it when a field changes meaning."""
HASHING_THREADS: Final = 4
"""Of rank 0, which sums up the files of all ranks; one takes 1.8 GB/s."""
FOLDER: Final = "checkpoints"
STATE: Final = "state"
WRITE_DEADLINE: Final = 1800.0
"""Seconds that one checkpoint may take to be written before the run ends with an error."""
COPYING: Final = "copying weights and optimizer for a checkpoint"
"""What the learner does meanwhile: 16 GB of a policy of full size take it about 15 s."""
_TYPES: Final = {"int": int, "str": str}
_NAME = re.compile(r"update_(\d{6,})")
CHECKSUMS: Final = "sha256"
"""Key in state.json: name of every other file -> its SHA-256."""
OWN_CHECKSUM: Final = "sha256_of_state"
"""Key in state.json: SHA-256 of its content without this."""
LEDGER: Final = "ledger"
"""Key in state.json: length and SHA-256 of the replay's ledger; null: there was none."""
CHANGED: Final = "its content is not what was written: somebody changed it, or the disk damaged it"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    version: int
    """Policy version = number of updates made."""
    groups_used: int
    """Groups the learner has taken from the replay: where the stream of start states goes on."""
    bad_updates: int = 0
    """Updates skipped so far because their gradient was not finite."""
    bad_in_a_row: int = 0
    """How many of them were the last ones."""
    config_hash: str = ""
    """Identifies the settings of the run that wrote the checkpoint."""
    asyncrl_version: str = __version__


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a checkpoint says besides the state of the learner, once its files are found sound."""

    ledger: Checksum | None
    """What the replay's ledger was; None: there was none, or it is not known."""
    notes: tuple[str, ...]
    """Lines for whoever resumes."""


class Checkpoints:
    """Writes the checkpoints of one run and keeps the newest few. Used by one thread per rank."""

    def __init__(
        self, run_dir: Path, *, keep: int, link: ProcessGroup | None = None, ledger: Path | None = None
    ) -> None:
        """Write into `run_dir`/checkpoints and keep the `keep` newest checkpoints (at least 1).

        Args:
            link: Process group (gloo, of its own) in which the ranks' writers agree; None: one rank.
            ledger: Of the replay: what it is then is noted in every checkpoint. None: there is none.
        """
        self.folder, self.keep, self._ledger = run_dir / FOLDER, keep, ledger
        self._ranks, self._writer = Ranks(link), WriterThread()
        self._copied = 0.0

    def save(
        self,
        progress: Progress,
        *,
        copy_policy: Callable[[], Callable[[Path], None]],
        optimizer: Optimizer,
        parameters: Parameters,
    ) -> Path:
        """Copy the state and begin to write a checkpoint, whole or not at all. Called by all ranks.

        Waits while the one before it is still being written. `finish` waits for this one.

        Args:
            copy_policy: Copies the policy and returns what writes it into the (existing) folder it is given,
                which is called on another thread, on rank 0 only.

        Raises:
            CheckpointError: The one before it could not be written, on any rank.
        """
        self.finish()
        final = self.folder / f"update_{progress.version:06d}"
        began = time.monotonic()
        with activity(COPYING, WRITE_DEADLINE):
            write_policy = copy_policy()
            state = copy_state(parameters, optimizer, self._ranks.rank)
        self._copied += time.monotonic() - began
        counters = {"progress": asdict(progress), "python_random": random.getstate()}
        action = partial(self._write, final, counters, write_policy, state, copy_generators())
        self._writer.start(final, partial(self._explained, final, action))
        return final

    def finish(self, deadline: float = WRITE_DEADLINE) -> None:
        """Wait until everything is on the disk.

        Raises:
            CheckpointError: It could not be written, or not within `deadline` seconds.
        """
        self._writer.finish(deadline)

    @property
    def newest(self) -> Path | None:
        """Newest checkpoint that is complete, or None."""
        complete = _complete(self.folder)
        return complete[-1][1] if complete else None

    def waited(self) -> float:
        """Seconds that `save` and `finish` waited for the writer since the last call of this."""
        return self._writer.take_waited()

    def copied(self) -> float:
        """Seconds that `save` copied since the last call of this."""
        copied, self._copied = self._copied, 0.0
        return copied

    def _write(
        self,
        final: Path,
        counters: dict[str, Any],
        write_policy: Callable[[Path], None],
        state: dict[str, Tensor],
        generators: dict[str, Tensor],
    ) -> None:
        """Write and publish, on a thread; the ranks agree after each step, so that all fail or none."""
        part, rank = unfinished(final), self._ranks.rank
        try:
            self._ranks.first(partial(_clear, self.folder, part))
            self._ranks.all(partial(_write_part, part, state, generators, rank))
            self._ranks.first(partial(self._complete_and_publish, part, final, counters, write_policy))
        except BaseException:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)  # Half a checkpoint would only fill the disk.
            raise

    def _complete_and_publish(
        self, part: Path, final: Path, counters: dict[str, Any], write_policy: Callable[[Path], None]
    ) -> None:
        write_policy(part)
        _write_state(part, counters, None if self._ledger is None else checksum_of_lines(self._ledger))
        publish(part, final)
        for _, old in _complete(self.folder)[: -self.keep]:
            remove(old)

    def _explained(self, final: Path, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"Checkpoint {final} cannot be written ({error}). Free space on the disk "
                "(or lower --keep-checkpoints) and continue from the checkpoint before it with --resume."
            ) from error


def latest(run_dir: Path) -> Path | None:
    """Newest complete checkpoint of a run, or None."""
    return Checkpoints(run_dir, keep=1).newest


def kept(run_dir: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by policy version, oldest first."""
    return dict(_complete(run_dir / FOLDER))


def load(
    folder: Path,
    *,
    optimizer: Optimizer,
    parameters: Parameters,
    rank: int = 0,
    verified: bool = False,
) -> Progress:
    """Restore trained weights, optimizer and random states; frozen weights come from the policy's files.

    Raises:
        CheckpointError: A file is missing, truncated or changed, or the state does not fit the parameters.
    """
    state = _read_state(folder)
    read_state(folder / STATE, parameters, optimizer)
    needed = {random_file(rank)} if verified else {n for n in state["files"] if n.startswith(f"{STATE}/")}
    _check_content(folder, state, needed | {random_file(rank)})
    try:
        progress = Progress(**state["progress"])
        version, internal, gauss_next = state["python_random"]
        random.setstate((version, tuple(internal), gauss_next))
        restore_generators(folder / random_file(rank))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise unreadable(folder / "state.json", f"unexpected content: {error!r}") from error
    return progress


def verify(folder: Path, *, policy_only: bool = False) -> Verified:
    """Check that every file of a checkpoint is there and was not changed since it was written.

    It reads all files once, on some threads. Of a checkpoint of an earlier version, which has no checksums,
    the sizes are compared; a note says so.

    Args:
        policy_only: Read only the files of the policy, not the learner's state.

    Raises:
        CheckpointError: Names the file, what is wrong with it, and the remedy.
    """
    state = _read_state(folder)
    names = set(state["files"])
    if policy_only:
        names = {n for n in names if not n.startswith(f"{STATE}/") and not n.startswith("random-")}
    _check_content(folder, state, names)
    notes = []
    if CHECKSUMS not in state:
        notes.append(
            f"{folder.name} was written by an earlier version, without checksums: only the sizes of its "
            "files are verified"
        )
    return Verified(ledger=Checksum.from_json(state.get(LEDGER)), notes=tuple(notes))


def _clear(folder: Path, part: Path) -> None:
    for leftover in folder.glob("*.tmp"):
        remove(leftover)
    (part / STATE).mkdir(parents=True)


def _write_part(part: Path, state: dict[str, Tensor], generators: dict[str, Tensor], rank: int) -> None:
    write_state(state, part / STATE, rank)
    save_file(generators, part / random_file(rank))


def _write_state(part: Path, counters: dict[str, Any], ledger: Checksum | None) -> None:
    files = sorted(path for path in part.rglob("*") if path.is_file())
    sizes = {path.relative_to(part).as_posix(): path.stat().st_size for path in files}
    state = {
        "format": FORMAT,
        **counters,
        "files": sizes,
        CHECKSUMS: _digests(part, sizes),
        LEDGER: None if ledger is None else asdict(ledger),
    }
    (part / "state.json").write_text(json.dumps(state | {OWN_CHECKSUM: _digest_of_state(state)}) + "\n")


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Sum up files of a checkpoint; raises OSError for one that cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(HASHING_THREADS, "checksums") as pool:
        return dict(zip(names, pool.map(lambda name: digest_of(folder / name), names), strict=True))


def _digest_of_state(state: dict[str, Any]) -> str:
    """Sum up what state.json holds besides its own checksum; JSON that was read gives the same."""
    content = {key: value for key, value in state.items() if key != OWN_CHECKSUM}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _check_content(folder: Path, state: dict[str, Any], names: Iterable[str]) -> None:
    """Compare the content of files with what state.json says, where it says something."""
    wanted = {name: state[CHECKSUMS][name] for name in names if name in state.get(CHECKSUMS, {})}
    try:
        found = _digests(folder, wanted)
    except OSError as error:
        raise unreadable(folder, str(error)) from error
    for name, digest in wanted.items():
        if found[name] != digest:
            raise unreadable(folder / name, CHANGED)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints with their versions, oldest first."""
    found = [(match, path) for path in folder.glob("update_*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _read_state(folder: Path) -> dict[str, Any]:
    """Read state.json, and compare its own checksum, and the sizes of all files, with it."""
    path = folder / "state.json"
    try:
        state = read_json(path, remedy="")
        check_types(state, {"files": dict, "progress": dict})
        check_types(state["progress"], {field.name: _TYPES[str(field.type)] for field in fields(Progress)})
        files = state["files"]
        check_types(files, dict.fromkeys(files, int))
    except (CheckpointError, ValueError) as error:
        raise unreadable(path, str(error)) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this asyncrl {__version__} reads {FORMAT}. "
            "Continue with the version that wrote it, or start afresh with --policy and this folder."
        )
    if not _is_as_written(state, files):
        raise unreadable(path, CHANGED)
    for name, size in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise unreadable(path, f"it names {name[:80]!r}, which does not lie in the folder")
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            seen = "is missing" if found is None else f"has {found} bytes"
            raise unreadable(folder / name, f"it {seen}, {size} were written")
    return state


def _is_as_written(state: dict[str, Any], files: dict[str, Any]) -> bool:
    """Compare state.json with its own checksum. One of an earlier version has none of the keys that tell."""
    if not state.keys() & {CHECKSUMS, OWN_CHECKSUM, LEDGER}:
        return True
    checksums = state.get(CHECKSUMS)
    complete = isinstance(checksums, dict) and checksums.keys() == files.keys()
    return complete and state.get(OWN_CHECKSUM) == _digest_of_state(state)
