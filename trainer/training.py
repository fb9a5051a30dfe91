"""The learners of a run: one update per iteration, and when the run stops. No MPI here."""

from pathlib import Path
from typing import Any

import numpy as np

from policies.actor import Spec
from policies.scaler import Scaler
from policies.share import Part
from trainer.config import Config
from trainer.control import Control, NotFinite
from trainer.run_folder import load_checkpoint

FRAMEWORKS = {"torch": "PyTorch", "tf": "TensorFlow"}  # the keys are also the names of the extras that install them


class Training:
    """Learns from each iteration's batch, and sets `control`: on rank 0 alone, or on every rank that learns.

    Attributes:
        control: what rank 0 broadcasts with the weights: whether to stop and to evaluate, and how far the run is.
        cost: of the last update: (number of optimizer steps, number of cores used).
        episodes: arrays of the resumed checkpoint for SegmentCollector; {}: none.
    """

    def __init__(
        self, config: Config, spec: Spec, params: dict, scaler: Scaler, control: Control, share: Any, threads: int
    ):
        """Makes the learners, and loads the checkpoint of a resumed run.

        Args:
            params: the actor's arrays; written in place after each update.
            share: of the learners that share a batch, as policies.share.Alone.
            threads: number of cores that the updates may use.

        Raises:
            ValueError: one line: the framework, the device or the checkpoint cannot be used.
        """
        self.config, self.spec, self.params, self.scaler, self.control = config, spec, params, scaler, control
        self.share, self.cost, self.episodes = share, (0, 1), {}
        self.returns = Scaler(1, "returns")
        learners = _framework(config.framework)
        try:
            made = (spec, params, config.hyper, threads, config.device, share)
            self.policy, self.val_func = learners.Policy(*made), learners.ValueFunction(*made)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {config.device}: {str(error).splitlines()[0]}") from None
        self.learners = learners.SideBySide(self.policy, self.val_func)
        self.resumed = self._load_checkpoint(Path(config.resume)) if config.resume else {}

    def learn(self, batch: dict[str, np.ndarray], part: Part) -> dict[str, float]:
        """One update of everything that is broadcast: `params`, `scaler` and `control`.

        Args:
            batch: as trainer.rollout.Runner's; of all ranks, or this learner's rows of it.
            part: which rows of the whole batch it has.

        Returns:
            What the learners log: dict of column to number.
        """
        falls = self.config.lr_schedule == "linear"
        for learner in (self.policy, self.val_func):
            learner.lr_scale = max(0.0, 1.0 - self.control.steps / self.config.total_steps) if falls else 1.0
        steps = self._steps()
        raw = batch["obs"]
        try:
            log = self.learners.learn(self.scaler.scale(raw), batch["act"], batch["adv"], batch["ret"], part)
            self.scaler.update(raw, self.share)  # after the update, which must see observations as the actors saw them
            if self.config.rew_scale == "returns":
                rew_scale = self.control.rew_scale
                self.returns.update(batch["ret"][:, None] / rew_scale, self.share)
                rew_scale[:] = self.returns.arrays["returns/scale"]
        except FloatingPointError as error:
            raise NotFinite(f"iteration {self.control.iteration + 1}: {error}") from None
        self.cost = self._steps() - steps, self.learners.width
        self.policy.weights(self.params)
        self.val_func.weights(self.params)
        self.control.iteration += 1
        self.control.steps += part.total
        self.control.episodes += int(self.share.sum(np.array([len(batch["ep_ret"])], float))[0])
        self._decide(part.total)
        return log

    def _steps(self) -> int:
        return self.policy.adam.steps + self.val_func.adam.steps

    def _decide(self, n_new: int = 0) -> None:
        """Sets `control`: stop at a limit; evaluate when due, and at the end. Args: n_new: steps of a new iteration."""
        config, control = self.config, self.control
        limits = (control.episodes, config.num_episodes), (control.steps, config.total_steps)
        control.stop = any(limit is not None and n >= limit for n, limit in limits)
        if n_new and (every := config.eval_every):
            control.evaluate = control.stop or control.steps // every > (control.steps - n_new) // every

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Collective among the learners: everything that the rest of the run depends on, (arrays, numbers)."""
        arrays, scalars = self.scaler.arrays | self.returns.arrays | self.control.arrays, {}
        for learner in (self.policy, self.val_func):
            more_arrays, more_scalars = learner.state()
            arrays, scalars = arrays | more_arrays, scalars | more_scalars
        return arrays, scalars

    def _load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restores the last checkpoint that is not damaged; returns what Record has kept in it."""
        arrays, notes, damaged = load_checkpoint(path)
        if Spec.from_dict(notes["spec"]) != self.spec:
            raise ValueError(f"{path}: its checkpoint belongs to other networks or another environment")
        try:
            for learner in (self.policy, self.val_func):
                learner.load_state(arrays, notes["scalars"])
                learner.weights(self.params)
            for name, array in (self.scaler.arrays | self.returns.arrays | self.control.arrays).items():
                array[:] = arrays[name]
        except KeyError as error:
            raise ValueError(f"{path}: its checkpoint has no {error}") from None
        self.episodes = {name: array for name, array in arrays.items() if name.startswith("episodes/")}
        self._decide()
        return notes["scalars"] | {"row": notes.get("row", []), "damaged": damaged}


def _framework(name: str) -> Any:
    """policies.pytorch or policies.tf, which only this function imports. Raises ValueError: it is not installed."""
    try:
        if name == "tf":
            from policies import tf as learners
        else:
            from policies import pytorch as learners
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tensorflow", "keras"):
            raise
        how = f"{FRAMEWORKS[name]}: pip install -e '.[{name}]'"
        raise ValueError(f"--framework {name} needs {how}") from None
    return learners
