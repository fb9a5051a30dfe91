"""The policy learner: prepares a batch, and leaves the improvement of the policy to an update rule."""

from typing import NamedTuple

import numpy as np

from policies.learners import BasePolicy
from policies.share import Part
from policies.tf.batches import own_copy
from policies.tf.dists import Categorical, Gaussian
from policies.tf.learner import Learner
from policies.tf.ppo import PPOClip, PPOPenalty
from policies.tf.setup import tf
from policies.tf.trpo import TRPO
from policies.tf.vpg import VPG

RULES = {"ppo": PPOClip, "ppo-kl": PPOPenalty, "trpo": TRPO, "vpg": VPG}
ADV_EPS = 1e-8


class Policy(BasePolicy, Learner):
    """A policy and its update rule.

    A rule's ``update`` returns the Outcome of the final weights, and a dict of numbers to log. It uses ``gradient`` and
    ``step`` on the whole batch, or ``descend`` in minibatches; then it also has ``loss(policy, n, *rows)``, as Learner.

    Attributes:
        dist: Gaussian or Categorical over the network's outputs.
        rule: the update rule, a policies.rules.UpdateRule.
    """

    def build(self, params, device):
        """As Learner; compiles what every update computes."""
        spec = self.spec
        act = tf.TensorSpec((None,), tf.int64) if spec.discrete else tf.TensorSpec((None, spec.act_dim))
        obs, number = tf.TensorSpec((None, spec.obs_dim)), tf.TensorSpec((None,))
        self.signature = obs, act, number, number
        super().build(params, device)
        self.dist = (Categorical if spec.discrete else Gaussian)(spec.act_dim)
        self._freeze = tf.function(self._freeze, input_signature=[obs, act])
        self._sums = tf.function(self._sums, input_signature=[self.signature, self.dist.signature])
        self.rule = RULES[self.hyper.algo](self.hyper)

    def summary(self, batch, outcome):
        """(KL, entropy, surrogate loss) after an update. Args: batch: its Batch. outcome: what the rule returned."""
        return outcome[:3]

    def batch(self, obs, act, adv, part):
        """A Batch. Args: as `update`'s."""
        spec, n = self.spec, len(part)
        obs = own_copy(obs, (n, spec.obs_dim), np.float32)
        act = own_copy(act, *(((n,), np.int64) if spec.discrete else ((n, spec.act_dim), np.float32)))
        adv = own_copy(adv, (n,), np.float32)
        self.require_finite(obs=obs, act=act, adv=adv)
        (mean,), (std,) = self.moments(part, adv)
        adv = ((adv - mean) / (std + ADV_EPS)).astype(np.float32)
        obs, act, adv = map(tf.constant, (obs, act, adv))
        old, old_logp = self._freeze(obs, act)
        return Batch(part, (obs, act, adv, old_logp), old)

    def forward(self, obs):
        """The distributions for a batch. Args: obs: float32 (N, obs_dim) tensor. Returns: tuple, as `dist` has it."""
        return self.dist.of(self.net(obs), self.net)

    def _freeze(self, obs, act):
        dist = self.forward(obs)
        return dist, self.dist.logp(dist, act)

    def outcome(self, batch):
        """Collective among the learners: the current policy on a batch. Args: batch: Batch. Returns: Outcome."""
        with tf.GradientTape() as tape:
            sums, ratio = self._sums(batch.rows, batch.old)
        kl, entropy, loss, _ = self.means(batch.part, *sums.numpy())
        return Outcome(kl, entropy, loss, ratio, sums, tape)

    def _sums(self, rows, old):
        """Sums over the rows: divergence, entropy, surrogate loss, advantage-weighted log-probability; and ratios."""
        # A gradient by the observations would cost as much as the first layer, and the tape cannot leave it out itself.
        (obs, act, adv, old_logp), old = tf.nest.map_structure(tf.stop_gradient, (rows, old))
        dist = self.forward(obs)
        logp = self.dist.logp(dist, act)
        ratio = tf.exp(logp - old_logp)
        terms = self.dist.kl(old, dist), self.dist.entropy(dist), -ratio * adv, logp * adv
        return tf.stack([tf.reduce_sum(term) for term in terms]), ratio

    def gradient(self, batch, outcome, kl=0.0, loss=0.0, score=0.0):
        """Gradient of a weighted sum of means over the whole batch, and of the entropy with its own weight.

        Args:
            batch: Batch. outcome: the policy's on it, at the current weights.
            kl, loss, score: weights of the divergence, the surrogate loss, the advantage-weighted log-probability.

        Returns:
            float32 (P,), tensor or array: of all learners.
        """
        weights = np.array((kl, -self.hyper.ent_coef, loss, score), np.float32) / np.float32(batch.part.total)
        parameters = list(self.net.views.values())
        grads = outcome.tape.gradient(outcome.sums, parameters, tf.constant(weights), unconnected_gradients="zero")
        return self.summed(self.net.flatten(grads))

    def step(self, grad, lr):
        """One step of Adam. Args: grad: as `gradient` returns. lr: step size."""
        self.adam.step_flat(grad, self.adam.plan(lr)[0])

    def loss(self, n, *rows):
        """See Learner."""
        return self.rule.loss(self, n, *rows)


class Batch(NamedTuple):
    """One batch on the device.

    Attributes:
        part: policies.share.Part, which rows of the whole batch these are.
        rows: tensors (observations float32 (N, obs_dim), actions float32 (N, act_dim) or int64 (N,), advantages float32
            (N,) with mean 0 and standard deviation 1 over the whole batch, old log-probabilities float32 (N,), nats).
        old: the distributions before the update.
    """

    part: Part
    rows: tuple
    old: tuple


class Outcome(NamedTuple):
    """A policy on a batch, compared with the policy before its update.

    Attributes:
        kl, entropy, loss: mean KL(old || new) and entropy, nats, and surrogate loss: floats, of the whole batch.
        ratio: float32 (N,) tensor, probability ratio new / old of the actions.
        sums, tape: float32 (4,) tensor as Policy makes it, and the GradientTape that can differentiate it once.
    """

    kl: float
    entropy: float
    loss: float
    ratio: tf.Tensor
    sums: tf.Tensor
    tape: tf.GradientTape
