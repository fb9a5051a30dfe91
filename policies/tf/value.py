"""The value learner: least squares on returns."""

import numpy as np

from policies.learners import finite_floats
from policies.minibatches import VALUE_STREAM, n_minibatches, shuffled, stream
from policies.share import ALONE, Part
from policies.tf.batches import own_copy
from policies.tf.learner import Learner
from policies.tf.setup import tf

VAR_FLOOR = 1e-12  # constant targets have no variance to explain


class ValueFunction(Learner):
    """Estimates the return that follows an observation."""

    def __init__(self, spec, params, config, threads=1, device="cpu", share=ALONE):
        """Copies the value function's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params returns.
            config: policies.hyper.Hyper.
            threads: cores that a fit may use.
            device: "cpu", or "gpu:0", "cuda" and so on.
            share: of the learners that share the batch, as policies.share.Alone.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
            RuntimeError: there is no such device.
        """
        hyper = config.resolve()
        obs = tf.TensorSpec((None, spec.obs_dim))
        signature = obs, tf.TensorSpec((None,))
        super().__init__("value", spec, params, hyper, threads, device, share, hyper.max_grad_norm, signature)
        self._predict = tf.function(self._predict, input_signature=[obs])
        self._obs_dim = spec.obs_dim
        self._last_obs = np.empty((0, spec.obs_dim), np.float32)
        self._last_ret = np.empty(0, np.float32)
        self._last_part = Part.whole(0)

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
        all_part = part.followed_by(self._last_part)
        n_parts = n_minibatches(hyper, all_part.total, self.share.n_learners)
        with self.updating(part.total):
            obs = own_copy(obs, (len(part), self._obs_dim), np.float32)
            ret = own_copy(ret, (len(part),), np.float32)
            self.require_finite(obs=obs, ret=ret)
            _, (error_std, ret_std) = self.moments(part, self._predict(obs).numpy() - ret, ret)
            data = obs, ret
            if hyper.vf_replay:
                data = np.concatenate((obs, self._last_obs)), np.concatenate((ret, self._last_ret))
            data = tuple(map(tf.constant, data))
            rng = stream(hyper.seed, VALUE_STREAM, self.updates)
            for _ in range(hyper.vf_epochs):
                self.descend(data, shuffled(rng, all_part, n_parts), hyper.vf_lr * self.lr_scale)
            (loss,) = self.means(part, np.square(self._predict(obs).numpy() - ret).sum())
            log = finite_floats({"ExplainedVar": 1.0 - error_std**2 / (ret_std**2 + VAR_FLOOR), "LossV": loss})
        if hyper.vf_replay:
            self._last_obs, self._last_ret, self._last_part = obs, ret, part
        logger.log(log)

    def loss(self, n, obs, ret):
        """See Learner: the squared errors, summed and divided by `n`."""
        return tf.reduce_sum(tf.square(self._predict(obs) - ret)) / n

    def _predict(self, obs):
        """Values. Args: obs: float32 (N, obs_dim). Returns: float32 (N,) tensor."""
        return self.net(obs)[:, 0]

    def state(self):
        """Collective among the learners: as Learner.state, with the whole batch to replay."""
        arrays, scalars = super().state()
        part, owner = self._last_part, np.full(len(self._last_part), self.share.index)
        arrays["value/last_obs"] = part.collect(self.share, self._last_obs)
        arrays["value/last_ret"] = part.collect(self.share, self._last_ret)
        arrays["value/last_owner"] = part.collect(self.share, owner)
        return arrays, scalars

    def load_state(self, arrays, scalars):
        """As Learner.load_state; each learner takes its rows of the batch to replay."""
        super().load_state(arrays, scalars)
        self._last_part = Part.of_owners(self.share, arrays["value/last_owner"])
        rows = self._last_part.rows
        self._last_obs, self._last_ret = arrays["value/last_obs"][rows], arrays["value/last_ret"][rows]
