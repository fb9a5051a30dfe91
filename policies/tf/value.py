"""The value learner: least squares on returns."""

import numpy as np

from policies.learners import BaseValueFunction
from policies.minibatches import shuffled
from policies.tf.batches import own_copy
from policies.tf.learner import Learner
from policies.tf.setup import tf


class ValueFunction(BaseValueFunction, Learner):
    """See policies.learners.BaseValueFunction."""

    def build(self, params, device):
        """As Learner; compiles the predictions."""
        obs = tf.TensorSpec((None, self.spec.obs_dim))
        self.signature = obs, tf.TensorSpec((None,))
        super().build(params, device)
        self._predict = tf.function(lambda obs: self.net(obs)[:, 0], input_signature=[obs])

    def data(self, obs, ret, n):
        """Copies. Args: obs: (n, obs_dim). ret: (n,)."""
        return own_copy(obs, (n, self.spec.obs_dim), np.float32), own_copy(ret, (n,), np.float32)

    def joined(self, first, second):
        """The rows of both."""
        return tuple(map(np.concatenate, zip(first, second)))

    def errors(self, obs, ret):
        """Predictions less targets. Args: float32 (N, obs_dim), (N,) arrays. Returns: float32 (N,) array."""
        return self._predict(obs).numpy() - ret

    def descend_all(self, rows, rng, part, n_parts, lr):
        """As the base class has it."""
        rows = tuple(map(tf.constant, rows))
        for _ in range(self.hyper.vf_epochs):
            self.descend(rows, shuffled(rng, part, n_parts), lr)

    def mean_square(self, part, error):
        """As the base class has it."""
        return self.means(part, np.square(error).sum())

    def loss(self, n, obs, ret):
        """See Learner: the squared errors, summed and divided by `n`."""
        return tf.reduce_sum(tf.square(self._predict(obs) - ret)) / n
