"""Proximal policy optimisation: two update rules.

``ppo`` is the clipped surrogate objective in minibatches; ``ppo-kl`` is Patrick Coady's, a KL penalty whose weight and
step size adapt to a target divergence. Papers: Schulman et al. 2017 (arXiv:1707.06347), Heess et al. 2017 (Emergence of
Locomotion Behaviours in Rich Environments, arXiv:1707.02286); code: github.com/pat-coady/trpo.
"""

from policies.pytorch import batches


class Clipped:
    """``ppo``: arXiv:1707.06347, equation 7, over several passes in minibatches, with an optional stop by KL."""

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        self._hyper = hyper

    def rows_per_step(self, n_rows):
        """See Policy."""
        return n_rows // batches.n_minibatches(self._hyper, n_rows)

    def update(self, policy, batch, rng):
        """See Policy.

        The log has ClipFrac, share of rows beyond the clip range after the update, and StopIter, passes made.
        """
        hyper, dist = self._hyper, policy.dist
        n_parts = batches.n_minibatches(hyper, len(batch))
        epochs = 0
        while epochs < hyper.epochs:
            epochs += 1
            for rows in batches.shuffled(rng, len(batch), n_parts, policy.device):
                obs, act, adv, old_logp = batch.minibatch(rows)
                policy.forward(obs)
                d_logp = self._d_logp(dist.logp(act).sub_(old_logp).exp_(), adv)
                policy.net.backward(dist.backward(d_logp, d_entropy=-hyper.ent_coef))
                policy.adam.step(hyper.lr * policy.lr_scale)
            if hyper.kl_targ:
                policy.forward(batch.obs)
                if dist.kl(batch.old).item() > hyper.kl_targ:
                    break
        ratio = policy.ratio(batch)
        clip_frac = ((ratio - 1.0).abs_() > hyper.clip).float().mean()
        return ratio, {"ClipFrac": clip_frac, "StopIter": epochs}

    def _d_logp(self, ratio, adv):
        """Derivative of -mean(min(ratio * adv, clipped ratio * adv)) by log-probability: 0 where the clip is lower."""
        gain = ratio * adv
        clipped = ratio.clamp_(1.0 - self._hyper.clip, 1.0 + self._hyper.clip).mul_(adv)
        return gain.mul_(gain <= clipped).mul_(-1.0 / len(adv))

    def adapt(self, kl):
        """Nothing adapts."""

    def state(self):
        """Nothing is kept between updates."""
        return {}

    def load_state(self, scalars):
        """See `state`."""


class KLPenalty:
    """``ppo-kl``: arXiv:1707.06347, equation 8, on the whole batch, with a hinge beyond twice the target.

    Attributes:
        beta: weight of the KL divergence. lr_mult: factor of the step size. Both adapt after each update.
    """

    HINGE = 50.0  # weight of the squared excess over twice the target (arXiv:1707.02286, appendix)
    ADAPT = 1.5
    BETA_RANGE = (1.0 / 35.0, 35.0)
    BETA_SETTLED = (1.0 / 30.0, 30.0)  # beyond these beta alone no longer steers, and the step size follows
    LR_MULT_RANGE = (0.1, 10.0)
    STOP = 4.0  # times the target: further steps would leave the region where the surrogate holds

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        self._hyper = hyper
        self.beta = 1.0
        self.lr_mult = 1.0

    def rows_per_step(self, n_rows):
        """See Policy."""
        return n_rows

    def update(self, policy, batch, rng):
        """See Policy.

        The log has Beta and LrMult, as this update used them, and StopIter, passes made.
        """
        hyper, dist = self._hyper, policy.dist
        kl = 0.0
        epochs = 0
        ratio = batch.old_logp.new_ones(len(batch))
        while epochs < hyper.epochs and kl <= self.STOP * hyper.kl_targ:
            epochs += 1
            d_kl = self.beta + 2.0 * self.HINGE * max(0.0, kl - 2.0 * hyper.kl_targ)
            d_logp = (ratio * batch.adv).mul_(-1.0 / len(batch))
            policy.net.backward(dist.backward(d_logp, d_kl, -hyper.ent_coef, batch.old))
            policy.adam.step(hyper.lr * policy.lr_scale * self.lr_mult)
            ratio = policy.ratio(batch)
            kl = dist.kl(batch.old).item()
        return ratio, {"Beta": self.beta, "LrMult": self.lr_mult, "StopIter": epochs}

    def adapt(self, kl):
        """Moves beta, then the step size, against the divergence. Args: kl: after the update, nats."""
        lowest, highest = self.BETA_RANGE
        if kl > 2.0 * self._hyper.kl_targ:
            self.beta = min(highest, self.beta * self.ADAPT)
            if self.beta > self.BETA_SETTLED[1] and self.lr_mult > self.LR_MULT_RANGE[0]:
                self.lr_mult /= self.ADAPT
        elif kl < 0.5 * self._hyper.kl_targ:
            self.beta = max(lowest, self.beta / self.ADAPT)
            if self.beta < self.BETA_SETTLED[0] and self.lr_mult < self.LR_MULT_RANGE[1]:
                self.lr_mult *= self.ADAPT

    def state(self):
        """dict of the numbers that adapt."""
        return {"beta": self.beta, "lr_mult": self.lr_mult}

    def load_state(self, scalars):
        """Args: scalars: what `state` gave."""
        self.beta, self.lr_mult = scalars["beta"], scalars["lr_mult"]
