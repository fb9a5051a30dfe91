"""Proximal policy optimisation: two update rules, as in policies.pytorch.ppo, which names the papers."""

import numpy as np

from policies.minibatches import n_minibatches, shuffled
from policies.rules import AdaptiveKLPenalty, UpdateRule
from policies.tf.setup import tf


class PPOClip(UpdateRule):
    """``ppo``: arXiv:1707.06347, equation 7, over several passes in minibatches, with an optional stop by KL."""

    def update(self, policy, batch, rng):
        """See UpdateRule.

        It logs ClipFrac, share of rows beyond the clip range after the update, and StopIter, number of passes.
        """
        hyper, part = self._hyper, batch.part
        n_parts = n_minibatches(hyper, part.total, policy.share.n_learners)
        for epoch in range(1, hyper.epochs + 1):
            policy.descend(batch.rows, shuffled(rng, part, n_parts), hyper.lr * policy.lr_scale)
            if hyper.kl_targ or epoch == hyper.epochs:
                outcome = policy.outcome(batch)
                if hyper.kl_targ and outcome.kl > hyper.kl_targ:
                    break
        (clip_frac,) = policy.means(part, (np.abs(outcome.ratio.numpy() - 1.0) > hyper.clip).sum())
        return outcome, {"ClipFrac": clip_frac, "StopIter": epoch}

    def loss(self, policy, n, obs, act, adv, old_logp):
        """See Learner: -sum(min(ratio * adv, clipped ratio * adv)) / n, less the entropy."""
        dist = policy.forward(obs)
        ratio = tf.exp(policy.dist.logp(dist, act) - old_logp)
        clipped = tf.clip_by_value(ratio, 1.0 - self._hyper.clip, 1.0 + self._hyper.clip)
        gain = tf.reduce_sum(tf.minimum(ratio * adv, clipped * adv))
        if self._hyper.ent_coef:
            gain += self._hyper.ent_coef * tf.reduce_sum(policy.dist.entropy(dist))
        return -gain / n


class PPOPenalty(AdaptiveKLPenalty):
    """``ppo-kl``: arXiv:1707.06347, equation 8, on the whole batch, with a hinge beyond twice the target."""

    def update(self, policy, batch, rng):
        """See UpdateRule.

        It logs Beta and LrMult, as this update used them, and StopIter, number of passes.
        """
        hyper, epochs = self._hyper, 0
        outcome = policy.outcome(batch)
        while epochs < hyper.epochs and outcome.kl <= self.STOP * hyper.kl_targ:
            epochs += 1
            grad = policy.gradient(batch, outcome, kl=self.kl_weight(outcome.kl), loss=1.0)
            policy.step(grad, hyper.lr * policy.lr_scale * self.lr_mult)
            outcome = policy.outcome(batch)
        return outcome, {"Beta": self.beta, "LrMult": self.lr_mult, "StopIter": epochs}
