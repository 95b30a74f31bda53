"""Writing so that it is on the disk, not only on its way there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and force it to the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def start_writing(file: BinaryIO, start: int) -> int:
    """Have the kernel begin to write what stands in `file` from byte `start` on, so that forcing it to the disk later
    waits for less. Returns where that ends: the place that the file is at."""
    stop = file.tell()
    if hasattr(os, "posix_fadvise"):  # Linux starts with dirty pages where it is told that nobody needs them any more
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
    return stop


def sync_folder(path: Path) -> None:
    """Force a folder's entries (new, renamed and removed files) to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
