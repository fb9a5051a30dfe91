"""What code each host has loaded, which rank 0 compares. Runs in the leader of each machine."""

import contextlib
import platform
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..arrays.tree import digest
from ..errors import RankMismatchError

_INSTALLED = re.compile("/(site|dist)-packages/")
_OF_PYTHON = sys.stdlib_module_names | {"sitecustomize", "usercustomize"}
_SHOWN = 5


class Loaded(NamedTuple):
    """Of a host."""

    host: str
    parts: dict[str, str]  # installed package: its version; other module: a digest of its file


class LoadedCode:
    """The code that this process has loaded, and on rank 0 which host was the first to have each part of it."""

    def __init__(self) -> None:
        self._n, self._known = 0, set[str]()
        self._first: dict[str, tuple[str, str]] = {}

    def take(self) -> Loaded:
        """What was loaded since the last call.

        Without the part of a version after "+": the builds of torch for CPU and GPU are of the same code.
        """
        host, found = socket.gethostname(), dict[str, str]()
        if len(sys.modules) == self._n:
            return Loaded(host, found)
        self._n, found["Python"] = len(sys.modules), platform.python_version()
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            top, file = name.partition(".")[0], _attributes(name).get("__file__")
            version, installed = _attributes(top).get("__version__"), bool(_INSTALLED.search(file or ""))
            if not file or top in _OF_PYTHON or (installed and top[0] == "_"):  # the last: parts of an installation
                continue
            if installed and isinstance(version, str):
                found[top] = version.partition("+")[0]
            else:
                with contextlib.suppress(OSError):  # a part of an archive
                    found[name] = digest(Path(file).read_bytes()).hex()
        return Loaded(host, found)

    def compare(self, all_loaded: Iterable[Loaded]) -> None:
        """Rank 0. Args: of each host what it has taken. RankMismatchError: a part that another host has differently."""
        wrong = []
        for host, parts in all_loaded:
            for name, what in parts.items():
                first, there = self._first.setdefault(name, (host, what))
                if what != there:
                    wrong.append(f"{name} ({there} on {first}, {what} on {host})")
        if wrong:
            shown = ", ".join(sorted(wrong)[:_SHOWN]) + f" and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN)
            fix = "give all hosts the same program and packages"
            raise RankMismatchError(f"hosts have loaded different code: {shown}; {fix}")


def _attributes(name: str) -> dict[str, Any]:
    """Of a module; without loading it, where it is one that is loaded when it is used."""
    module = sys.modules.get(name)
    return object.__getattribute__(module, "__dict__") if isinstance(module, ModuleType) else {}
