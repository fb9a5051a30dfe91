"""Files and folders that are never half written, in any process: written under another name, synced, renamed."""

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mpi_util.errors import UsageError

_RELEASED_S = 2.0  # after which the lock of a process that was killed is free


def replace_file(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Writes a file, or has `content` write it. Whatever happens, `path` holds its old content or the new one."""
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
    """Writes a folder, all of it or nothing. Args: fill: makes the folder that it is given, and all files in it."""
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
    """The content of a file that no other user but root can have written. Raises PermissionError: one can."""
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


class FolderLock:
    """A folder that this process alone writes, until the object is gone; the kernel frees it even after SIGKILL."""

    def __init__(self, path: Path):
        """Raises UsageError: another process has it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        end = time.monotonic() + _RELEASED_S
        while time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # NFS, which locks no folder: nothing is locked
                return
        raise UsageError(f"{path}: another run, which has not ended, writes to this folder")


_held = weakref.WeakValueDictionary[tuple[int, int], FolderLock]()  # the locks of this process, by device and inode


def lock_folder(path: Path) -> FolderLock:
    """Keeps other processes from writing to a folder while the result lives; this process's loggers share it.

    Call it on rank 0 before you read what an earlier run has saved there. Raises UsageError: another process has it.
    """
    found = os.stat(path)
    key = found.st_dev, found.st_ino
    lock = _held[key] = _held.get(key) or FolderLock(path)
    return lock
