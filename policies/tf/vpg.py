"""The vanilla policy gradient, as in policies.pytorch.vpg, which names the papers."""

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
