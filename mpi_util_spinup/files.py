"""Files and folders that are never half written, in any process: written under another name, synced, renamed."""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mpi_util.errors import UsageError

_RELEASED_S = 2.0  # after which the lock of a process that was killed is free


def replace_file(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Writes a file, or has `content` write it. Whatever happens, `path` holds its old content or the new one."""
    with draft_folder(path) as drafts:
        with open(drafts / path.name, "xb") as file:
            content(file) if callable(content) else file.write(content)
        publish(drafts / path.name, path)


@contextlib.contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, for what is to be renamed to it; of a name that no one can know before."""
    os.scandir(path.parent).close()  # an error names it, and not the draft
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    drafts = Path(tempfile.mkdtemp(".new", f".{path.name}.", path.parent))
    try:
        yield drafts
    finally:  # not by TemporaryDirectory, which also removes it at the end of a process that was forked meanwhile
        shutil.rmtree(drafts, ignore_errors=True)


def publish(draft: Path, path: Path) -> None:
    """Gives a file that has been written its name, once it is on disk."""
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder, all of it or nothing. Args: fill: makes the folder that it is given, and all files in it."""
    with draft_folder(path) as drafts:
        fill(drafts / path.name)
        for folder, _, names in os.walk(drafts):
            for name in names:
                sync(Path(folder, name))
        if path.exists():
            path.rename(drafts / "old")
        (drafts / path.name).rename(path)
    sync(path.parent)


def regular(path: str, flags: int) -> int:
    """Opens a regular file, as in `open(path, mode, opener=regular)`. OSError, at once: it is a link, a FIFO, ..."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read(path: Path, own: bool = False) -> bytes:
    """The content of a regular file. Raises OSError: as `regular`; own: another user but root can have written it."""
    with open(path, "rb", opener=regular) as file:
        found = os.fstat(file.fileno())
        if own and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
            raise PermissionError(f"{path} belongs to user {found.st_uid}, mode {found.st_mode & 0o777:o}: not read")
        return file.read()


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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
    key = (found := os.stat(path)).st_dev, found.st_ino
    lock = _held[key] = _held.get(key) or FolderLock(path)
    return lock
