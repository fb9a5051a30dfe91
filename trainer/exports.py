"""Rows of progress.txt for others: progress.jsonl, on request TensorBoard's files and Weights & Biases, and the
learning curve; and videos. What draws is a process of its own: what fails there is nothing of the run."""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mpi_util_spinup.files import read, regular, replace_file
from trainer.config import Config

# Not -m, with which a file in the current folder could take the place of any module.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
ROW = re.compile(rb'\{"Iteration": (\d{1,18}),(?!.*\{"Iteration": ).*\}\n')  # of progress.jsonl, and whole
CURVE, VIDEOS = "learning_curve.png", "videos"
CURVE_S, WAIT_S = 300.0, 30.0  # between two drawings of the curve; for what is under way when the run ends


class Exports:
    """Takes each row. progress.txt is what counts: a row that one of these cannot take is left out.

    curve.log or video.log in the folder holds what a process has printed if it has failed.
    """

    def __init__(self, config: Config, folder: Path, rows: int):
        """Args: rows: to keep of an earlier start."""
        self._folder, self._path, self._events, self._run = folder, folder / "progress.jsonl", None, None
        self._video_every, self._curve_at, self.steps = config.video_every, time.monotonic(), 0.0  # of the last row
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        lines = read(self._path).splitlines(keepends=True) if rows and self._path.exists() else []
        self.kept = [line for line in lines if (found := ROW.fullmatch(line)) and int(found[1]) <= rows]
        replace_file(self._path, b"".join(self.kept))
        if config.tensorboard:
            self._events = importlib.import_module("tensorboardX").SummaryWriter(str(folder))
        if config.wandb:
            key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # a resumed run is the same one there
            self._run = _wandb(
                "init", project="mpi_util", name=f"{config.env} {folder.name}", id=key, resume="allow", dir=str(folder),
                config=config.effective,
            )  # fmt: skip

    def row(self, row: dict[str, Any]) -> None:
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        with contextlib.suppress(OSError):  # which the logger reports, of progress.txt
            with open(self._path, "ab", 0, opener=regular) as file:
                line, end = f"{json.dumps(dict.fromkeys(row) | finite)}\n".encode(), file.tell()
                if file.write(line) < len(line):  # the disk is full
                    file.truncate(end)
            for name, value in finite.items() if self._events else ():
                self._events.add_scalar(name, value, row["TotalEnvInteracts"])
            if self._run:
                self._run.log(finite, step=row["TotalEnvInteracts"])

    def after_checkpoint(self, steps: float) -> None:
        """Starts what is due. Args: steps: of the run, so far."""
        if time.monotonic() - self._curve_at > CURVE_S:
            self._draw_curve()
        before, self.steps = self.steps, steps
        if (every := self._video_every) and steps // every > before // every:
            kind = "mp4" if importlib.util.find_spec("imageio_ffmpeg") else "gif"
            film = self._folder / VIDEOS / f"{steps:09.0f}.{kind}"
            with contextlib.suppress(OSError):
                film.parent.mkdir(exist_ok=True)
                os.close(os.open(film.parent, os.O_DIRECTORY | os.O_NOFOLLOW))  # no link
                self._start("video", "trainer.play", "--watch", self._folder, "--last", "--trust", "--video", film)

    def end(self) -> dict[str, str]:
        """Ends all, after a last curve, and waits for it. Returns: {"curve", "video": its name in the folder}, without
        what has failed; " (not ready yet)" follows the name of what is still being made."""
        if self._events:
            self._events.close()
        if self._run:
            self._run.finish()
        self._draw_curve()
        made = {"curve": CURVE, "video": VIDEOS}
        return {what: made[what] + state for what in made if (state := self._state(what)) is not None}

    def _draw_curve(self) -> None:
        self._curve_at = time.monotonic()
        rows = self._folder / "progress.txt"
        may_draw = os.environ.get("MPI_UTIL_CURVE") != "0" and importlib.util.find_spec("matplotlib")
        if may_draw and rows.exists() and rows.stat().st_size:
            self._start("curve", "mpi_util_spinup.plot", self._folder, "--out", self._folder / CURVE)

    def _start(self, what: str, module: str, *arguments: Any) -> None:
        if what in self._running and self._running[what].poll() is None:
            return  # the last one is not ready yet
        path = os.pathsep.join(filter(None, sys.path))
        with contextlib.suppress(OSError), open(self._folder / f"{what}.log", "wb", opener=regular) as log:
            self._running[what] = subprocess.Popen(  # noqa: S603  # this interpreter
                [sys.executable, "-c", START, module, *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _state(self, what: str) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if what not in self._running or self._running[what].wait(WAIT_S):
                return None
            (self._folder / f"{what}.log").unlink(missing_ok=True)
            return ""
        return " (not ready yet)"


def require_packages(config: Config) -> None:
    """Raises ValueError: one line: a package is not installed that a setting needs, or W&B refuses to log in."""
    for option, package in ("tensorboard", "tensorboardX"), ("wandb", "wandb"):
        if getattr(config, option) and not getattr(importlib.util.find_spec(package), "origin", None):  # or a folder
            raise ValueError(f"--{option} needs {package}: pip install {package}")
    if config.wandb:
        _wandb("login")


def _wandb(function: str, **given: Any) -> Any:
    try:
        return getattr(importlib.import_module("wandb"), function)(**given)
    except Exception as error:  # of theirs: no key, no network, ...
        raise ValueError(f"--wandb: {' '.join(str(error).split())} (WANDB_MODE=offline needs no login)") from None
