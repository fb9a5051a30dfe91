"""Whose run folder it is: modules that another's names are imported only if the user says that she trusts it."""

import contextlib
import hmac
import importlib.util
import json
import os
import secrets
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mpi_util_spinup.files import read, replace_file

SIGNATURE = "signature"  # a file in a run folder; below, config is trainer.config.Config, which imports this module


def sign(folder: Path, config: Any) -> None:
    """Notes that a run of this user in this very folder imports modules. Raises OSError: it cannot be written."""
    if config.modules and not _is_own(folder, config):
        replace_file(folder / SIGNATURE, _signature(folder, config))


def require_trust(config: Any, path: Path, trust: bool) -> None:
    """Raises ValueError: one line: modules would be imported that no run of this user has named in the folder.

    Args: config: as in `path`, config.json or a file of weights, which is in a run folder.
    """
    if trust or not config.modules:
        return
    folder, places = path.parent.resolve(), {module: _place(module) for module in config.modules}
    others_write = folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022
    may_be_theirs = others_write and any(Path(place).resolve().is_relative_to(folder) for place in places.values())
    if may_be_theirs or not _is_own(folder, config):
        found = ", ".join(f"{module!r} from {place}" for module, place in places.items())
        raise ValueError(
            f"{path} would import {found}; no run of yours wrote that; if you trust it: --trust, trust=True"
        )


def _is_own(folder: Path, config: Any) -> bool:
    with contextlib.suppress(OSError):
        return read(folder / SIGNATURE) == (_signature(folder, config) or None)
    return False


def _signature(folder: Path, config: Any) -> bytes:
    """A moved folder keeps its inode, a copy has another. b"": the user has no place for a key that is hers alone."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        place = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "mpi_util"
        place.mkdir(0o700, parents=True, exist_ok=True)
        if place.stat().st_uid == os.geteuid() and not place.stat().st_mode & 0o077:
            with contextlib.suppress(FileExistsError):  # a link is there at once, with all its text
                os.symlink(secrets.token_hex(32), place / "run-folders")
            said = folder.stat().st_ino, config.env, config.env_kwargs, config.env_wrappers, config.network
            key = os.readlink(place / "run-folders")
            return hmac.new(key.encode(), json.dumps(said).encode(), "sha256").hexdigest().encode()
    return b""


def _place(module: str) -> str:
    """From where it would be imported, as far as that is known without importing anything."""
    with contextlib.suppress(ValueError, ImportError):
        top = module.partition(".")[0]
        if spec := importlib.util.find_spec(top) or PathFinder.find_spec(top, [""]):
            return spec.origin or next(iter(spec.submodule_search_locations or ()))
    return "nowhere"
