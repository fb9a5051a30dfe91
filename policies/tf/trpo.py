"""Trust region policy optimisation; products with the network's derivative take forward mode and a backward pass."""

import numpy as np

from policies.minibatches import shuffled
from policies.tf.setup import tf
from policies.trust_region import TrustRegion


class TRPO(TrustRegion):
    """See TrustRegion."""

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        super().__init__(hyper)
        self._product = None

    def parameters(self, policy):
        """See TrustRegion."""
        return np.array(policy.net.flatten(policy.net.views.values()), np.float64)

    def outcome(self, policy, batch, parameters):
        """See TrustRegion."""
        policy.net.assign(parameters.astype(np.float32))
        outcome = policy.outcome(batch)
        return outcome, outcome.loss - self._hyper.ent_coef * outcome.entropy, outcome.kl

    def gradient(self, policy, batch, result):
        """See TrustRegion."""
        return np.array(policy.gradient(batch, result, loss=1.0), np.float64)

    def fisher(self, policy, batch, rng):
        """See TrustRegion."""
        hyper, obs, n = self._hyper, batch.rows[0], batch.part.total
        if hyper.cg_subsample > 1:
            rows, n = next(shuffled(rng, batch.part, min(hyper.cg_subsample, n)))
            obs = tf.gather(obs, rows)
        if self._product is None:
            self._product = compile_product(policy)

        def product(vector):
            flat = policy.summed(self._product(obs, vector.astype(np.float32), np.float32(n)))
            return np.array(flat, np.float64) + hyper.cg_damping * vector

        return product


def compile_product(policy):
    """The undamped Fisher matrix times a vector.

    Args:
        policy: Policy.

    Returns:
        tf.function: (obs float32 (N, obs_dim), vector float32 (P,), rows of the whole batch) -> float32 (P,).
    """
    net, dist = policy.net, policy.dist
    parameters = list(net.views.values())

    def product(obs, vector, n):
        with tf.GradientTape() as tape:
            out, d_out = net.with_jvp(obs, vector)
            now = dist.of(out, net)
        d_log_std = net.unflatten(vector)[-1]  # meaningless, and not used, for a categorical distribution
        return net.flatten(tape.gradient(now, parameters, dist.fisher(now, d_out, d_log_std, n)))

    signature = [tf.TensorSpec((None, policy.spec.obs_dim)), tf.TensorSpec((net.n_params,)), tf.TensorSpec(())]
    return tf.function(product, input_signature=signature)
