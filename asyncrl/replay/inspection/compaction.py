"""`asyncrl replay compact`: sealed groups in, the same groups with compressed images out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py

from asyncrl.errors import ReplayError
from asyncrl.replay.files.compression import Codec, codec_of, new_hdf5, settings_of
from asyncrl.replay.files.format import Shard, append_footer, check_whole, get_dataset
from asyncrl.replay.files.reader import read_group
from asyncrl.replay.inspection.choosing import OfReplay
from asyncrl.replay.inspection.fates import read_fates
from asyncrl.replay.inspection.pruning import locked
from asyncrl.replay.inspection.tables import watched
from asyncrl.replay.reading import shard_or_none, warn
from asyncrl.replay.store import PATTERN, sync

IMAGES: Final = ("frames", "final_frame", "video")
PER_CHUNK: Final = 8
"""Images in a chunk: neighbours resemble each other, so with fewer the file would be larger."""


@dataclass(frozen=True, kw_only=True)
class Compact(OfReplay):
    """Compress the images of groups that were used, filtered or dropped. Refuses on a live run."""

    codec: Codec = "gzip"
    """Every HDF5 tool reads gzip; the others are faster, and need the extra `compression` also to be read."""
    all: bool = False
    """Also groups that wait: for a run that is over. A resume reads them all the same, only slower."""
    dry_run: bool = False
    """Only say what would be compressed."""

    def run(self) -> int:
        """Rewrite one file after the other and say what it saves; 1 when a file could not be read."""
        folder, settings = self.folder, settings_of(self.codec)
        with nullcontext() if self.dry_run else locked(folder):
            paths = sorted(folder.glob(PATTERN))
            chosen, unreadable = self._choose(folder, paths)
            before = sum(shard.size for shard in chosen)
            verb, after = "would compress", ""
            if not self.dry_run:
                done = [compact(x.path, settings) for x in watched(chosen, "compressing")]
                unreadable += done.count(None)
                before = sum(x.size for x, size in zip(chosen, done, strict=True) if size is not None)
                verb, after = "compressed", f" to {sum(size or 0 for size in done) / 1e6:.2f} MB"
        print(
            f"{verb} {len(chosen)} of {len(paths)} groups with {self.codec}: {before / 1e6:.2f} MB{after}; "
            f"the others still wait, are compressed already or cannot be read ({unreadable})"
        )
        return 1 if unreadable else 0

    def _choose(self, folder: Path, paths: list[Path]) -> tuple[list[Shard], int]:
        """The groups to compress, and how many files could not be read."""
        fates, chosen, unreadable = read_fates(folder, warn), list[Shard](), 0
        for path in watched(paths, "reading groups"):
            shard = shard_or_none(path)
            if shard is None:
                unreadable += path.exists()
            elif (self.all or fates.of(shard.number) != "unused") and codec_in(path) != self.codec:
                chosen.append(shard)
        return chosen, unreadable


def codec_in(path: Path) -> Codec | None:
    """The codec of a sealed file's images; None when they are not compressed.

    Raises:
        ReplayError: It is damaged.
    """
    check_whole(path)
    with h5py.File(path, "r") as file:
        return next((codec for name in IMAGES if (codec := codec_of(get_dataset(file, name)))), None)


def compact(path: Path, settings: dict[str, Any]) -> int | None:
    """Compress the images of a sealed file durably; at any moment its name leads to a whole file.

    Args:
        path: A sealed file, written by nobody else.
        settings: See `codecs.settings_of`.

    Returns:
        Bytes of the new file; None when the old one is damaged, which is reported and left as it is.

    Raises:
        ReplayError: The disk does not take it. The old file is as it was.
    """
    temporary = path.with_suffix(".h5.tmp")
    try:
        read_group(path)
        temporary.unlink(missing_ok=True)  # Of an earlier attempt that was killed.
        with h5py.File(path, "r") as old, new_hdf5(temporary) as new:
            _copy(old, new, settings)
        append_footer(temporary)
        read_group(temporary)  # Its checksums are those of the old file.
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
        return path.stat().st_size
    except ReplayError as error:
        warn(f"warning: {error}")
        return None
    except (OSError, RuntimeError) as error:
        raise ReplayError(
            f"{path.name} could not be compressed: {error}. Free disk space; what was compressed stays so."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _copy(old: h5py.File, new: h5py.File, settings: dict[str, Any]) -> None:
    """Copy everything; the images compressed."""
    for name, value in old.attrs.items():
        new.attrs[name] = value
    for name in map(str, old):
        dataset = get_dataset(old, name)
        if name in IMAGES and dataset.size:
            values, chunks = dataset[...], (min(PER_CHUNK, len(dataset)), *dataset.shape[1:])
            packed = new.create_dataset(name, data=values, chunks=chunks, track_times=False, **settings)
            for key, value in dataset.attrs.items():
                packed.attrs[key] = value
        else:
            old.copy(dataset, new, name)
