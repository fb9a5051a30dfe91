"""The policy learner, and the update rules: how a policy is improved on one batch, written once for every backend.

``ppo`` is the clipped surrogate objective in minibatches; ``ppo-kl`` is Patrick Coady's, a KL penalty whose weight and
step size adapt to a target divergence; ``trpo`` is a natural gradient step within a bound on the divergence; ``vpg`` is
the vanilla policy gradient.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from policies.backend import Array, Outcome, PolicyNet, Rows, as_array, require_shape
from policies.data_parallel import Part
from policies.learner import POLICY_STREAM, Learner, n_minibatches, shuffled, stream

ADV_EPS = 1e-8
CG_TOLERANCE = 1e-10  # of the squared residual, relative to the first one
Log = dict[str, float]


class Compared(NamedTuple):
    """The policy as it is now, compared with the policy before its update: means over the whole batch."""

    kl: float  # KL(old || new), nats
    entropy: float  # of the new one, nats
    loss: float  # surrogate loss, -ratio * adv, in standard deviations of the advantage
    clip_frac: float  # share of rows whose probability ratio is beyond the clip range, 0 to 1
    outcome: Outcome  # this learner's, for `Policy.gradient`


class Policy(Learner):
    """A policy; the update rules are its subclasses, which say how it is improved on one batch."""

    net: PolicyNet
    log_std_range: tuple[Any, Any] | None = None  # least and most of the Gaussian's log deviations after an update

    def improve(self, batch: Rows, rng: np.random.Generator) -> tuple[Compared, Log]:
        """Changes the policy's parameters. Returns: the policy afterwards, compared with the one before; what to log.

        Each learner that shares the batch makes the same calls in the same order.
        """
        raise NotImplementedError

    def adapt(self, kl: float) -> None:
        """Called after a successful update: sets what is adaptive. Args: kl: mean KL(old || new) of `improve`, nats."""

    def update(self, obs: Array, act: Array, adv: Array, part: Part | None = None, logp: Array | None = None) -> Log:
        """One update on one batch.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            act: Box: float32 (N, act_dim), as the actor drew them. Discrete: integers (N,).
            adv: float32 (N,), any unit; normalised here.
            part: which rows of the whole batch these are; None: all.
            logp: float32 (N,), log-probabilities of the actions by the policy that drew them, to which ratios are
                taken; None: that was the current one. KL(old || new) is always taken to the current one.
        Returns: what to log: the rule's own numbers, KL and LossPi after its steps; Entropy of what acts next.
        Raises: ValueError: an array has another shape. FloatingPointError: loss, gradient or log are not finite;
            nothing was changed.
        """
        part = Part.whole(len(obs)) if part is None else part
        with self.updating(part.total) as log:
            batch = self.batch(obs, act, adv, part, logp)
            end, of_rule = self.improve(batch, stream(self.hyper.seed, POLICY_STREAM, self.updates))
            entropy = end.entropy
            if self.log_std_range:
                log_std = self.net.by_name(vector := self.net.vector())["policy/log_std"]
                bounded = np.clip(log_std, *self.log_std_range)
                if (bounded != log_std).any():
                    log_std[...] = bounded
                    self.net.set_vector(vector)
                    entropy = self.compare(batch).entropy
            log |= {"KL": end.kl, "Entropy": entropy, "LossPi": end.loss} | of_rule  # the rest: of the rule's own steps
        self.adapt(end.kl)
        return log

    def batch(self, obs: Array, act: Array, adv: Array, part: Part, logp: Array | None = None) -> Rows:
        """Collective among the learners: Rows with advantages of mean 0 and deviation 1. Args: as `update`'s."""
        require_shape(adv, (len(part),))
        (mean,), (std,) = self.moments(part, adv)
        rows = self.net.rows(obs, act, ((adv - mean) / (std + ADV_EPS)).astype(np.float32), logp)
        return rows._replace(part=part)

    def compare(self, batch: Rows) -> Compared:
        """Collective among the learners: the policy as it is now."""
        outcome = self.net.outcome(batch)
        kl, entropy, loss, clip_frac = self.means(batch.part, outcome.sums).tolist()
        return Compared(kl, entropy, loss, clip_frac, outcome)

    def gradient(self, batch: Rows, now: Compared, kl: float = 0.0) -> Any:
        """Collective among the learners: gradient of the mean surrogate loss over the whole batch, less the entropy's.

        Args: now: the policy as it is; taken once. kl: weight of the divergence, which is added. Returns: (P,).
        """
        weights = (weight / batch.part.total for weight in (kl, -self.hyper.ent_coef, 1.0))
        return self.summed(now.outcome.gradient(*weights))

    def fisher(self, batch: Rows) -> Callable[[Array], Array]:
        """The damped Fisher matrix: a function, collective among the learners, that multiplies it with float64 (P,)."""
        undamped = self.net.fisher(batch, batch.part.total)

        def product(vector: Array) -> Array:
            return as_array(self.summed(undamped(vector.astype(np.float32)))) + self.hyper.cg_damping * vector

        return product


class PPOClip(Policy):
    """``ppo``: Schulman et al. 2017 (arXiv:1707.06347), equation 7, over several passes in minibatches.

    A pass that ends beyond a divergence of `kl_targ` is the last one. With an `lr_scale` of 0 there is none.
    """

    in_minibatches = True

    def improve(self, batch: Rows, rng: np.random.Generator) -> tuple[Compared, Log]:
        """See Policy. It logs ClipFrac, as Compared's after the update, and StopIter, number of passes."""
        hyper = self.hyper
        if not self.lr_scale:
            return (now := self.compare(batch)), {"ClipFrac": now.clip_frac, "StopIter": 0}
        n_parts = n_minibatches(hyper, batch.part.total)
        for epoch in range(1, hyper.epochs + 1):
            self.descend(batch, shuffled(rng, batch.part, n_parts), hyper.lr * self.lr_scale)
            if hyper.kl_targ or epoch == hyper.epochs:
                now = self.compare(batch)
                if hyper.kl_targ and now.kl > hyper.kl_targ:
                    break
        return now, {"ClipFrac": now.clip_frac, "StopIter": epoch}


class PPOPenalty(Policy):
    """``ppo-kl``: arXiv:1707.06347, equation 8, on the whole batch, with a hinge beyond twice the target.

    The penalty's weight, and then the step size, adapt so that updates reach `kl_targ` (github.com/pat-coady/trpo).
    """

    adaptive = "beta", "lr_mult"

    HINGE = 50.0  # weight of the squared excess over twice the target (Heess et al. 2017, arXiv:1707.02286, appendix)
    STOP = 4.0  # times the target: further steps would leave the region where the surrogate holds
    ADAPT = 1.5
    BETA_RANGE = (1.0 / 35.0, 35.0)
    BETA_SETTLED = (1.0 / 30.0, 30.0)  # beyond these beta alone no longer steers, and the step size follows
    LR_MULT_RANGE = (0.1, 10.0)
    beta = lr_mult = 1.0  # weight of the KL divergence, and factor of the step size

    def improve(self, batch: Rows, rng: np.random.Generator) -> tuple[Compared, Log]:
        """See Policy. It logs Beta and LrMult, as this update used them, and StopIter, number of passes."""
        hyper, epochs = self.hyper, 0
        now = self.compare(batch)
        while epochs < hyper.epochs and now.kl <= self.STOP * hyper.kl_targ:
            epochs += 1
            weight = self.beta + 2.0 * self.HINGE * max(0.0, now.kl - 2.0 * hyper.kl_targ)  # the penalty's derivative
            self.net.step(self.gradient(batch, now, kl=weight), hyper.lr * self.lr_scale * self.lr_mult)
            now = self.compare(batch)
        return now, {"Beta": self.beta, "LrMult": self.lr_mult, "StopIter": epochs}

    def adapt(self, kl: float) -> None:
        """See Policy: beta rises, then the step size falls, where the divergence was too large; or the reverse."""
        if kl > 2.0 * self.hyper.kl_targ:
            self.beta = min(self.BETA_RANGE[1], self.beta * self.ADAPT)
            if self.beta > self.BETA_SETTLED[1] and self.lr_mult > self.LR_MULT_RANGE[0]:
                self.lr_mult /= self.ADAPT
        elif kl < 0.5 * self.hyper.kl_targ:
            self.beta = max(self.BETA_RANGE[0], self.beta / self.ADAPT)
            if self.beta < self.BETA_SETTLED[0] and self.lr_mult < self.LR_MULT_RANGE[1]:
                self.lr_mult *= self.ADAPT


class TrustRegion(Policy):
    """``trpo``: Schulman et al. 2015 (arXiv:1502.05477), algorithm 1 with the single-path estimate, on the whole batch.

    The Fisher matrix F of the policy is the second derivative of the mean KL divergence (appendix C). It is never
    formed: conjugate gradients only need its products with vectors, and F v = J' M J v, where J is the derivative of
    the network's outputs by its parameters and M the Fisher matrix of the distribution over them. J v takes a forward
    pass, J' a backward pass. Vectors are float64 (P,), in the order of the network's parameters.
    """

    BACKTRACKS = 10  # most steps to try
    BACKTRACK = 0.8  # length of each, relative to the one before

    def improve(self, batch: Rows, rng: np.random.Generator) -> tuple[Compared, Log]:
        """See Policy. If the line search accepts no step, the policy does not change.

        It logs BacktrackIters, steps that the line search rejected; StepFrac, the accepted fraction of the full step,
        0 if none; CgResidual, norm of the conjugate gradient residual over that of the gradient.
        """
        hyper, before = self.hyper, self.net.vector()

        def at(parameters: Array) -> tuple[Compared, float]:
            """The policy with these parameters, and its loss."""
            self.net.set_vector(parameters.astype(np.float32))
            now = self.compare(batch)
            return now, now.loss - hyper.ent_coef * now.entropy

        now, loss = at(before)
        neg_grad = -as_array(self.gradient(batch, now)).astype(np.float64)
        step, residual = conjugate_gradients(self.fisher(batch), neg_grad, hyper.cg_iters)
        curvature = float(step @ (neg_grad - residual))  # step' F step, without another product
        step = step * (math.sqrt(2.0 * hyper.kl_targ / curvature) if curvature > 0.0 else 0.0)  # 0: nothing to gain
        log = {"CgResidual": math.sqrt(residual @ residual) / max(math.sqrt(neg_grad @ neg_grad), 1e-30)}
        fraction = 1.0
        for rejected in range(self.BACKTRACKS):
            now, new_loss = at(before + fraction * step)
            if new_loss < loss and now.kl <= hyper.kl_targ:
                return now, {"BacktrackIters": rejected, "StepFrac": fraction} | log
            fraction *= self.BACKTRACK
        return at(before)[0], {"BacktrackIters": self.BACKTRACKS, "StepFrac": 0.0} | log


class VPG(Policy):
    """``vpg``: steps of Adam on the whole batch, along the advantage-weighted gradient of the log-probabilities.

    Later steps on the same batch weight it with the probability ratio. Papers: Williams 1992 (REINFORCE), Sutton
    et al. 2000, with the advantages of Schulman et al. 2016 (arXiv:1506.02438).
    """

    def improve(self, batch: Rows, rng: np.random.Generator) -> tuple[Compared, Log]:
        now = self.compare(batch)
        for _ in range(self.hyper.epochs):
            self.net.step(self.gradient(batch, now), self.hyper.lr * self.lr_scale)
            now = self.compare(batch)
        return now, {}


def conjugate_gradients(product: Callable[[Array], Array], b: Array, iters: int) -> tuple[Array, Array]:
    """Solves A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args: product: multiplies A by a vector like `b`, float64 (P,); at most `iters` times.
    Returns: (x, residual b - A x). The residual is not finite if any number was not.
    """
    x, residual, p = 0.0 * b, b, b
    squared = first = float(b @ b)
    for _ in range(iters):
        if squared <= CG_TOLERANCE * first:
            break
        a_p = product(p)
        along = float(p @ a_p)
        if along == 0.0:  # without damping: a direction of zero curvature
            break
        x = x + squared / along * p
        residual = residual - squared / along * a_p
        before, squared = squared, float(residual @ residual)
        p = residual + squared / before * p
    return x, residual


RULES: dict[str, type[Policy]] = {"ppo": PPOClip, "ppo-kl": PPOPenalty, "trpo": TrustRegion, "vpg": VPG}
