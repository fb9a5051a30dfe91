"""What the learners of every framework have in common: checkpoints, the policy's update, both updates at once."""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from policies.minibatches import POLICY_STREAM, stream
from policies.share import Part


class BaseLearner:
    """Weights and checkpoints of a learner, whose framework provides `net` and `adam`.

    Attributes:
        net: Net. adam: Adam. hyper: resolved Hyper.
        threads: number of cores that an update may use.
        share: of the learners that share the batch, as policies.share.Alone.
        updates: number of updates so far; selects the random stream of the next one.
        lr_scale: factor of the step sizes, 0 to 1, set before an update.
    """

    def __init__(self, hyper, threads, share):
        self.hyper, self.threads, self.share = hyper, threads, share
        self.updates, self.lr_scale = 0, 1.0

    def require_finite(self, **arrays):
        """Raises FloatingPointError on every learner that names those of the arrays that are not finite on any."""
        with np.errstate(over="ignore", invalid="ignore"):
            sums = self.share.sum(np.array([float(x.sum()) for x in arrays.values()]))
        if bad := [name for name, finite in zip(arrays, np.isfinite(sums)) if not finite]:
            raise FloatingPointError(f"a number in the batch is not finite: of {', '.join(bad)}")

    def weights(self, out):
        """Copies the network's parameters out.

        Args:
            out: dict of str to float32 array with at least the names of policies.actor.init_params for this network;
                the arrays are overwritten in place.
        """
        self.net.copy_to(out)

    def state(self):
        """Everything that later updates depend on, so that a resumed run has the same bits.

        Returns:
            (arrays, scalars): dict of str to array, with the parameters under the actor's names, and dict of str to
            number, the same for every framework. All names begin with the network's name, so those of two learners can
            share a dict.
        """
        name, (m, v) = self.net.name, self.adam.moments()
        arrays = self.net.arrays() | {f"{name}/adam/m": m, f"{name}/adam/v": v}
        return arrays, {f"{name}/adam/steps": self.adam.steps, f"{name}/updates": self.updates}

    def load_state(self, arrays, scalars):
        """Restores what `state` returned; other names in the dicts are ignored.

        Args:
            arrays, scalars: as `state` returned them, from a learner of the same Spec.

        Raises:
            ValueError: the parameters do not fit this network.
            KeyError: a name is missing.
        """
        name = self.net.name
        self.net.load(arrays)
        self.adam.load(arrays[f"{name}/adam/m"], arrays[f"{name}/adam/v"], int(scalars[f"{name}/adam/steps"]))
        self.updates = int(scalars[f"{name}/updates"])


class BasePolicy(BaseLearner):
    """A policy's update by its `rule`, a policies.rules.UpdateRule."""

    def update(self, obs, act, adv, logger, part=None):
        """One update by the rule on one batch; old log-probabilities are those of the current weights.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            act: Box: float32 (N, act_dim), as the actor drew them. Discrete: integers (N,).
            adv: float32 (N,), any unit; normalised here.
            logger: has ``log(dict)``. It gets KL (mean KL(old || new), nats), Entropy (nats), LossPi (surrogate loss
                after the update, in standard deviations of the advantage) and the rule's own numbers.
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Raises:
            ValueError: an array has another shape than the above, or a minibatch fewer rows than there are learners.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        part = Part.whole(len(obs)) if part is None else part
        with self.updating(part.total):
            batch = self.batch(obs, act, adv, part)
            result, rule_log = self.rule.update(self, batch, stream(self.hyper.seed, POLICY_STREAM, self.updates))
            log = finite_floats(dict(zip(("KL", "Entropy", "LossPi"), self.summary(batch, result))) | rule_log)
        self.rule.adapt(log["KL"])
        logger.log(log)

    def state(self):
        """As the base class, with the rule's state."""
        arrays, scalars = super().state()
        return arrays, scalars | {f"policy/{key}": value for key, value in self.rule.state().items()}

    def load_state(self, arrays, scalars):
        """As the base class, with the rule's state."""
        super().load_state(arrays, scalars)
        self.rule.load_state({key: scalars[f"policy/{key}"] for key in self.rule.state()})


class SideBySide:
    """Runs the policy's update and the value function's fit on one batch, at the same time where that is faster.

    They share nothing, so the bits are the same either way. Small networks keep one core busy each: two threads on one
    small product cost more than they gain, two learners on two cores do not (275 ms became 212 ms for 2x64 networks,
    49 ms became 32 ms for an early ppo-kl update). Learners that use several threads each, or a GPU, or that share
    their batch with other processes, run one after the other: the sums over processes must come in one order.

    Attributes:
        width: number of cores that the last update used.
    """

    def __init__(self, policy, val_func, **thread):
        """Args: policy: Policy. val_func: ValueFunction. thread: how the second thread starts, for its executor."""
        self.policy, self.val_func = policy, val_func
        self._second = ThreadPoolExecutor(1, **thread)

    def learn(self, obs, act, adv, ret, part=None):
        """One update of each.

        Args:
            obs, act, adv: as Policy.update takes them. ret: as ValueFunction.fit takes it.
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Returns:
            dict of str to float: what both log, the policy first.

        Raises:
            FloatingPointError, ValueError: as the learners raise them.
        """
        policy_log, value_log = Log(), Log()
        n_rows = len(obs) if part is None else part.total
        if self.at_once(n_rows):
            self.width = 2
            with self.both_running():
                fitted = self._second.submit(self.val_func.fit, obs, ret, value_log, part)
                try:
                    self.policy.update(obs, act, adv, policy_log, part)
                finally:
                    fitted.exception()  # waits for it
                fitted.result()
        else:
            self.width = self.n_threads(n_rows)
            self.policy.update(obs, act, adv, policy_log, part)
            self.val_func.fit(obs, ret, value_log, part)
        return {**policy_log, **value_log}

    def both_running(self):
        """Context manager for the time in which both run."""
        return contextlib.nullcontext()

    def at_once(self, n_rows):
        """Whether both run at the same time. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError

    def n_threads(self, n_rows):
        """Most threads that either uses on its own. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError


class Log(dict):
    """A logger that keeps what it is given."""

    log = dict.update


def finite_floats(log):
    """Numbers of an update as Python floats.

    Args:
        log: dict of str to number or 0-d tensor.

    Returns:
        dict of str to float.

    Raises:
        FloatingPointError: one of them is not finite; the line names it.
    """
    floats = {key: float(value) for key, value in log.items()}
    for key, value in floats.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"{key} is {value} after the update")
    return floats
