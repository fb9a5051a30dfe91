"""Files and folders that are whole or not there: written under another name, synced, renamed."""

import fcntl
import os
import shutil
import time
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from mpi_util.errors import UsageError
from mpi_util.ranks.state import state

_RELEASED_S = 2.0  # after which the lock of a process that was killed is free


def replace_file(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Writes a file, or has `content` write it; whatever happens, `path` holds what it held or the new content."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)  # left by a crash, or by another user as a link to a file of ours
    try:
        with open(draft, "xb") as file:
            content(file) if callable(content) else file.write(content)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def publish(draft: Path, path: Path) -> None:
    """Gives a file that has been written its name, once it is on disk."""
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder; `path` never holds half of it. `fill` makes the folder that it is given, and all in it."""
    draft, old = (path.with_name(f".{path.name}.{kind}") for kind in ("new", "old"))
    for left in (draft, old):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    try:
        fill(draft)
        for folder, _, names in os.walk(draft):
            for name in names:
                sync(Path(folder, name))
        if path.exists():
            path.rename(old)
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_own(path: str) -> bytes:
    """The content of a file that no other user can have written (but root). PermissionError: one can."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to user {found.st_uid}, mode {found.st_mode & 0o777:o}: not read")
        return file.read()


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_npz(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays as NumPy's .npz, without pickle; any names, and the same bytes for the same arrays."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


class FolderLock:
    """A folder that this process alone writes, as long as the object lives; the kernel frees it however that ends.

    Several objects of one process may share it. Where the file system has no such locks, nothing is locked.
    """

    def __init__(self, path: Path):
        """BlockingIOError: another process has it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._end = weakref.finalize(self, os.close, fd)
        end = time.monotonic() + _RELEASED_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    self._end()
                    raise
                time.sleep(0.05)
                continue
            except OSError:  # NFS locks no folder
                pass
            return


class _Locks(weakref.WeakValueDictionary[tuple[int, int], FolderLock]):
    """Those of this process, by device and inode."""


def lock_folder(path: Path) -> FolderLock:
    """The lock of a folder, for as long as it is kept. UsageError: another process has it."""
    found = os.stat(path)
    held, key = state(_Locks), (found.st_dev, found.st_ino)
    lock = held.get(key)
    if lock is None:
        try:
            held[key] = lock = FolderLock(path)
        except BlockingIOError:
            raise UsageError(f"{path}: another run, which has not ended, writes to this folder") from None
    return lock
