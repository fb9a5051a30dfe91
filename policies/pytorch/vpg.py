"""The vanilla policy gradient: steps of Adam along the advantage-weighted gradient of the log-probabilities.

Papers: Williams 1992 (REINFORCE), Sutton et al. 2000 (Policy Gradient Methods for Reinforcement Learning with Function
Approximation), with the advantages of Schulman et al. 2016 (arXiv:1506.02438); code: Spinning Up's ``vpg``.
"""

from policies.rules import UpdateRule


class VPG(UpdateRule):
    """``vpg``: a step on the whole batch. A second step on the same batch no longer follows the policy's gradient."""

    def update(self, policy, batch, rng):
        """See UpdateRule. It logs nothing of its own."""
        hyper, part = self._hyper, batch.part
        d_logp = batch.adv * (-1.0 / part.total)
        for _ in range(hyper.epochs):
            policy.net.backward(policy.dist.backward(d_logp, d_entropy=-hyper.ent_coef * part.weight))
            policy.step(hyper.lr * policy.lr_scale)
            ratio = policy.ratio(batch)
        return ratio, {}
