"""Keep a checkpoint that would otherwise be deleted as newer ones come: by links to its files, or a copy.

Keep the best version of a run in `checkpoints/best`, and put away what a killed evaluator left.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Final

from asyncrl.storage.atomic import flush
from asyncrl.storage.untrusted import check_types, load_json, make_folder, remove

_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system answers that has no links."""


def keep_copy(checkpoint: Path, target: Path) -> None:
    """Give all files of a checkpoint another name below `target`, which is made anew.

    Files of a checkpoint are never changed once it is complete, so a link is as good as a copy and takes no
    space; where the file system has no links, the files are copied.

    Raises:
        FileNotFoundError: The checkpoint was deleted meanwhile. Nothing of `target` is left.
        OSError: A file cannot be written.
    """
    remove(target)
    try:
        for source in sorted(checkpoint.rglob("*")):
            copy = target / source.relative_to(checkpoint)
            if source.is_dir():
                make_folder(copy)
            else:
                make_folder(copy.parent)
                _link(source, copy)
        if not is_whole(target):  # It was being deleted, file by file.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(checkpoint))
    except BaseException:
        remove(target)
        raise


def is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are there, as long as its state.json says."""
    try:
        files = load_json(checkpoint / "state.json", dict).get("files")
        if not isinstance(files, dict) or not files:
            return False
        check_types(files, dict.fromkeys(files, int))
        return all((checkpoint / name).stat().st_size == nbytes for name, nbytes in files.items())
    except (OSError, ValueError):
        return False


def _link(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, copy)


FOLDER: Final = "checkpoints"
BEST: Final = "best"
"""The version that succeeded most often, the later one of two that are equal."""
HELD: Final = "evaluating"
"""The version that is being measured."""
BEFORE: Final = "best.before"
"""What `BEST` is called for the moment in which another one takes its place."""
LEFT_BY_EVALUATOR: Final = (HELD, BEFORE)
"""What a process that was killed may leave beside the checkpoints."""


def keep_as_best(held: Path) -> None:
    """Let what is held take the place of the best version; at any moment one of the two is there."""
    best, before = held.with_name(BEST), held.with_name(BEFORE)
    if best.exists():
        remove(before)
        best.rename(before)
    held.rename(best)
    flush(best.parent)
    remove(before)


def clean_up(run_dir: Path) -> None:
    """Put away what a process that was killed left; a best version that was being replaced is put back."""
    folder = run_dir / FOLDER
    best, before = folder / BEST, folder / BEFORE
    if before.exists() and not best.exists():
        before.rename(best)
    for name in LEFT_BY_EVALUATOR:
        remove(folder / name)


def forget_best_after(run_dir: Path, version: int) -> None:
    """Put away what was left, and the best version if a resumed run makes it anew."""
    clean_up(run_dir)
    best = run_dir / FOLDER / BEST
    if best.is_dir() and _version_of(best) > version:
        remove(best)


def _version_of(folder: Path) -> float:
    """Return the version of a checkpoint; infinite when it does not say."""
    try:
        found = load_json(folder / "state.json", dict)["progress"]["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    return found if isinstance(found, int) else math.inf
