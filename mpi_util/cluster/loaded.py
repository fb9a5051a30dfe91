"""What code each host has loaded, which rank 0 compares. Runs in the leader of each machine."""

import contextlib
import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ..errors import RankMismatchError

_INSTALLED = re.compile("/(site|dist)-packages/")
_OF_PYTHON = os.path.dirname(os.__file__) + "/"  # its modules are of its version
_SHOWN = 5

# By the name of an installed package or another module: the host, and the package's version, or the digest of a file
Parts = dict[str, tuple[str, str]]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


class LoadedCode:
    """The code that this process has loaded, and on rank 0 which host was the first to have each part of it."""

    def __init__(self) -> None:
        self._n, self._known, self._first = 0, set[str](), Parts()

    def take(self) -> Parts:
        """What was loaded since the last call. Of a version without what follows "+": torch's for CPU and GPU agree."""
        if len(sys.modules) == self._n:
            return {}
        self._n, host = len(sys.modules), socket.gethostname()
        found = {"Python": (host, platform.python_version())}
        # without loading modules that are loaded when an attribute of theirs is read
        modules = [(name, module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)]
        of = {name: object.__getattribute__(module, "__dict__") for name, module in modules}
        for name in of.keys() - self._known:
            self._known.add(name)
            top, file = name.partition(".")[0], str(of[name].get("__file__") or "")
            version, installed = of.get(top, {}).get("__version__"), _INSTALLED.search(file)
            if not file or (top[0] == "_" if installed else file.startswith(_OF_PYTHON)):  # parts of an installation
                continue
            if installed and isinstance(version, str):
                found[top] = host, version.partition("+")[0]
            else:
                with contextlib.suppress(OSError):  # a part of an archive
                    found[name] = host, digest(Path(file).read_bytes())
        return found

    def compare(self, found: Iterable[Parts]) -> None:
        """Rank 0. Args: found: by each host. RankMismatchError: a part is not the same on all hosts that have it."""
        wrong = []
        for parts in found:
            for name, (host, what) in parts.items():
                first, there = self._first.setdefault(name, (host, what))
                if what != there:
                    wrong.append(f"{name} ({there} on {first}, {what} on {host})")
        if wrong:
            shown, fix = ", ".join(sorted(wrong)[:_SHOWN]), "give all hosts the same program and packages"
            raise RankMismatchError(f"hosts have loaded different code, {len(wrong)} in all: {shown}; {fix}")
