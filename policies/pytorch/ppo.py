"""Proximal policy optimisation: two update rules.

``ppo`` is the clipped surrogate objective in minibatches; ``ppo-kl`` is Patrick Coady's, a KL penalty whose weight and
step size adapt to a target divergence. Papers: Schulman et al. 2017 (arXiv:1707.06347), Heess et al. 2017 (Emergence of
Locomotion Behaviours in Rich Environments, arXiv:1707.02286); code: github.com/pat-coady/trpo.
"""

from policies.minibatches import n_minibatches
from policies.pytorch.batches import shuffled
from policies.rules import AdaptiveKLPenalty, UpdateRule


class PPOClip(UpdateRule):
    """``ppo``: arXiv:1707.06347, equation 7, over several passes in minibatches, with an optional stop by KL."""

    def rows_per_step(self, n_rows):
        """See UpdateRule."""
        return n_rows // n_minibatches(self._hyper, n_rows)

    def update(self, policy, batch, rng):
        """See UpdateRule.

        It logs ClipFrac, share of rows beyond the clip range after the update, and StopIter, number of passes.
        """
        hyper, dist = self._hyper, policy.dist
        n_parts = n_minibatches(hyper, batch.part.total, policy.share.n_learners)
        epochs = 0
        while epochs < hyper.epochs:
            epochs += 1
            for rows, n in shuffled(rng, batch.part, n_parts, policy.device):
                obs, act, adv, old_logp = batch.minibatch(rows)
                policy.forward(obs)
                d_logp = self._d_logp(dist.logp(act).sub_(old_logp).exp_(), adv, n)
                policy.net.backward(dist.backward(d_logp, d_entropy=-hyper.ent_coef * (len(rows) / n)))
                policy.step(hyper.lr * policy.lr_scale)
            if hyper.kl_targ:
                policy.forward(batch.obs)
                if policy.means(batch.part, dist.kl(batch.old))[0] > hyper.kl_targ:
                    break
        ratio = policy.ratio(batch)
        (clip_frac,) = policy.means(batch.part, ((ratio - 1.0).abs_() > hyper.clip).float().mean())
        return ratio, {"ClipFrac": clip_frac, "StopIter": epochs}

    def _d_logp(self, ratio, adv, n):
        """Derivative of -sum(min(ratio * adv, clipped ratio * adv)) / n by log-probability; 0 where the clip binds."""
        gain = ratio * adv
        clipped = ratio.clamp_(1.0 - self._hyper.clip, 1.0 + self._hyper.clip).mul_(adv)
        return gain.mul_(gain <= clipped).mul_(-1.0 / n)


class PPOPenalty(AdaptiveKLPenalty):
    """``ppo-kl``: arXiv:1707.06347, equation 8, on the whole batch, with a hinge beyond twice the target."""

    def update(self, policy, batch, rng):
        """See UpdateRule.

        It logs Beta and LrMult, as this update used them, and StopIter, number of passes.
        """
        hyper, dist, part = self._hyper, policy.dist, batch.part
        kl = 0.0
        epochs = 0
        ratio = batch.old_logp.new_ones(len(part))
        while epochs < hyper.epochs and kl <= self.STOP * hyper.kl_targ:
            epochs += 1
            d_logp = (ratio * batch.adv).mul_(-1.0 / part.total)
            grad_out = dist.backward(d_logp, self.kl_weight(kl) * part.weight, -hyper.ent_coef * part.weight, batch.old)
            policy.net.backward(grad_out)
            policy.step(hyper.lr * policy.lr_scale * self.lr_mult)
            ratio = policy.ratio(batch)
            (kl,) = policy.means(part, dist.kl(batch.old))
        return ratio, {"Beta": self.beta, "LrMult": self.lr_mult, "StopIter": epochs}
