"""The vanilla policy gradient: steps of Adam along the advantage-weighted gradient of the log-probabilities.

Papers: Williams 1992 (REINFORCE), Sutton et al. 2000 (Policy Gradient Methods for Reinforcement Learning with Function
Approximation), with the advantages of Schulman et al. 2016 (arXiv:1506.02438); code: Spinning Up's ``vpg``.
"""

from policies.rules import UpdateRule


class VPG(UpdateRule):
    """``vpg``: a step on the whole batch. A second step on the same batch no longer follows the policy's gradient."""

    def update(self, policy, batch, rng):
        """See UpdateRule. It logs nothing of its own."""
        outcome = policy.outcome(batch)
        for _ in range(self._hyper.epochs):
            policy.step(policy.gradient(batch, outcome, score=-1.0), self._hyper.lr * policy.lr_scale)
            outcome = policy.outcome(batch)
        return outcome, {}
