"""The policy learner: prepares a batch, and leaves the improvement of the policy to an update rule, its subclass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies.backend import Array, Outcome, PolicyNet, Rows, as_array, require_shape
from policies.learner import POLICY_STREAM, Learner, stream
from policies.share import Part

ADV_EPS = 1e-8
Log = dict[str, float]


class Batch(NamedTuple):
    """A learner's rows of a batch. Attributes: part: which rows of the whole batch these are."""

    part: Part
    rows: Rows


@dataclass(frozen=True)
class Compared:
    """The policy as it is now, compared with the policy before its update: means over the whole batch.

    Attributes:
        kl, entropy: KL(old || new) and entropy of the new one, nats.
        loss: surrogate loss, -ratio * adv, in standard deviations of the advantage.
        clip_frac: share of rows whose probability ratio is beyond the clip range, 0 to 1.
        outcome: this learner's, for `Policy.gradient`.
    """

    kl: float
    entropy: float
    loss: float
    clip_frac: float
    outcome: Outcome


class Policy(Learner):
    """A policy; the update rules are its subclasses, which say how it is improved on one batch."""

    net: PolicyNet

    def improve(self, batch: Batch, rng: np.random.Generator) -> tuple[Compared, Log]:
        """Changes the policy's parameters. Returns: the policy afterwards, compared with the one before; what to log.

        Each learner that shares the batch makes the same calls in the same order.
        """
        raise NotImplementedError

    def adapt(self, kl: float) -> None:
        """Called after a successful update: sets what is adaptive. Args: kl: mean KL(old || new) of it, nats."""

    def update(
        self, obs: Array, act: Array, adv: Array, part: Part | None = None, logp: Array | None = None
    ) -> dict[str, float]:
        """One update on one batch.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            act: Box: float32 (N, act_dim), as the actor drew them. Discrete: integers (N,).
            adv: float32 (N,), any unit; normalised here.
            part: which rows of the whole batch these are; None: all.
            logp: float32 (N,), log-probabilities of the actions by the policy that drew them, to which ratios are
                taken; None: that was the current one. KL(old || new) is always taken to the current one.

        Returns:
            What to log: KL (mean KL(old || new), nats), Entropy (nats), LossPi (surrogate loss after the update, in
            standard deviations of the advantage) and the rule's own numbers.

        Raises:
            ValueError: an array has another shape than the above.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        part = Part.whole(len(obs)) if part is None else part
        with self.updating(part.total) as log:
            batch = self.batch(obs, act, adv, part, logp)
            end, of_rule = self.improve(batch, stream(self.hyper.seed, POLICY_STREAM, self.updates))
            log |= {"KL": end.kl, "Entropy": end.entropy, "LossPi": end.loss} | of_rule
        self.adapt(log["KL"])
        return log

    def batch(self, obs: Array, act: Array, adv: Array, part: Part, logp: Array | None = None) -> Batch:
        """Collective among the learners: a Batch with advantages of mean 0 and deviation 1. Args: as `update`'s."""
        require_shape(adv, (len(part),))
        self.require_finite(obs=obs, act=act, adv=adv, **({} if logp is None else {"logp": logp}))
        (mean,), (std,) = self.moments(part, adv)
        return Batch(part, self.net.rows(obs, act, ((adv - mean) / (std + ADV_EPS)).astype(np.float32), logp))

    def compare(self, batch: Batch) -> Compared:
        """Collective among the learners: the policy as it is now."""
        outcome = self.net.outcome(batch.rows)
        kl, entropy, loss, clip_frac = self.means(batch.part, outcome.sums).tolist()
        return Compared(kl, entropy, loss, clip_frac, outcome)

    def gradient(self, batch: Batch, now: Compared, kl: float = 0.0) -> Any:
        """Collective among the learners: gradient of the mean surrogate loss over the whole batch, less the entropy's.

        Args: now: the policy as it is; taken once. kl: weight of the divergence, which is added. Returns: (P,).
        """
        weights = (weight / batch.part.total for weight in (kl, -self.hyper.ent_coef, 1.0))
        return self.summed(now.outcome.gradient(*weights))

    def fisher(self, batch: Batch) -> Callable[[Array], Array]:
        """The damped Fisher matrix: a function, collective among the learners, that multiplies it with float64 (P,)."""
        undamped = self.net.fisher(batch.rows, batch.part.total)

        def product(vector: Array) -> Array:
            flat = as_array(self.summed(undamped(vector.astype(np.float32))))
            return flat.astype(np.float64) + self.hyper.cg_damping * vector

        return product
