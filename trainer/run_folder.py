"""The files of a run: weights, and checkpoints to resume from, each with a checksum of all its bytes; and whose it is.

Modules that the files of another user name are imported only if the user says that she trusts them.
"""

import contextlib
import hashlib
import hmac
import importlib.util
import itertools
import json
import os
import re
import secrets
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save

from mpi_util_spinup.files import read, replace_file

META = "mpi_util"  # the only key: the order of several would vary from one save to the next
POLICY, BEST, CHECKPOINT = "policy.safetensors", "best.safetensors", "checkpoint.safetensors"
# As it stands in the file's header, where the notes are a JSON string; it is computed with zeros in its own place.
CHECKSUM = re.compile(rb'(?<=\\"checksum\\": \\")[0-9a-f]{64}')
NO_CHECKSUM = b"0" * 64
SIGNATURE = "signature"  # a file; below, config is trainer.config.Config, which imports this module
MOST = 2**48  # of anything that is counted
NOT_NEGATIVE = re.compile(
    r"((asked|ready)/)?(iteration|episodes|steps|gamma|stop|evaluate|save|rew_scale|ep_len|(scaler|returns)/(?!mean|run_mean)\w+)"
    r"|(policy|value)/(adam/v|adam/steps|updates)|episodes/at|time|adv_std"
)
_HERE = Path.cwd()  # where the program begins; an environment may go to another folder
PATH = os.environ.get("PATH")  # of the shell; mpi_fork may add to it


class RunFolder:
    """A run's folder: its absolute `path`, and as it was `given`, for messages.

    Files are written under another name, synced, renamed: a crash leaves the last complete one. No link is followed.
    """

    def __init__(self, path: Path, new: bool):
        """Opens the folder, which is created if it is missing. Args: new: it must not hold a run yet.

        Raises: ValueError: one line: not writable, or it holds a run already.
        """
        self.given, self.path = path, from_start(path)
        try:
            holds_run = bool(checkpoints(self.path))
        except OSError as error:
            raise ValueError(f"cannot read the run folder {path}: {error.strerror}") from None
        if new and holds_run:
            raise ValueError(f"{path} holds a run already; give another folder, or --resume {path} to continue it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(bytes(4096))  # on a full disk a file of no bytes can still be made
        except OSError as error:
            raise ValueError(f"cannot write to the run folder {path}: {error.strerror}") from None

    @classmethod
    def default_path(cls, env: str, seed: int, name: str | None = None) -> Path:
        """runs/<env>/<name>-s<seed>; without a name its time, numbered where two runs start in one second."""
        folder = Path("runs") / env.replace("/", "-").replace(":", "-")
        if name:
            return folder / f"{name}-s{seed}"
        base = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-s{seed}"
        numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([base], numbered) if not from_start(path).exists())

    def save(self, name: str, arrays: dict[str, np.ndarray], notes: dict[str, Any], keep: int = 1) -> None:
        """Writes arrays, by name, and notes, in the header and as JSON, as one safetensors file.

        Args: keep: number of checkpoints to keep: this one, and those before it as checkpoint-1.safetensors, -2, ...
        """
        whole = {key: np.ascontiguousarray(arrays[key]) for key in sorted(arrays)}
        content = save(whole, {META: json.dumps(notes | {"checksum": NO_CHECKSUM.decode()}, sort_keys=True)})
        path = self.path / name
        kept = [path, *(path.with_stem(f"{path.stem}-{k}") for k in range(1, keep))]

        def write(file: IO[bytes]) -> None:
            file.write(CHECKSUM.sub(_checksum(content), content, 1))
            file.flush()
            os.fsync(file.fileno())  # on a full disk nothing is renamed
            is_file = path.is_file() and not path.is_symlink()
            if keep > 1 and is_file and _intact(read(path)):  # a damaged one pushes no good one out
                for newer, older in reversed(list(itertools.pairwise(kept[1:]))):
                    if newer.exists():
                        os.replace(newer, older)
                kept[1].unlink(missing_ok=True)
                try:
                    os.link(path, kept[1])  # and not renamed: at every moment there is one of this name
                except OSError:  # a file system without links
                    os.replace(path, kept[1])

        replace_file(path, write)
        for old in checkpoints(self.path) if name == CHECKPOINT else []:
            if old not in kept:
                old.unlink()


def from_start(path: str | Path) -> Path:
    """The path, absolute: a relative one is meant from the folder in which the program began."""
    return _HERE / path


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    found = [p for p in path.glob("checkpoint*.safetensors") if re.fullmatch(r"checkpoint(-\d+)?", p.stem)]
    return sorted(found, key=lambda p: (len(p.name), p.name))


def load_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], str, Path]:
    """The newest checkpoint in a run's folder that is not damaged.

    Returns: (arrays, notes, one line on those that are damaged, or "", its path). ValueError: one line: there is none.
    """
    damaged: list[str] = []
    for checkpoint in checkpoints(path) or [path / CHECKPOINT]:
        try:
            line = "; ".join([*damaged, f"resuming from {checkpoint.name}"] * bool(damaged))
            return *load(checkpoint), line, checkpoint
        except ValueError as error:
            damaged.append(str(error))
    raise ValueError("; ".join(damaged))


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and notes of a file that `RunFolder.save` wrote.

    Raises: ValueError: one line: the file is missing, damaged, not finite, out of range, or was not written by it.
    """
    try:
        content = read(path)
    except OSError as error:
        raise ValueError(f"cannot load {path}: {error.strerror}") from None
    try:
        if not _intact(content):
            raise ValueError
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        arrays, notes = load_arrays(content), json.loads(header["__metadata__"][META])
        del notes["checksum"]
        scalars = notes.get("scalars", {}) | {"test_ret": notes.get("test_ret", 0.0)}
        numbers = arrays | {name: np.array(value) for name, value in scalars.items()}
    except Exception:  # somebody may have computed the checksum of anything
        raise ValueError(f"cannot load {path}: it is damaged (wrong checksum), or not a file of train.py") from None
    for name, value in numbers.items():
        is_number = value.dtype.kind in "fiu" and not (name in scalars and value.ndim)
        if not is_number or (not np.isfinite(value).all() and name != "best"):  # which is -inf without an evaluation
            raise ValueError(f"cannot load {path}: {name} in it is not finite")
        if (NOT_NEGATIVE.fullmatch(name) and (value < 0).any()) or (value.dtype.kind != "f" and (value > MOST).any()):
            raise ValueError(f"cannot load {path}: {name} in it is out of range")
    return arrays, notes


def require_fitting(path: Path, arrays: dict[str, np.ndarray], likes: dict[str, np.ndarray]) -> None:
    """Raises ValueError: one line: an array is missing in a file, or of another dtype or shape than the one it is like.

    Args: likes: by name; those without rows stand for any number of them, which is the same for all of these.
    """
    rows: tuple[int, ...] = ()
    for name, like in likes.items():
        if name not in arrays:
            raise ValueError(f"cannot load {path}: it has no {name}")
        found, shape = arrays[name], like.shape
        if not like.size:
            rows = rows or found.shape[:1] or (0,)
            shape = rows + like.shape[1:]
        if (found.dtype, found.shape) != (like.dtype, shape):
            what = f"{found.dtype} of shape {found.shape}, not {like.dtype} of shape {shape}"
            raise ValueError(f"cannot load {path}: {name} in it is {what}")


def _intact(content: bytes) -> bool:
    found = CHECKSUM.search(content)
    return found is not None and found[0] == _checksum(content)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(CHECKSUM.sub(NO_CHECKSUM, content, 1)).hexdigest().encode()


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
        why = "others can write in that folder" if may_be_theirs else "no run of yours wrote that"
        raise ValueError(f"{path} would import {found}; {why}; if you trust it: --trust, trust=True")


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
            said = [folder.stat().st_ino, config.env, config.env_kwargs, config.env_wrappers, config.network]
            said += [config.hook] * bool(config.hook) + [config.env_command] * bool(config.env_command)
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
