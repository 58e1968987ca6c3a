"""Save and load the state of a run: policy, optimizer, random states and counters. No pickle.

run_dir/checkpoints/update_000040/
  (policy files)           so the folder works as --policy
  state/*.safetensors      float32 weights and optimizer, sharded by rank (`checkpoint_state`)
  random-00000.safetensors state of torch's generators, one file per rank
  state.json               counters, Python's random state, versions, sizes and SHA-256 of all files, checksum
                           of the replay's ledger, and a SHA-256 of state.json itself
"""
# Order of a save, so that a crash leaves the previous checkpoint the newest: `save` copies the state to host
# memory; on a thread of every rank all write into `update_000040.tmp`; rank 0 then adds the policy and
# state.json, syncs everything and renames the folder. A folder without the suffix is therefore complete.

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from asyncrl import __version__
from asyncrl.errors import CheckpointError
from asyncrl.observability import process_status, waits
from asyncrl.observability.process_status import activity
from asyncrl.storage import checkpoint_state
from asyncrl.storage.assets import kept, latest
from asyncrl.storage.atomic import Checksum, checksum_of_lines, digest_of, publish, read_json, unfinished
from asyncrl.storage.checkpoint_state import Parameters, Ranks, random_file, unreadable
from asyncrl.storage.run_folder import BEFORE, BEST, HELD, is_whole
from asyncrl.storage.untrusted import check_types, load_json, remove

FORMAT: Final = 2  # of state.json; raise it when a field changes meaning
HASHING_THREADS: Final = 4
FOLDER: Final = "checkpoints"
STATE: Final = "state"
WRITE_DEADLINE: Final = 1800.0
CHECKSUMS: Final = "sha256"  # key in state.json: file name -> SHA-256
OWN_CHECKSUM: Final = "sha256_of_state"
LEDGER: Final = "ledger"  # key in state.json: `Checksum` of the replay's ledger, or null
CHANGED: Final = "its content is not what was written: somebody changed it, or the disk damaged it"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters of a run."""

    version: int  # of the policy: number of updates made
    groups_used: int  # Groups taken from the replay: position in the stream of start states
    bad_updates: int = 0  # Updates skipped because their gradient was not finite
    bad_in_a_row: int = 0
    asyncrl_version: str = __version__


class Checkpoints:
    """Writes the checkpoints of one run and keeps the newest few. Used by one thread per rank."""

    def __init__(
        self, run_dir: Path, *, keep: int, link: ProcessGroup | None = None, ledger: Path | None = None
    ) -> None:
        """Keep the `keep` newest checkpoints; `link` is the writers' Gloo group, None for one rank."""
        self._run_dir, self.folder, self.keep, self._ledger = run_dir, run_dir / FOLDER, keep, ledger
        self._ranks = Ranks(link)
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None  # of the writer
        self._waited = self._copied = 0.0

    def save(
        self,
        progress: Progress,
        *,
        copy_policy: Callable[[], Callable[[Path], None]],
        optimizer: Optimizer,
        parameters: Parameters,
    ) -> Path:
        """Copy the state and start writing a checkpoint; `copy_policy` returns a function that writes it."""
        self.finish()
        final = self.folder / f"update_{progress.version:06d}"
        began = time.monotonic()
        with activity("copying weights and optimizer for a checkpoint", WRITE_DEADLINE):
            write_policy = copy_policy()
            state = checkpoint_state.copy_state(parameters, optimizer, self._ranks.rank)
        self._copied += time.monotonic() - began
        counters = {"progress": asdict(progress), "python_random": random.getstate()}
        self._writer = threading.Thread(
            target=self._write,
            args=(final, counters, write_policy, state, checkpoint_state.copy_generators()),
            name=f"write {final.name}",
            daemon=True,
        )
        self._writer.start()
        return final

    def finish(self, deadline: float = WRITE_DEADLINE) -> None:
        """Wait for at most `deadline` seconds until everything is on the disk; raises the writer's error."""
        if self._writer is None:
            return
        began = time.monotonic()
        with process_status.waiting(waits.CHECKPOINT, deadline):
            self._writer.join(deadline)
        self._waited += time.monotonic() - began
        if self._writer.is_alive():
            raise CheckpointError(
                f"Checkpoint {self._writer.name[6:]} is not written after {deadline:g} more seconds. Look at "
                "the disk and the output of the other learner ranks; --resume goes on from the checkpoint "
                "before it."
            )
        self._writer, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    @property
    def newest(self) -> Path | None:
        """Newest complete checkpoint, or None."""
        return latest(self._run_dir)

    def pop_seconds(self) -> tuple[float, float]:
        """Return the seconds spent waiting for the writer, and copying, since the last call."""
        found = self._waited, self._copied
        self._waited = self._copied = 0.0
        return found

    def _write(
        self,
        final: Path,
        counters: dict[str, Any],
        write_policy: Callable[[Path], None],
        state: dict[str, Tensor],
        generators: dict[str, Tensor],
    ) -> None:
        # On the writer's thread; the ranks agree after each step, so that all fail or none.
        part, rank = unfinished(final), self._ranks.rank

        def begin() -> None:
            for leftover in self.folder.glob("*.tmp"):
                remove(leftover)
            (part / STATE).mkdir(parents=True)

        def write_shard() -> None:
            checkpoint_state.write_state(state, part / STATE, rank)
            save_file(generators, part / random_file(rank))

        def complete() -> None:
            write_policy(part)
            _write_state(part, counters, None if self._ledger is None else checksum_of_lines(self._ledger))
            publish(part, final)
            for old in list(kept(self._run_dir).values())[: -self.keep]:
                remove(old)

        try:
            self._ranks.first(begin)
            self._ranks.all(write_shard)
            self._ranks.first(complete)
        except BaseException as error:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)  # Half a checkpoint would only fill the disk.
            self._failure = error
            if isinstance(error, OSError | SafetensorError | RuntimeError):
                self._failure = CheckpointError(
                    f"Checkpoint {final} cannot be written ({error}). Free space on the disk "
                    "(or lower --keep-checkpoints) and continue from the checkpoint before it with --resume."
                )
                self._failure.__cause__ = error


def load(
    folder: Path, *, optimizer: Optimizer, parameters: Parameters, rank: int = 0, verified: bool = False
) -> Progress:
    """Restore trained weights, optimizer and random states; frozen weights come from the policy's files."""
    state = _read_state(folder)
    checkpoint_state.read_state(folder / STATE, parameters, optimizer)
    needed = {random_file(rank)} if verified else {n for n in state["files"] if n.startswith(f"{STATE}/")}
    _check_content(folder, state, needed | {random_file(rank)})
    try:
        # Earlier versions wrote more.
        progress = Progress(**{field.name: state["progress"][field.name] for field in fields(Progress)})
        version, internal, gauss_next = state["python_random"]
        random.setstate((version, tuple(internal), gauss_next))
        checkpoint_state.restore_generators(folder / random_file(rank))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise unreadable(folder / "state.json", f"unexpected content: {error!r}") from error
    return progress


def recorded_ledger(folder: Path) -> Checksum | None:
    """Check a checkpoint's state.json and the sizes of its files; return the checksum of the ledger."""
    state = _read_state(folder)
    return Checksum(**state[LEDGER]) if state.get(LEDGER) else None


def verify(folder: Path, *, policy_only: bool = False) -> None:
    """Check that all files of a checkpoint, or the policy's, are unchanged."""
    state = _read_state(folder)
    trained = (f"{STATE}/", "random-") if policy_only else ()
    _check_content(folder, state, {name for name in state["files"] if not name.startswith(trained)})


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
    names = list(names)
    with ThreadPoolExecutor(HASHING_THREADS, "checksums") as pool:
        return dict(zip(names, pool.map(digest_of, (folder / name for name in names)), strict=True))


def _digest_of_state(state: dict[str, Any]) -> str:
    content = {key: value for key, value in state.items() if key != OWN_CHECKSUM}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _check_content(folder: Path, state: dict[str, Any], names: set[str]) -> None:
    try:
        found = _digests(folder, state[CHECKSUMS].keys() & names)
    except OSError as error:
        raise unreadable(folder, str(error)) from error
    for name, digest in found.items():
        if state[CHECKSUMS][name] != digest:
            raise unreadable(folder / name, CHANGED)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        state = read_json(path, remedy="")
        check_types(state, {"files": dict, "progress": dict, CHECKSUMS: dict, OWN_CHECKSUM: str})
        kinds = {"int": int, "str": str}
        check_types(state["progress"], {field.name: kinds[str(field.type)] for field in fields(Progress)})
        files = state["files"]
        check_types(files, dict.fromkeys(files, int))
        check_types(state.get(LEDGER) or {"bytes": 0, "sha256": ""}, {"bytes": int, "sha256": str})
    except (CheckpointError, ValueError) as error:
        raise unreadable(path, str(error)) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this asyncrl {__version__} reads {FORMAT}. "
            "Continue with the version that wrote it, or start afresh with --policy and this folder."
        )
    if state[CHECKSUMS].keys() != files.keys() or state[OWN_CHECKSUM] != _digest_of_state(state):
        raise unreadable(path, CHANGED)
    for name, size in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise unreadable(path, f"it names {name[:80]!r}, which does not lie in the folder")
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            seen = "is missing" if found is None else f"has {found} bytes"
            raise unreadable(folder / name, f"it {seen}, {size} were written")
    return state


# --- versions that an evaluator holds ---


def keep_copy(checkpoint: Path, target: Path) -> None:
    """Replace `target` by hard links to a checkpoint's files, or copies if links are not supported."""
    remove(target)
    try:
        for source in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            copy = target / source.relative_to(checkpoint)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, copy)
            except OSError:
                shutil.copyfile(source, copy)
        if not is_whole(target):  # It was being deleted, file by file.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(checkpoint))
    except BaseException:
        remove(target)
        raise


def clean_up(run_dir: Path) -> None:
    """Remove remains of a killed evaluator; the former best version is restored if there is no other."""
    folder = run_dir / FOLDER
    best, before = folder / BEST, folder / BEFORE
    if before.exists() and not best.exists():
        before.rename(best)
    for name in (HELD, BEFORE):
        remove(folder / name)


def forget_best_after(run_dir: Path, version: int) -> None:
    """Clean up, and remove the best version if a resumed run will make it again, or if it is invalid."""
    clean_up(run_dir)
    best = run_dir / FOLDER / BEST
    try:
        progress = load_json(best / "state.json").get("progress") or {}
        check_types(progress, {"version": int})
        keeps = progress["version"] <= version
    except (OSError, ValueError, TypeError):
        keeps = False
    if not keeps:
        remove(best)
