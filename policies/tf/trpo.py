"""Trust region policy optimisation: a natural gradient step within a bound on the KL divergence.

Paper: Schulman et al. 2015 (arXiv:1502.05477), section 6 and appendix C. The Fisher matrix F of the policy is the
second derivative of the mean KL divergence. It is never formed: conjugate gradients only need its products with
vectors, and F v = J' M J v, where J is the derivative of the distributions by the network's parameters and M their
Fisher matrix. J v takes forward mode, J' a backward pass.
"""

import math

import numpy as np

from policies.minibatches import shuffled
from policies.rules import UpdateRule
from policies.tf.setup import tf


class TRPO(UpdateRule):
    """``trpo``: arXiv:1502.05477, algorithm 1 with the single-path estimate, on the whole batch."""

    BACKTRACKS = 10  # most steps to try
    BACKTRACK = 0.8  # length of each, relative to the one before

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        super().__init__(hyper)
        self._product = None

    def update(self, policy, batch, rng):
        """See UpdateRule. If the line search accepts no step, the policy does not change.

        It logs BacktrackIters, steps that the line search rejected; StepFrac, the accepted fraction of the full step,
        0 if none; CgResidual, norm of the conjugate gradient residual over that of the gradient.

        Raises:
            FloatingPointError: the gradient or its curvature is not finite.
        """
        hyper = self._hyper
        start = policy.outcome(batch)
        neg_grad = -np.array(policy.gradient(batch, start, loss=1.0), np.float64)
        step, residual = conjugate_gradients(self.fisher(policy, batch, rng), neg_grad, hyper.cg_iters)
        curvature = step @ (neg_grad - residual)  # step' F step, without another product
        if not math.isfinite(curvature):
            raise FloatingPointError("the policy update's gradient is not finite")
        step *= math.sqrt(2.0 * hyper.kl_targ / curvature) if curvature > 0.0 else 0.0  # 0: nothing to gain
        outcome, rejected, fraction = self._search(policy, batch, start, step.astype(np.float32))
        cg_residual = np.linalg.norm(residual) / max(np.linalg.norm(neg_grad), 1e-30)
        return outcome, {"BacktrackIters": rejected, "StepFrac": fraction, "CgResidual": cg_residual}

    def fisher(self, policy, batch, rng):
        """The damped Fisher matrix at the current parameters, of the batch or of a random part of it.

        Returns:
            Function that multiplies it with a float64 (P,) array, and returns a new one.
        """
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

    def _search(self, policy, batch, start, step):
        """Backtracking line search: as much of `step` as lowers the loss of `start` and keeps to the target KL.

        Returns:
            (Outcome, number of rejected steps, accepted fraction of `step`).
        """
        net, fraction = policy.net, 1.0
        before = net.flatten(net.views.values())
        for rejected in range(self.BACKTRACKS):
            net.assign(before + np.float32(fraction) * step)
            outcome = policy.outcome(batch)
            if self._loss(outcome) < self._loss(start) and outcome.kl <= self._hyper.kl_targ:
                return outcome, rejected, fraction
            fraction *= self.BACKTRACK
        net.assign(before)
        return policy.outcome(batch), self.BACKTRACKS, 0.0

    def _loss(self, outcome):
        return outcome.loss - self._hyper.ent_coef * outcome.entropy


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


def conjugate_gradients(product, b, iters, tolerance=1e-10):
    """Solves A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        product: function that multiplies A by an array like `b`.
        b: float64 (P,).
        iters: most products to compute.
        tolerance: of the squared residual, relative to the first one.

    Returns:
        (x, residual b - A x): float64 (P,) each. The residual is not finite if any number was not.
    """
    x, residual, p = np.zeros_like(b), b.copy(), b.copy()
    squared = first = residual @ residual
    for _ in range(iters):
        if squared <= tolerance * first:
            break
        a_p = product(p)
        along = p @ a_p
        if along == 0.0:  # without damping: a direction of zero curvature
            break
        x += squared / along * p
        residual -= squared / along * a_p
        before, squared = squared, residual @ residual
        p = residual + squared / before * p
    return x, residual
