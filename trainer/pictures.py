"""The learning curve and videos of a run, made by processes of their own: what fails there is nothing of the run."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mpi_util_spinup.files import regular

# Not -m, with which a file in the current folder could take the place of any module.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
CURVE, VIDEOS = "learning_curve.png", "videos"
CURVE_S, WAIT_S = 300.0, 30.0  # between two drawings of the curve; for what is under way when the run ends


class Pictures:
    """Draws, on rank 0; curve.log or video.log in the folder holds what such a process has printed if it has failed."""

    def __init__(self, folder: Path, video_every: int | None):
        """Args: video_every: steps from one video to the next; None: none."""
        self._folder, self._video_every = folder, video_every
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._curve_at, self._video_at = time.monotonic(), 0.0

    def after_checkpoint(self, steps: float) -> None:
        """Starts what is due. Args: steps: of the run, so far."""
        if time.monotonic() - self._curve_at > CURVE_S:
            self._draw_curve()
        if self._video_every and steps - self._video_at >= self._video_every:
            self._video_at = steps
            kind = "mp4" if importlib.util.find_spec("imageio_ffmpeg") else "gif"
            film = self._folder / VIDEOS / f"{steps:09.0f}.{kind}"
            with contextlib.suppress(OSError):
                film.parent.mkdir(exist_ok=True)
                self._start("video", "trainer.play", self._folder, "--last", "--trust", "--video", film)

    def end(self) -> dict[str, str]:
        """Draws the last curve, and waits for what is under way. Returns: names in the folder of curve and videos."""
        self._draw_curve()
        return {what: name for what, name in (("curve", CURVE), ("video", VIDEOS)) if self._succeeded(what)}

    def _draw_curve(self) -> None:
        self._curve_at = time.monotonic()
        rows = self._folder / "progress.txt"
        if not (rows.exists() and rows.stat().st_size) or os.environ.get("MPI_UTIL_CURVE") == "0":
            return
        if importlib.util.find_spec("matplotlib") is not None:
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

    def _succeeded(self, what: str) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyError):
            if self._running[what].wait(WAIT_S) == 0:
                (self._folder / f"{what}.log").unlink(missing_ok=True)
                return True
        return False
