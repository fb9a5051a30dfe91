"""Rows of progress.txt for other tools: progress.jsonl, and on request TensorBoard's files and Weights & Biases."""

import hashlib
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi_util_spinup.files import read, regular, replace_file
from trainer.config import Config

JSONL = "progress.jsonl"
NEEDED = ("tensorboard", "tensorboardX"), ("wandb", "wandb")  # options, and what they need


class Exports:
    """Takes each row, on rank 0. progress.txt is what counts: a row that one of these cannot take is left out."""

    def __init__(self, config: Config, folder: Path, rows: int):
        """Args: rows: to keep of an earlier start. Raises ValueError: one line: a package is not installed."""
        self._path, self._events, self._run = folder / JSONL, None, None
        tensorboard, wandb = (_module(option, module) if getattr(config, option) else None for option, module in NEEDED)
        kept = read(self._path).splitlines(keepends=True)[:rows] if rows and self._path.exists() else []
        replace_file(self._path, b"".join(kept))
        if tensorboard:
            self._events = tensorboard.SummaryWriter(str(folder))
        if wandb:
            key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # a resumed run is the same one there
            self._run = wandb.init(
                project="mpi_util", name=f"{config.env} {folder.name}", id=key, resume="allow", dir=str(folder),
                config=config.effective,
            )  # fmt: skip

    def earlier(self) -> Iterator[dict[str, Any]]:
        """The rows of earlier starts. Raises any exception: somebody has changed the file."""
        for line in read(self._path).splitlines():
            yield {name: math.nan if value is None else float(value) for name, value in json.loads(line).items()}

    def row(self, row: dict[str, Any]) -> None:
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        try:
            with open(self._path, "a", opener=regular) as file:
                file.write(json.dumps(dict.fromkeys(row) | finite) + "\n")
            for name, value in finite.items() if self._events else ():
                self._events.add_scalar(name, value, row["TotalEnvInteracts"])
            if self._run:
                self._run.log(finite, step=row["TotalEnvInteracts"])
        except OSError:  # which the logger reports, of progress.txt
            pass

    def close(self) -> None:
        if self._events:
            self._events.close()
        if self._run:
            self._run.finish()


def _module(option: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"--{option} needs {name}: pip install {name}") from None
