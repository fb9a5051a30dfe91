"""Which pickles loggers of this user have written, so that her own runs can be played without a question.

A pickle can run any code. Beside those of a run, own.json holds a code (HMAC-SHA256) of each, under a key that only
this user can read; so a file that came from elsewhere, or was changed since, is not taken for her own.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from pathlib import Path

from mpi_util.errors import UsageError

from .files import read_own, replace_file

CODES = "own.json"  # {path within the folder: code}


def note_own(folder: Path, name: str) -> None:
    """Notes that a logger of this user has just written this file. Without a home folder for the key: nothing."""
    with contextlib.suppress(OSError, RuntimeError):
        key = _key(make=True)
        known = _codes(folder) | {name: _code(key, (folder / name).read_bytes())}
        text = json.dumps({path: code.decode() for path, code in known.items()}, indent=1)
        replace_file(folder / CODES, text.encode())


def read_pickle(folder: Path, path: Path, trust: bool) -> bytes:
    """The content of a file of this folder. Raises UsageError: not trusted, and no logger of this user wrote it."""
    content = path.read_bytes()
    if trust:
        return content
    with contextlib.suppress(OSError, RuntimeError):
        if hmac.compare_digest(_codes(folder).get(str(path.relative_to(folder)), b""), _code(_key(), content)):
            return content
    raise UsageError(
        f"{path} is a pickle, which can run any code, and not known as written by a run of yours; if you trust it: "
        "trust=True, --trust"
    )


def _code(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).hexdigest().encode()


def _codes(folder: Path) -> dict[str, bytes]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / CODES).read_text())
        return {name: str(code).encode() for name, code in found.items()} if isinstance(found, dict) else {}
    return {}


def _key(make: bool = False) -> bytes:
    """This user's key. OSError: there is none, or others can read it, or it cannot be made."""
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "mpi_util", "key")
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, draft = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            os.write(fd, secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):  # another run made one at the same time
                os.link(draft, path)
        finally:
            os.close(fd)
            os.unlink(draft)
    return read_own(str(path))
