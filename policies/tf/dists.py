"""Action distributions over the policy network's outputs.

Both classes have the same methods. A batch of distributions is a tuple of tensors:

- ``of(out, net)``: the distributions over a network's outputs
- ``logp(dist, act)``: log-probability of each action, nats, float32 (N,)
- ``entropy(dist)``: nats, float32 (N,)
- ``kl(old, new)``: KL(old || new), nats, float32 (N,)
- ``fisher(dist, d_out, d_log_std, n)``: the Fisher matrix, the second derivative of ``kl``, times a direction:
  ``d_out`` (N, act_dim) in the outputs, ``d_log_std`` (act_dim,) in a Gaussian's log deviations. The rows are divided
  by ``n``. Returns a tuple like `dist`
- ``signature``: tf.TensorSpecs of such a tuple
"""

import math

from policies.tf.setup import tf

LOG_2PI = math.log(2.0 * math.pi)


class Gaussian:
    """Independent normal distributions, (means (N, act_dim), log deviations (act_dim,))."""

    def __init__(self, act_dim):
        """Args: act_dim: components of an action."""
        self.signature = (tf.TensorSpec((None, act_dim)), tf.TensorSpec((act_dim,)))
        self._constant = 0.5 * LOG_2PI * act_dim
        self._act_dim = act_dim

    def of(self, out, net):
        """Args: out: float32 (N, act_dim). net: Net."""
        return out, tf.convert_to_tensor(net.log_std)

    def logp(self, dist, act):
        """Args: dist: of N rows. act: float32 (N, act_dim)."""
        mean, log_std = dist
        z = (act - mean) * tf.exp(-log_std)
        return -0.5 * tf.reduce_sum(tf.square(z), 1) - (tf.reduce_sum(log_std) + self._constant)

    def entropy(self, dist):
        """Args: dist: of N rows."""
        mean, log_std = dist
        return tf.fill((tf.shape(mean)[0],), tf.reduce_sum(log_std) + (self._constant + 0.5 * self._act_dim))

    def kl(self, old, new):
        """Args: old, new: of N rows each."""
        (old_mean, old_log_std), (mean, log_std) = old, new
        shift = (mean - old_mean) * tf.exp(-log_std)
        log_ratio = 2.0 * (old_log_std - log_std)
        return 0.5 * (tf.reduce_sum(tf.math.expm1(log_ratio) - log_ratio) + tf.reduce_sum(tf.square(shift), 1))

    def fisher(self, dist, d_out, d_log_std, n):
        """See the module: 1 / variance for the means, 2 for the log deviations, nothing between them."""
        weight = tf.cast(tf.shape(d_out)[0], tf.float32) / n
        return d_out * (tf.exp(-2.0 * dist[1]) / n), 2.0 * weight * d_log_std


class Categorical:
    """Categorical distributions, (log-probabilities (N, act_dim),)."""

    def __init__(self, act_dim):
        """Args: act_dim: number of actions."""
        self.signature = (tf.TensorSpec((None, act_dim)),)

    def of(self, out, net):
        """Args: out: float32 (N, act_dim). net: Net."""
        return (tf.nn.log_softmax(out),)

    def logp(self, dist, act):
        """Args: dist: of N rows. act: int64 (N,)."""
        return tf.gather(dist[0], act, batch_dims=1)

    def entropy(self, dist):
        """Args: dist: of N rows."""
        return -tf.reduce_sum(tf.exp(dist[0]) * dist[0], 1)

    def kl(self, old, new):
        """Args: old, new: of N rows each."""
        return tf.reduce_sum(tf.exp(old[0]) * (old[0] - new[0]), 1)

    def fisher(self, dist, d_out, d_log_std, n):
        """See the module: the probability for each log-probability, whose derivative is that of its logit, centred."""
        probs = tf.exp(dist[0])
        return (probs * (d_out - tf.reduce_sum(probs * d_out, 1, keepdims=True)) / n,)
