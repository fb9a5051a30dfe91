"""Trust region policy optimisation: a natural gradient step within a bound on the KL divergence.

Paper: Schulman et al. 2015 (arXiv:1502.05477), section 6 and appendix C. The Fisher matrix F of the policy is the
second derivative of the mean KL divergence. It is never formed: conjugate gradients only need its products with
vectors, and F v = J' M J v, where J is the derivative of the network's outputs by its parameters and M the Fisher
matrix of the distribution over them. J v takes a forward pass, J' a backward pass, both written out in nets.py.
"""

import math

import torch

from policies.pytorch.batches import shuffled
from policies.rules import UpdateRule


class TRPO(UpdateRule):
    """``trpo``: arXiv:1502.05477, algorithm 1 with the single-path estimate, on the whole batch."""

    BACKTRACKS = 10  # most steps to try
    BACKTRACK = 0.8  # length of each, relative to the one before

    def update(self, policy, batch, rng):
        """See UpdateRule. If the line search accepts no step, the policy does not change.

        It logs BacktrackIters, steps that the line search rejected; StepFrac, the accepted fraction of the full step,
        0 if none; CgResidual, norm of the conjugate gradient residual over that of the gradient.

        Raises:
            FloatingPointError: the gradient or its curvature is not finite.
        """
        hyper, part = self._hyper, batch.part
        loss, _ = self._loss_and_kl(policy, batch, torch.ones_like(batch.adv))
        d_logp = batch.adv * (-1.0 / part.total)
        policy.net.backward(policy.dist.backward(d_logp, d_entropy=-hyper.ent_coef * part.weight))
        policy.sum_grad()
        neg_grad = policy.net.grad.double().neg_()
        product = self.fisher(policy, batch, rng)
        step, residual = conjugate_gradients(product, neg_grad, hyper.cg_iters)
        curvature = step.dot(neg_grad - residual).item()  # step' F step, without another product
        if not math.isfinite(curvature):
            raise FloatingPointError("the policy update's gradient is not finite")
        step.mul_(math.sqrt(2.0 * hyper.kl_targ / curvature) if curvature > 0.0 else 0.0)  # 0: nothing to gain
        ratio, rejected, fraction = self._search(policy, batch, loss, step.float())
        cg_residual = (residual.norm() / neg_grad.norm().clamp_(min=1e-30)).item()
        return ratio, {"BacktrackIters": rejected, "StepFrac": fraction, "CgResidual": cg_residual}

    def fisher(self, policy, batch, rng):
        """The damped Fisher matrix at the current parameters, of the batch or of a random part of it.

        Returns:
            Function that multiplies it with a float64 (P,) tensor, and returns a new one.
        """
        hyper, net, dist = self._hyper, policy.net, policy.dist
        n, weight = batch.part.total, batch.part.weight  # with any rows, the weights of all learners are 1 together
        if hyper.cg_subsample > 1:
            rows, n = next(shuffled(rng, batch.part, min(hyper.cg_subsample, n), policy.device))
            policy.forward(batch.obs.index_select(0, rows))
        direction = torch.empty_like(net.flat)
        directions = net.by_name(direction)

        def product(vector):
            direction.copy_(vector)
            net.backward(dist.fisher(net.jvp(directions), directions.get("policy/log_std"), n, weight))
            policy.sum_grad()
            return net.grad.double().add_(vector, alpha=hyper.cg_damping)

        return product

    def _search(self, policy, batch, loss, step):
        """Backtracking line search: as much of `step` as lowers the loss below `loss` and keeps to the target KL.

        Returns:
            (ratio, number of rejected steps, accepted fraction of `step`).
        """
        flat, fraction = policy.net.flat, 1.0
        before = flat.clone()
        for rejected in range(self.BACKTRACKS):
            torch.add(before, step, alpha=fraction, out=flat)
            ratio = policy.ratio(batch)
            new_loss, kl = self._loss_and_kl(policy, batch, ratio)
            if new_loss < loss and kl <= self._hyper.kl_targ:
                return ratio, rejected, fraction
            fraction *= self.BACKTRACK
        flat.copy_(before)
        return policy.ratio(batch), self.BACKTRACKS, 0.0

    def _loss_and_kl(self, policy, batch, ratio):
        dist = policy.dist
        loss = (ratio * batch.adv).mean().neg_() - self._hyper.ent_coef * dist.entropy()
        return policy.means(batch.part, loss, dist.kl(batch.old))


def conjugate_gradients(product, b, iters, tolerance=1e-10):
    """Solves A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        product: function that multiplies A by a tensor like `b`.
        b: float64 (P,).
        iters: most products to compute.
        tolerance: of the squared residual, relative to the first one.

    Returns:
        (x, residual b - A x): float64 (P,) each. The residual is not finite if any number was not.
    """
    x, residual, p = torch.zeros_like(b), b.clone(), b.clone()
    squared = first = residual.dot(residual).item()
    for _ in range(iters):
        if squared <= tolerance * first:
            break
        a_p = product(p)
        along = p.dot(a_p).item()
        if along == 0.0:  # without damping: a direction of zero curvature
            break
        x.add_(p, alpha=squared / along)
        residual.add_(a_p, alpha=-squared / along)
        before, squared = squared, residual.dot(residual).item()
        p.mul_(squared / before).add_(residual)
    return x, residual
