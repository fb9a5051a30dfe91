"""What Policy asks of an update rule, and what a rule keeps between updates: the same for every framework."""


class Rule:
    """Base of the update rules: one that looks at the whole batch at once and keeps nothing between updates."""

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        self._hyper = hyper

    def rows_per_step(self, n_rows):
        """Rows of the largest product, on which the number of threads depends. Args: n_rows: rows of the batch."""
        return n_rows

    def update(self, policy, batch, rng):
        """Changes ``policy.net``.

        Where several learners share the batch, gradients and numbers are of the whole batch, and each learner makes the
        same calls in the same order.

        Args:
            policy: Policy of the rule's framework, which says what is returned.
            batch: its Batch.
            rng: numpy.random.Generator of this update.
        """
        raise NotImplementedError

    def adapt(self, kl):
        """Follows a good update, and may change the rule's own numbers. Args: kl: after the update, nats."""

    def state(self):
        """dict of the numbers that change."""
        return {}

    def load_state(self, scalars):
        """Takes them back. Args: scalars: what `state` gave."""


class KLControl(Rule):
    """A penalty's weight and a step size that steer the divergence of each update to `kl_targ`.

    Source: github.com/pat-coady/trpo.

    Attributes:
        beta: weight of the KL divergence. lr_mult: factor of the step size. Both adapt after each update.
    """

    ADAPT = 1.5
    BETA_RANGE = (1.0 / 35.0, 35.0)
    BETA_SETTLED = (1.0 / 30.0, 30.0)  # beyond these beta alone no longer steers, and the step size follows
    LR_MULT_RANGE = (0.1, 10.0)

    def __init__(self, hyper):
        """Args: hyper: resolved Hyper."""
        super().__init__(hyper)
        self.beta = 1.0
        self.lr_mult = 1.0

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
