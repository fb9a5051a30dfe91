"""What the learners of every framework have in common: checkpoints, the policy's update, both updates at once."""

import contextlib
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from policies.minibatches import POLICY_STREAM, VALUE_STREAM, n_minibatches, stream
from policies.share import ALONE, Part

VAR_FLOOR = 1e-12  # constant targets have no variance to explain


class BaseLearner:
    """Weights and checkpoints of a learner, whose framework provides `net` and `adam`.

    Attributes:
        net: Net. adam: Adam. hyper: resolved Hyper. spec: policies.actor.Spec. on_cpu: whether it learns there.
        threads: number of cores that an update may use.
        share: of the learners that share the batch, as policies.share.Alone.
        updates: number of updates so far; selects the random stream of the next one.
        lr_scale: factor of the step sizes, 0 to 1, set before an update.
    """

    name = ""  # of the network

    def __init__(self, spec, params, config, threads=1, device="cpu", share=ALONE):
        """Copies the network's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params returns.
            config: policies.hyper.Hyper.
            threads: cores that an update may use.
            device: "cpu", or "cuda", "cuda:0" and so on; TensorFlow: "gpu:0" too.
            share: of the learners that share the batch, as policies.share.Alone.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
            RuntimeError: there is no such device.
        """
        self.spec, self.hyper, self.threads, self.share = spec, config.resolve(), threads, share
        self.updates, self.lr_scale = 0, 1.0
        self.build(params, device)

    def build(self, params, device):
        """Makes `net`, `adam` and what else the framework needs. Args: as of the class."""
        raise NotImplementedError

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

    name = "policy"

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


class BaseValueFunction(BaseLearner):
    """Estimates the return that follows an observation, by least squares.

    A framework has: `data`, copies of the arrays as it uses them; `joined`, two such pairs in one; `errors` of the
    predictions; `descend_all`, all passes of Adam over the rows; `mean_square`, of the errors, over the whole batch.

    Attributes:
        last: (obs, ret) of the batch that the next fit replays. last_part: its policies.share.Part.
    """

    name = "value"

    def __init__(self, spec, *arguments, **more):
        super().__init__(spec, *arguments, **more)
        self.last = self.data(np.empty((0, spec.obs_dim)), np.empty(0), 0)
        self.last_part = Part.whole(0)

    def fit(self, obs, ret, logger, part=None):
        """One fit on one batch, and on the batch before it where the algorithm replays that.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            ret: float32 (N,), targets: discounted sums of rewards, or advantages plus values (TD(lambda) returns).
            logger: has ``log(dict)``. It gets LossV (mean squared error on this batch after the fit, squared unit of
                the targets) and ExplainedVar (before the fit: 1 is perfect, 0 no better than a constant).
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Raises:
            ValueError: an array has another shape than the above, or a minibatch fewer rows than there are learners.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        hyper = self.hyper
        part = Part.whole(len(obs)) if part is None else part
        all_part = part.followed_by(self.last_part)
        n_parts = n_minibatches(hyper, all_part.total, self.share.n_learners)
        with self.updating(part.total):
            obs, ret = self.data(obs, ret, len(part))
            self.require_finite(obs=obs, ret=ret)
            _, (error_std, ret_std) = self.moments(part, self.errors(obs, ret), ret)
            rows = self.joined((obs, ret), self.last) if hyper.vf_replay else (obs, ret)
            rng = stream(hyper.seed, VALUE_STREAM, self.updates)
            self.descend_all(rows, rng, all_part, n_parts, hyper.vf_lr * self.lr_scale)
            (loss,) = self.mean_square(part, self.errors(obs, ret))
            log = finite_floats({"ExplainedVar": 1.0 - error_std**2 / (ret_std**2 + VAR_FLOOR), "LossV": loss})
        if hyper.vf_replay:
            self.last, self.last_part = (obs, ret), part
        logger.log(log)

    def state(self):
        """Collective among the learners: as the base class, with the whole batch to replay."""
        arrays, scalars = super().state()
        owner = np.full(len(self.last_part), self.share.index)
        for name, rows in zip(("obs", "ret", "owner"), (*self.last, owner)):
            rows = rows.cpu().numpy() if hasattr(rows, "cpu") else rows
            arrays[f"value/last_{name}"] = self.last_part.collect(self.share, rows)
        return arrays, scalars

    def load_state(self, arrays, scalars):
        """As the base class; each learner takes its rows of the batch to replay."""
        super().load_state(arrays, scalars)
        self.last_part = Part.of_owners(self.share, arrays["value/last_owner"])
        obs, ret = (arrays[f"value/last_{name}"][self.last_part.rows] for name in ("obs", "ret"))
        self.last = self.data(obs, ret, len(self.last_part))


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
            with _often_switching():
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

    def at_once(self, n_rows):
        """Whether both run at the same time: where they may, on a core each. Args: n_rows: rows of the whole batch."""
        policy = self.policy
        free = policy.on_cpu and policy.threads > 1 and policy.share.n_learners == 1
        return free and self.n_threads(n_rows) == 1

    def n_threads(self, n_rows):
        """Most threads that either uses on its own. Args: n_rows: rows of the whole batch."""
        return max(learner.n_threads(n_rows) for learner in (self.policy, self.val_func))


@contextlib.contextmanager
def _often_switching():
    """Threads take turns more often: two learners hold Python's lock for short moments only, but wait 5 ms for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Log(dict):
    """A logger that keeps what it is given."""

    log = dict.update


def finite_floats(log):
    """Numbers and 0-d tensors of an update as Python floats. Raises FloatingPointError that names one not finite."""
    floats = {key: float(value) for key, value in log.items()}
    for key, value in floats.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"{key} is {value} after the update")
    return floats
