"""Keep a checkpoint that would otherwise be deleted as newer ones come: by links to its files, or a copy."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

from asyncrl.storage.bounded_json import check_types, load_json
from asyncrl.storage.regular_files import make_folder, remove

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
