"""What rank 0 keeps of a run: checkpoints, the best policy, what is shown, and where the time goes. No MPI here."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.actor import Spec
from policies.config import Config
from policies.display import Display
from policies.run_folder import RunFolder

SAVE_EVERY_S = 30.0  # a crash costs at most this much work, and no bit of the result
PHASES = ("rollout", "gather", "update", "bcast")
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
        self.time_before, self.best = resumed.get("time", 0.0), resumed.get("best", -np.inf)
        self.began = self.saved_at = time.perf_counter()
        self.display = Display()

    def announce(self) -> None:
        """One line says what runs and where its results are. From then on the folder can be resumed from."""
        config, n = self.config, self.nworkers
        self.display.say(
            f"{config.env}: {config.algo}, seed {config.seed}, {n} process{'es' * (n > 1)}, "
            f"results in {self.folder.path}"
        )

    @property
    def settings(self) -> Config:
        """The configuration, for config.json."""
        return replace(self.config, resume=None)

    def times(self, n_steps: int, seconds: dict[str, float], busy_s: float) -> dict[str, float]:
        """The columns about time of an iteration.

        Args:
            n_steps: of all ranks.
            seconds: of its phases.
            busy_s: seconds of work in the rollouts, of all ranks together.
        """
        collecting = seconds["rollout"] + seconds["gather"]
        return {
            "Time": round(self._time(), 3),
            "StepsPerSecond": round(n_steps / max(sum(seconds[name] for name in PHASES), 1e-9), 1),
            **{f"{name.capitalize()}S": round(seconds[name], 6) for name in PHASES},
            "IdleShare": round(1.0 - busy_s / max(collecting * self.nworkers, 1e-9), 4),
        }

    def _time(self) -> float:
        return self.time_before + time.perf_counter() - self.began

    def tried(self, tests: dict[str, np.ndarray], policy: dict[str, np.ndarray]) -> None:
        """Keeps the policy that did best with its most likely actions in best.safetensors.

        Args:
            tests: ep_ret of the episodes, or {}: it was not tried. policy: weights and observation scale.
        """
        if tests and tests["ep_ret"].mean() > self.best:
            self.best = float(tests["ep_ret"].mean())
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
        self.display.say(f"{why}: {iterations} iterations, {steps:,} steps; weights in {weights}")
