"""Rank 0's side of a run: the learners, the run folder, what is shown. No MPI here."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.actor import Spec
from policies.config import Config
from policies.display import Display
from policies.run_folder import RunFolder, load
from policies.scaler import Scaler

SAVE_EVERY_S = 30.0  # a crash costs at most this much work, and no bit of the result
PHASES = ("rollout", "gather", "update", "bcast")
TEST_COLUMNS = ("AverageTestEpRet", "StdTestEpRet", "MinTestEpRet", "MaxTestEpRet", "TestEpLen")
TIME_COLUMNS = ("Time", "StepsPerSecond", "RolloutS", "GatherS", "UpdateS", "BcastS", "IdleShare")


class Training:
    """Learns from each iteration's batch, keeps the run folder, says when to stop.

    Attributes:
        control: arrays that travel to all ranks with the weights: stop (1 to end), evaluate (1 to try the policy after
            this iteration), iterations, episodes, steps so far.
    """

    def __init__(
        self, config: Config, spec: Spec, params: dict, scaler: Scaler, control: dict, nworkers: int, threads: int
    ):
        """Opens the run folder, and takes over its checkpoint if the run is resumed.

        Args:
            params: the actor's arrays; written in place after each update.
            nworkers: number of ranks.
            threads: cores that the updates may use.

        Raises:
            ValueError: one line: the folder, the device or the checkpoint cannot be used.
        """
        self.config, self.spec, self.params, self.scaler, self.control = config, spec, params, scaler, control
        self.nworkers = nworkers
        path = Path(config.resume or config.run_dir or RunFolder.default_path(config.env, config.seed))
        self.folder = RunFolder(path, new=not config.resume)
        try:
            from policies.pytorch import Policy, SideBySide, ValueFunction

            made = (spec, params, config.hyper, threads, config.device)
            self.policy, self.val_func = Policy(*made), ValueFunction(*made)
            self.learners = SideBySide(self.policy, self.val_func)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {config.device}: {str(error).splitlines()[0]}") from None
        self.time_before, self.row, self.best = 0.0, {}, -np.inf
        self.began = self.saved_at = time.perf_counter()
        if config.resume:
            self._load_checkpoint()
        self.folder.write_text("config.json", replace(config, resume=None).to_json())
        if not config.resume:
            self.save()
        self.display = Display()
        self.display.say(
            f"{config.env}: {config.algo}, seed {config.seed}, {nworkers} process{'es' * (nworkers > 1)}, "
            f"results in {path}"
        )

    def learn(self, batch: dict[str, np.ndarray], busy_wall_s: float) -> None:
        """One update from the batch of all ranks; then `params`, `scaler` and `control` are what all ranks get.

        Args:
            batch: as policies.rollout.Runner makes it, of all ranks.
            busy_wall_s: seconds that the ranks had for their rollouts.
        """
        raw = batch["observes"]
        observes = self.scaler.scale(raw)
        self.display.doing(f"iteration {self.iteration + 1}: updating on {len(raw)} steps")
        for learner in (self.policy, self.val_func):
            learner.lr_scale = self._lr_scale()
        log = self.learners.learn(observes, batch["actions"], batch["advantages"], batch["disc_sum_rew"])
        self.policy.weights(self.params)
        self.val_func.weights(self.params)
        self.scaler.update(raw)  # after the update, which must see observations as the actors saw them
        self.control["iteration"] += 1
        self.control["steps"] += len(raw)
        self.control["episodes"] += len(batch["ep_ret"])
        self.row = self._row(batch, log, busy_wall_s)
        self._decide(len(raw))

    def _lr_scale(self) -> float:
        """Factor of the step sizes in the update to come."""
        if self.config.lr_schedule == "constant":
            return 1.0
        return max(0.0, 1.0 - float(self.control["steps"][0]) / self.config.total_steps)

    def _decide(self, n_new: int = 0) -> None:
        """Sets `control`: stop if the run has had its episodes or its steps, evaluate when that is due or the last."""
        limits = {"episodes": self.config.num_episodes, "steps": self.config.total_steps}
        self.control["stop"][0] = any(n is not None and self.control[key][0] >= n for key, n in limits.items())
        if every := self.config.eval_every:
            steps = int(self.control["steps"][0])
            self.control["evaluate"][0] = steps // every > (steps - n_new) // every or self.control["stop"][0]

    def _row(self, batch: dict[str, np.ndarray], log: dict[str, float], busy_wall_s: float) -> dict[str, Any]:
        ep_ret, ep_len = batch["ep_ret"], batch["ep_len"]
        if not len(ep_ret):  # a segment may end no episode
            ep_ret = ep_len = np.array([np.nan])
        return {
            "Iteration": self.iteration,
            "Episodes": int(self.control["episodes"][0]),
            "TotalEnvInteracts": int(self.control["steps"][0]),
            "AverageEpRet": float(ep_ret.mean()),
            "StdEpRet": float(ep_ret.std()),
            "MinEpRet": float(ep_ret.min()),
            "MaxEpRet": float(ep_ret.max()),
            "EpLen": float(ep_len.mean()),
            **{key: log.pop(key) for key in ("KL", "Entropy", "LossPi", "LossV")},
            **log,
            "Steps": len(batch["observes"]),
            "IdleShare": 1.0 - float(batch["busy_s"].sum()) / max(busy_wall_s * self.nworkers, 1e-9),
        }

    def report(self, seconds: dict[str, float], tests: dict[str, np.ndarray] | None) -> None:
        """The row of the iteration that has just ended, to progress.txt and to the screen; now and then a checkpoint.

        Args:
            seconds: of the phases rollout, gather, update, bcast.
            tests: ep_ret, ep_len of the episodes with the most likely actions, if there were any.
        """
        if not self.row:
            return
        row, self.row = self.row, {}
        idle, steps = row.pop("IdleShare"), row.pop("Steps")
        if self.config.eval_every:
            row |= self._test(tests)
        row |= {
            "Time": round(self._time(), 3),
            "StepsPerSecond": round(steps / max(sum(seconds[name] for name in PHASES), 1e-9), 1),
            **{f"{name.capitalize()}S": round(seconds[name], 6) for name in PHASES},
            "IdleShare": round(idle, 4),
        }
        self.folder.add_row(row)
        self.display.row(row)
        self.display.doing(f"iteration {self.iteration + 1}: collecting")
        if time.perf_counter() - self.saved_at > SAVE_EVERY_S:
            self.save()

    def _test(self, tests: dict[str, np.ndarray] | None) -> dict[str, float]:
        """The columns of a trial. The policy that did best so far is kept in best.safetensors."""
        if not tests:  # none was due, or it was given up
            return dict.fromkeys(TEST_COLUMNS, math.nan)
        ret = tests["ep_ret"]
        if ret.mean() > self.best:
            self.best = float(ret.mean())
            self._save_policy("best.safetensors", test_ret=self.best)
        return dict(
            zip(TEST_COLUMNS, map(float, (ret.mean(), ret.std(), ret.min(), ret.max(), tests["ep_len"].mean())))
        )

    @property
    def iteration(self) -> int:
        """Iterations that are done."""
        return int(self.control["iteration"][0])

    def _time(self) -> float:
        return self.time_before + time.perf_counter() - self.began

    def save(self) -> None:
        """Writes the policy, and all that the rest of the run depends on."""
        self.folder.sync_progress()
        notes = self._save_policy("policy.safetensors")
        arrays, scalars = self.scaler.arrays | self.control, {"time": self._time(), "best": self.best}
        for learner in (self.policy, self.val_func):
            more_arrays, more_scalars = learner.state()
            arrays, scalars = arrays | more_arrays, scalars | more_scalars
        self.folder.save("checkpoint.safetensors", arrays, notes | {"scalars": scalars})
        self.saved_at = time.perf_counter()

    def _save_policy(self, name: str, **more: float) -> dict[str, Any]:
        """Writes what acting needs: weights and observation scale. Returns the notes that go with them."""
        notes = {"env": self.config.env, "env_kwargs": self.config.env_kwargs, "spec": self.spec.to_dict(), **more}
        self.folder.save(name, self.params | self.scaler.arrays, notes)
        return notes

    def _load_checkpoint(self) -> None:
        arrays, notes = load(self.folder.path / "checkpoint.safetensors")
        if Spec.from_dict(notes["spec"]) != self.spec:
            raise ValueError(f"{self.folder.path}: its checkpoint is of other networks or another environment")
        try:
            for learner in (self.policy, self.val_func):
                learner.load_state(arrays, notes["scalars"])
                learner.weights(self.params)
            for name, array in (self.scaler.arrays | self.control).items():
                array[:] = arrays[name]
        except KeyError as error:
            raise ValueError(f"{self.folder.path}: its checkpoint has no {error}") from None
        self._decide()
        self.time_before, self.best = notes["scalars"]["time"], notes["scalars"]["best"]
        self.folder.cut_progress(self.iteration)

    def finish(self, why: str) -> None:
        """The end: everything is saved, and one line says so."""
        self.save()
        self.display.close()
        self.display.say(
            f"{why}: {self.iteration} iterations, {int(self.control['steps'][0]):,} steps; "
            f"weights in {self.folder.path / 'policy.safetensors'}"
        )
