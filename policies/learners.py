"""The value learner, and both learners of a run."""

import os
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from policies.actor import Spec
from policies.backend import Array, Params, ValueNet, require_shape
from policies.data_parallel import ALONE, LearnerGroup, Part
from policies.forked import Forked
from policies.hyper import Hyper
from policies.learner import VALUE_STREAM, Learner, State, n_minibatches, shuffled, stream
from policies.rules import RULES, Policy

VAR_FLOOR = 1e-12  # constant targets have no variance to explain
STEPS_TO_FORK = 200  # least steps of a fit in a child: to fork, and to copy pages, takes as long as 100 of 125 rows


class ValueFunction(Learner):
    """Estimates the return that follows an observation."""

    net: ValueNet
    in_minibatches = True

    def fit(self, obs: Array, ret: Array, part: Part | None = None) -> dict[str, float]:
        """One fit on one batch. Collective, obs, part and raises: as Policy.update.

        Args: ret: float32 (N,), targets, as TD(lambda) returns.
        Returns: what to log: ExplainedVar (before the fit: 1 is perfect, 0 no better than a constant) and LossV (mean
            squared error on this batch after the fit, squared unit of the targets).
        """
        hyper, net = self.hyper, self.net
        part = Part.whole(len(obs)) if part is None else part
        with self.updating(part.total) as log:
            require_shape(ret, (len(part),))
            rows = net.rows(obs, ret)
            _, (error_std, ret_std) = self.moments(part, net.values(rows) - ret, ret)
            rng = stream(hyper.seed, VALUE_STREAM, self.updates)
            for _ in range(hyper.vf_epochs):
                self.descend(rows, shuffled(rng, part, n_minibatches(hyper, part.total)), hyper.vf_lr * self.lr_scale)
            (loss,) = self.means(part, [np.square(net.values(rows) - ret).sum(dtype=np.float64)])
            log |= {"ExplainedVar": 1.0 - error_std**2 / (ret_std**2 + VAR_FLOOR), "LossV": loss}
        return log


class Learners:
    """The policy's update and the value function's fit on one batch: on a core each, or one after the other.

    They share nothing, so the bits are the same either way. On small networks a second thread of one of them costs more
    than it gains, and with both in a thread each they wait for Python's lock: so the fit is made in a child of this
    process, where the backend allows that. If the child is killed, the fit is made here.
    """

    def __init__(
        self, backend: ModuleType, spec: Spec, params: Params, hyper: Hyper, threads: int = 1, device: str = "cpu",
        group: LearnerGroup = ALONE,
    ):  # fmt: skip
        """Copies the parameters.

        Args:
            backend: policies.numpy, policies.torch or policies.tf. params: as policies.actor.init_params returns them.
            threads: number of cores that an update may use. device: "cpu", "cuda", "cuda:0"; TensorFlow: "gpu:0" too.
        Raises: ValueError: the parameters do not fit `spec`. RuntimeError: there is no such device.
        """
        made = spec, params, hyper, threads, device
        self.policy: Policy = RULES[hyper.algo](backend.PolicyNet(*made), group)
        self.value = ValueFunction(backend.ValueNet(*made), group)
        may_fork = self.value.net.forks and threads > 1 and group.n_learners == 1 and len(os.sched_getaffinity(0)) > 1
        self._forked = Forked(3) if may_fork else None

    def learn(
        self, obs: Array, act: Array, adv: Array, ret: Array, part: Part | None = None, logp: Array | None = None
    ) -> dict[str, float]:
        """One update of each. Args and raises: as Policy.update and ValueFunction.fit. Returns: what both log."""
        n_rows, value = len(obs) if part is None else part.total, self.value
        threads = max(learner.n_threads(n_rows) for learner in (self.policy, value))
        steps = value.hyper.vf_epochs * n_minibatches(value.hyper, n_rows)
        if self._forked is None or threads > 1 or steps < STEPS_TO_FORK:
            return self.policy.update(obs, act, adv, part, logp) | value.fit(obs, ret, part)
        before, fitted = value.snapshot(), None
        self._forked.start(lambda: np.array([*value.fit(obs, ret).values(), value.net.steps], np.float64))
        try:
            log = self.policy.update(obs, act, adv, part, logp)
            fitted = self._forked.result()
        finally:
            if fitted is None:  # the child has changed the network's arrays, which they share, or some of them
                self._forked.result()
                value.restore(before)
        if fitted is None:
            return log | value.fit(obs, ret, part)
        value.updates, value.net.steps = value.updates + 1, int(fitted[2])
        return log | {"ExplainedVar": float(fitted[0]), "LossV": float(fitted[1])}

    @property
    def params(self) -> dict[str, Array]:
        """A copy of the parameters of both, named as by policies.actor.init_params."""
        policy, value = self.policy.net, self.value.net
        return policy.by_name(policy.vector()) | value.by_name(value.vector())

    def state(self) -> State:
        """Collective among the learners: as Learner.state."""
        (arrays, scalars), (more_arrays, more_scalars) = self.policy.state(), self.value.state()
        return arrays | more_arrays, scalars | more_scalars

    def load_state(self, arrays: Params, scalars: Mapping[str, float]) -> None:
        self.policy.load_state(arrays, scalars)
        self.value.load_state(arrays, scalars)
