"""Trust region policy optimisation; both products with the network's derivative are written out in nets.py."""

import torch

from policies.pytorch.batches import shuffled
from policies.trust_region import TrustRegion


class TRPO(TrustRegion):
    """See TrustRegion."""

    def parameters(self, policy):
        """See TrustRegion."""
        return policy.net.flat.double()

    def outcome(self, policy, batch, parameters):
        """See TrustRegion."""
        policy.net.flat.copy_(parameters)
        ratio, dist = policy.ratio(batch), policy.dist
        loss = (ratio * batch.adv).mean().neg_() - self._hyper.ent_coef * dist.entropy()
        return ratio, *policy.means(batch.part, loss, dist.kl(batch.old))

    def gradient(self, policy, batch, result):
        """See TrustRegion."""
        part = batch.part
        d_logp = batch.adv * (-1.0 / part.total)
        policy.net.backward(policy.dist.backward(d_logp, d_entropy=-self._hyper.ent_coef * part.weight))
        policy.sum_grad()
        return policy.net.grad.double()

    def fisher(self, policy, batch, rng):
        """See TrustRegion."""
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
