"""The files of a run: weights, and a checkpoint to resume from."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

META = "mpi_util"  # the only key: the order of several would vary from one save to the next


class RunFolder:
    """A run's folder. Files are written under another name, synced, renamed: a crash leaves the last complete one."""

    def __init__(self, path: Path, new: bool):
        """Opens the folder.

        Args:
            path: of the folder; created if it is missing.
            new: True: it must not hold a run yet. False: it must hold one, to resume.

        Raises:
            ValueError: one line: not writable, or it holds a run already, or none.
        """
        self.path = path
        holds_run = (path / "checkpoint.safetensors").exists()
        if new and holds_run:
            raise ValueError(f"{path} holds a run already; give another --run_dir, or --resume {path} to continue it")
        if not new and not holds_run:
            raise ValueError(f"{path} holds no checkpoint to resume from")
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"cannot write to the run folder {path}: {error.strerror}") from None

    @classmethod
    def default_path(cls, env: str, seed: int) -> Path:
        """runs/<env>/<time>-s<seed>, numbered where two runs start in one second."""
        base = Path("runs") / env.replace("/", "-").replace(":", "-") / f"{time.strftime('%Y%m%d-%H%M%S')}-s{seed}"
        number, path = 1, base
        while path.exists():
            number += 1
            path = base.with_name(f"{base.name}-{number}")
        return path

    def save(self, name: str, arrays: dict[str, np.ndarray], notes: dict[str, Any]) -> None:
        """Writes arrays and a description as one safetensors file.

        Args:
            arrays: by name.
            notes: what JSON can store; written to the file's header.
        """
        whole = {key: np.ascontiguousarray(arrays[key]) for key in sorted(arrays)}
        self._replace(name, save(whole, {META: json.dumps(notes, sort_keys=True)}))

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.new"
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        folder = os.open(self.path, os.O_RDONLY)
        os.fsync(folder)  # makes the renaming durable
        os.close(folder)


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and notes of a file that `RunFolder.save` wrote.

    Raises:
        ValueError: one line: the file is missing, damaged, not finite, or was not written by it.
    """
    try:
        with safe_open(path, "np") as file:
            notes = json.loads((file.metadata() or {})[META])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot load {path}: {' '.join(str(error).split())}") from None
    for name, value in (arrays | notes.get("scalars", {})).items():
        if not np.isfinite(value).all() and name != "best":  # which is -inf without an evaluation
            raise ValueError(f"cannot load {path}: {name} in it is not finite")
    return arrays, notes
