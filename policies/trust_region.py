"""Trust region policy optimisation: a natural gradient step within a bound on the KL divergence, for any framework.

Paper: Schulman et al. 2015 (arXiv:1502.05477), section 6 and appendix C. The Fisher matrix F of the policy is the
second derivative of the mean KL divergence. It is never formed: conjugate gradients only need its products with
vectors, and F v = J' M J v, where J is the derivative of the network's outputs by its parameters and M the Fisher
matrix of the distribution over them. J v takes a forward pass, J' a backward pass.
"""

import math

from policies.rules import UpdateRule


class TrustRegion(UpdateRule):
    """``trpo``: arXiv:1502.05477, algorithm 1 with the single-path estimate, on the whole batch.

    Vectors are in the order of the policy's parameters, float64 (P,): arrays, or tensors of the framework.
    """

    BACKTRACKS = 10  # most steps to try
    BACKTRACK = 0.8  # length of each, relative to the one before

    def parameters(self, policy):
        """A copy of the parameters, a vector."""
        raise NotImplementedError

    def outcome(self, policy, batch, parameters):
        """Sets the parameters. Returns: what `update` returns first; loss and KL of the whole batch."""
        raise NotImplementedError

    def gradient(self, policy, batch, result):
        """Gradient of the loss, a vector. Args: result: what `outcome` returned first, for the parameters as set."""
        raise NotImplementedError

    def fisher(self, policy, batch, rng):
        """The damped Fisher matrix at the current parameters, of the batch or of a random part of it.

        Returns:
            Function that multiplies it with a vector, and returns a new one.
        """
        raise NotImplementedError

    def update(self, policy, batch, rng):
        """See UpdateRule. If the line search accepts no step, the policy does not change.

        It logs BacktrackIters, steps that the line search rejected; StepFrac, the accepted fraction of the full step,
        0 if none; CgResidual, norm of the conjugate gradient residual over that of the gradient.

        Raises:
            FloatingPointError: the gradient or its curvature is not finite.
        """
        hyper, before = self._hyper, self.parameters(policy)
        result, loss, _ = self.outcome(policy, batch, before)
        neg_grad = -self.gradient(policy, batch, result)
        step, residual = conjugate_gradients(self.fisher(policy, batch, rng), neg_grad, hyper.cg_iters)
        curvature = float(step @ (neg_grad - residual))  # step' F step, without another product
        if not math.isfinite(curvature):
            raise FloatingPointError("the policy update's gradient is not finite")
        step = step * (math.sqrt(2.0 * hyper.kl_targ / curvature) if curvature > 0.0 else 0.0)  # 0: nothing to gain
        log = {"CgResidual": math.sqrt(residual @ residual) / max(math.sqrt(neg_grad @ neg_grad), 1e-30)}
        fraction = 1.0
        for rejected in range(self.BACKTRACKS):
            result, new_loss, kl = self.outcome(policy, batch, before + fraction * step)
            if new_loss < loss and kl <= hyper.kl_targ:
                return result, {"BacktrackIters": rejected, "StepFrac": fraction} | log
            fraction *= self.BACKTRACK
        return self.outcome(policy, batch, before)[0], {"BacktrackIters": self.BACKTRACKS, "StepFrac": 0.0} | log


def conjugate_gradients(product, b, iters, tolerance=1e-10):
    """Solves A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        product: function that multiplies A by a vector like `b`.
        b: float64 (P,), array or tensor.
        iters: most products to compute.
        tolerance: of the squared residual, relative to the first one.

    Returns:
        (x, residual b - A x): like `b`. The residual is not finite if any number was not.
    """
    x, residual, p = 0.0 * b, b, b
    squared = first = float(b @ b)
    for _ in range(iters):
        if squared <= tolerance * first:
            break
        a_p = product(p)
        along = float(p @ a_p)
        if along == 0.0:  # without damping: a direction of zero curvature
            break
        x = x + squared / along * p
        residual = residual - squared / along * a_p
        before, squared = squared, float(residual @ residual)
        p = residual + squared / before * p
    return x, residual
