"""The learners of a run: one update per iteration, and when the run ends. No MPI here.

What an update changes goes into arrays of its own: `publish` copies them to those that are broadcast, when no rank
collects with these any more.
"""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.actor import Spec
from policies.data_parallel import LearnerGroup, Part
from policies.learner import State
from policies.learners import Learners
from policies.mlp import aligned
from policies.scaler import Scaler, scaler_for
from trainer.collect import NOTHING, RESULT, Pooled
from trainer.config import Config
from trainer.control import FAR, HORIZON, LAST, NEAR, STOP, BadData, Control
from trainer.display import COLUMNS
from trainer.rollout import QUIETLY, Episode, empty_batch
from trainer.run_folder import from_start, load_checkpoint, require_fitting

LASTS, LITTLE = 0.9, 0.3  # of the highest deviation of advantages: how much of its log stays; what counts as little


class Training:
    """Learns from each iteration's batch, and sets `control`: on rank 0 alone, or on every rank that learns."""

    def __init__(self, config: Config, spec: Spec, params: dict[str, np.ndarray], group: LearnerGroup):
        """Makes the learners, which divide the threads, and loads the checkpoint of a resumed run.

        Args: params: as policies.actor.init_params returns them; copied. group: the learners that share a batch.
        Raises: ValueError: one line: device or checkpoint cannot be used. ImportError: the framework is not installed.
        """
        self.config, self.spec, self.group = config, spec, group
        self.episodes: dict[str, np.ndarray] = {}  # of the resumed checkpoint, for SegmentCollector
        self.asked: dict[str, np.ndarray] = {}  # as of trainer.evaluator.Beside, which changes it; on rank 0
        self.scaler, self.returns = scaler_for(spec), Scaler(1, "returns")
        self.control = Control(config.gamma)
        # what is saved beside the learners, overwritten in place
        self.arrays = self.scaler.arrays | self.returns.arrays | self.control.arrays | {"adv_std": np.zeros(1)}
        self.ready = NOTHING  # the batch of the next update
        self._before: State | None = None
        backend = importlib.import_module(f"policies.{config.framework}")
        threads = max(1, config.threads // group.n_learners)
        try:
            self.learners = Learners(backend, spec, params, config, threads, config.device, group)
        except RuntimeError as error:
            raise ValueError(f"--device {config.device}: {str(error).splitlines()[0]}") from None
        self.resumed = self._load_checkpoint(from_start(config.resume)) if config.resume else {}

    def take(self, data: Pooled, rew_scale: np.ndarray) -> None:
        """Collective among the learners: the batch of the next update. Args: rew_scale: with which it was collected."""
        self.ready, control = data, self.control
        data.batch["rew_scale"] = rew_scale.copy()
        control.episodes += int(self.group.sum(np.array([len(data.batch["ep_ret"])], float))[0])
        self._set_last(control.steps + data.part.total)

    def _set_last(self, steps: int) -> None:
        """Sets `control.stop` where a limit is reached. Args: steps: collected so far."""
        limits = (self.control.episodes, self.config.num_episodes), (steps, self.config.total_steps)
        self.control.stop = LAST if any(limit is not None and n >= limit for n, limit in limits) else 0

    def learn(self) -> tuple[dict[str, float], Pooled]:
        """Collective among the learners: one update. Returns: their log and the batch; {} and NOTHING: none yet."""
        if self.ready.batch is None:
            return {}, NOTHING
        self._before = self.state() if self.config.overlap else None
        data, self.ready = self.ready, NOTHING
        batch, part, control = data.batch, data.part, self.control
        config, done = self.config, min(1.0, control.steps / (self.config.total_steps or math.inf))
        policy, value = self.learners.policy, self.learners.value
        policy.lr_scale = value.lr_scale = 1.0 - done if config.lr_schedule == "linear" else 1.0
        with QUIETLY():
            adv_std, ret_std = policy.moments(part, batch["adv"], batch["ret"])[1] / batch["rew_scale"]
            highest = np.fmax(adv_std, self.arrays["adv_std"] ** LASTS * adv_std ** (1.0 - LASTS))
        # errors of the values alone undo what a policy has learned; the first ten iterations hold little else
        are_errors = adv_std**2 > 2.0 * ret_std**2 and adv_std < LITTLE * highest
        if config.algo == "ppo" and are_errors and control.iteration >= 10 and not policy.hyper.ent_coef:
            policy.lr_scale = 0.0
        if config.std_fall and config.total_steps and not self.spec.discrete:
            # least: evenly, as states that are met no more are forgotten; most: in the last fifth: noise costs returns
            least, most = (np.float32(config.log_std - config.std_fall * x) for x in (done, max(0.0, 5.0 * done - 4.0)))
            policy.log_std_range = least, most
        raw = batch["obs"]
        try:
            obs = self.scaler.scale(raw, aligned(raw.shape))
            log = self.learners.learn(obs, batch["act"], batch["adv"], batch["ret"], part, batch.get("logp"))
            self.scaler.update(raw, self.group)  # after the update, which must see observations as the actors saw them
            if config.rew_scale == "returns":
                self.returns.update(batch["ret"][:, None] / batch["rew_scale"], self.group)
                control.rew_scale[:] = self.returns.arrays["returns/scale"]
        except FloatingPointError as error:
            raise BadData(f"iteration {control.iteration + 1}: {error}") from None
        self.arrays["adv_std"][:] = highest
        control.iteration += 1
        control.steps += part.total
        if config.gamma is None:  # where episodes end early, a far horizon makes mere survival pay
            n_short = self.group.sum(np.array([np.sum(batch["ep_len"] <= HORIZON)], float))[0]
            control.gamma[:] = NEAR if n_short or (control.iteration > 1 and control.gamma[0] == NEAR) else FAR
            if config.rew_scale == "gamma":
                control.rew_scale[:] = 1.0 - control.gamma
        log["Gamma"] = float(control.gamma[0])
        if every := self.config.eval_every:
            control.evaluate = control.stop == LAST or control.steps // every > (control.steps - part.total) // every
        return log, data

    def change(self, settings: dict[str, Any]) -> None:
        """Other settings from the next update on. Args: settings: of trainer.hook.SCHEDULED."""
        for learner in (self.learners.policy, self.learners.value):
            learner.hyper = learner.net.hyper = replace(self.config, **settings)

    def publish(self, weights: dict[str, np.ndarray]) -> None:
        """Ends an iteration. Args: weights: what is broadcast; overwritten in place."""
        self._before = None
        if self.control.stop == LAST and self.ready.batch is None:
            self.control.stop = STOP
        for name, array in (self.learners.params | self.scaler.arrays | self.control.arrays).items():
            weights[name][...] = array

    def state(self) -> State:
        """Collective among the learners: everything that the rest of the run depends on, (arrays, numbers).

        With `--overlap` it is that before the update of an iteration that was not published.
        """
        if self._before is not None:
            return self._before
        arrays, scalars = self.learners.state()
        arrays |= {name: array.copy() for name, array in self.arrays.items()}
        for part, more in (("ready", self.ready.batch or {}), ("asked", self.asked)):
            arrays |= {f"{part}/{name}": array for name, array in more.items()}
        return arrays, scalars

    def _load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restores the last checkpoint that is not damaged; returns what Record has kept in it."""
        arrays, notes, damaged, file = load_checkpoint(path)
        for name in [name for name in arrays if name.endswith("iteration")]:  # an older version had a fixed gamma
            arrays.setdefault(name.replace("iteration", "gamma"), self.control.gamma.copy())
        arrays.setdefault("adv_std", np.zeros(1))  # and did not keep this
        if Spec.from_dict(notes.get("spec", {})) != self.spec:
            raise ValueError(f"{path}: its checkpoint belongs to other networks or another environment")
        scalars = notes.setdefault("scalars", {})
        self._check(file, arrays, notes)
        self.learners.load_state(arrays, scalars)
        for name, array in self.arrays.items():
            array[:] = arrays[name]
        self.episodes = {name: array for name, array in arrays.items() if name.startswith("episodes/")}
        self.asked = {name[6:]: array for name, array in arrays.items() if name.startswith("asked/")}
        if ready := {name[6:]: array for name, array in arrays.items() if name.startswith("ready/")}:
            self.ready = Pooled(ready, Part.whole(len(ready["obs"])), ready["work"].sum(axis=0))
        self._set_last(self.control.steps + self.ready.part.total)
        row = notes["row"] if self.control.evaluate else []
        return scalars | {"row": row, "damaged": damaged, "hook": notes.get("hook", {})}

    def _check(self, file: Path, arrays: dict[str, np.ndarray], notes: dict[str, Any]) -> None:
        """Raises ValueError: one line: a checkpoint lacks something, or holds what cannot be of such a run."""
        (own, scalars), steps = self.state(), empty_batch(self.spec)
        others = {"rew_scale": np.empty(1), "seconds": np.empty(4)} | {name: steps.pop(name) for name in RESULT}
        steps |= {"logp": steps["adv"]} if self.config.overlap else {}
        episode = {name[9:]: like for name, like in Episode((0,)).pack(self.spec).items()}
        parts = [("", own), ("ready/", steps), *(("ready/", {name: like}) for name, like in others.items())]
        parts += [("episodes/", {name: np.repeat(like, self.config.num_envs, 0) for name, like in episode.items()})]
        parts += [("asked/", self.learners.params | self.scaler.arrays | self.control.arrays)]
        for part, likes in parts:
            if any(name.startswith(part) for name in arrays):
                require_fitting(file, arrays, {part + name: like for name, like in likes.items()})
        wrong = sorted(scalars.keys() - notes["scalars"])
        acts = [name for name in ("ready/act", "episodes/act") if name in arrays and self.spec.discrete]
        wrong += [name for name in acts if not np.isin(arrays[name], np.arange(self.spec.act_dim)).all()]
        if "episodes/at" in arrays and arrays["episodes/at"][:, 2].sum() != len(arrays["episodes/act"]):
            wrong += ["episodes/at"]
        try:
            if arrays["evaluate"][0]:  # the row will be shown again
                row = {name: value + 0 for name, value in notes["row"]}
                [format(row[name], how) for name, _, _, how in COLUMNS]
        except (TypeError, ValueError, KeyError, OverflowError):
            wrong += ["row"]
        if wrong:
            raise ValueError(f"cannot load {file}: {wrong[0]} in it is missing or out of range")
