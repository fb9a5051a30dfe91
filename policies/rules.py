"""Base classes of the update rules, the same for every framework."""


class UpdateRule:
    """How a policy is improved on one batch. This base uses the whole batch at once, and keeps no state."""

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        self._hyper = hyper

    def rows_per_step(self, n_rows):
        """Rows of the largest product, on which the number of threads depends. Args: n_rows: rows of the batch."""
        return n_rows

    def update(self, policy, batch, rng):
        """Changes ``policy.net``.

        Where several learners share the batch, gradients and logged numbers are of the whole batch, and each learner
        makes the same calls in the same order.

        Args:
            policy: Policy of the rule's framework, whose docstring says what to return.
            batch: its Batch.
            rng: numpy.random.Generator of this update.
        """
        raise NotImplementedError

    def adapt(self, kl):
        """Called after a successful update: adapts the rule's state. Args: kl: mean KL(old || new) of it, nats."""

    def state(self):
        """dict of str to number: what changes from update to update."""
        return {}

    def load_state(self, scalars):
        """Restores it. Args: scalars: what `state` returned."""


class AdaptiveKLPenalty(UpdateRule):
    """A penalty on the KL divergence whose weight, and then the step size, adapt so that updates reach `kl_targ`.

    Source: github.com/pat-coady/trpo.

    Attributes:
        beta: weight of the KL divergence. lr_mult: factor of the step size. Both adapt after each update.
    """

    HINGE = 50.0  # weight of the squared excess over twice the target (arXiv:1707.02286, appendix)
    STOP = 4.0  # times the target: further steps would leave the region where the surrogate holds
    ADAPT = 1.5
    BETA_RANGE = (1.0 / 35.0, 35.0)
    BETA_SETTLED = (1.0 / 30.0, 30.0)  # beyond these beta alone no longer steers, and the step size follows
    LR_MULT_RANGE = (0.1, 10.0)

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        super().__init__(hyper)
        self.beta = 1.0
        self.lr_mult = 1.0

    def kl_weight(self, kl):
        """Derivative of the penalty by the divergence. Args: kl: where the policy is now, nats."""
        return self.beta + 2.0 * self.HINGE * max(0.0, kl - 2.0 * self._hyper.kl_targ)

    def adapt(self, kl):
        """See UpdateRule: beta rises, then the step size falls, where the divergence was too large; or the reverse."""
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
        """See UpdateRule."""
        return {"beta": self.beta, "lr_mult": self.lr_mult}

    def load_state(self, scalars):
        """See UpdateRule."""
        self.beta, self.lr_mult = scalars["beta"], scalars["lr_mult"]
