"""The policy learner: prepares a batch, and leaves the improvement of the policy to an update rule."""

import torch

from policies.learners import finite_floats
from policies.minibatches import POLICY_STREAM, stream
from policies.pytorch.batches import to_tensor
from policies.pytorch.dists import Categorical, Gaussian
from policies.pytorch.learner import Learner
from policies.pytorch.ppo import PPOClip, PPOPenalty
from policies.pytorch.trpo import TRPO
from policies.pytorch.vpg import VPG
from policies.share import ALONE, Part

RULES = {"ppo": PPOClip, "ppo-kl": PPOPenalty, "trpo": TRPO, "vpg": VPG}
ADV_EPS = 1e-8


class Policy(Learner):
    """A policy and its update rule.

    Attributes:
        spec: the Spec.
        dist: Gaussian or Categorical over the network's outputs.
        rule: the update rule, a policies.rules.UpdateRule. Its ``update`` returns the final probability ratios, float32
            (N,), and a dict of numbers to log.
    """

    def __init__(self, spec, params, config, threads=1, device="cpu", share=ALONE):
        """Copies the policy's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params returns.
            config: policies.hyper.Hyper.
            threads: most torch threads to use in an update.
            device: torch device.
            share: of the learners that share the batch, as policies.share.Alone.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
        """
        hyper = config.resolve()
        boost = {} if spec.discrete else {"boosted": "policy/log_std", "boost": hyper.log_std_lr}
        super().__init__("policy", spec, params, hyper, threads, device, share, hyper.max_grad_norm, **boost)
        self.spec = spec
        if spec.discrete:
            self.dist = Categorical()
        else:
            self.dist = Gaussian(self.net.views["policy/log_std"], self.net.grads["policy/log_std"])
        self.rule = RULES[hyper.algo](hyper)

    def update(self, obs, act, adv, logger, part=None):
        """One update by the rule on one batch; old log-probabilities are those of the current weights.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            act: Box: float32 (N, act_dim), as the actor drew them. Discrete: integers (N,).
            adv: float32 (N,), any unit; normalised here.
            logger: has ``log(dict)``. It gets KL (mean KL(old || new), nats), Entropy (nats), LossPi (surrogate loss
                after the update, in standard deviations of the advantage) and the rule's own numbers.
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Raises:
            ValueError: an array has another shape than the above, or a minibatch fewer rows than there are learners.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        part = Part.whole(len(obs)) if part is None else part
        with self.updating(part.total):
            batch = Batch(self, obs, act, adv, part)
            rng = stream(self.hyper.seed, POLICY_STREAM, self.updates)
            ratio, rule_log = self.rule.update(self, batch, rng)
            means = self.means(part, self.dist.kl(batch.old), self.dist.entropy(), -(ratio * batch.adv).mean())
            log = finite_floats(dict(zip(("KL", "Entropy", "LossPi"), means)) | rule_log)
        self.rule.adapt(log["KL"])
        logger.log(log)

    def rows_per_step(self, n_rows):
        """As Learner.rows_per_step; depends on the rule."""
        return self.rule.rows_per_step(n_rows)

    def forward(self, obs):
        """Sets `dist` for a batch. Args: obs: float32 (N, obs_dim) tensor."""
        self.dist.set(self.net.forward(obs))

    def ratio(self, batch):
        """Sets `dist` for a batch. Args: batch: Batch. Returns: probability ratio new / old, float32 (N,) tensor."""
        self.forward(batch.obs)
        return self.dist.logp(batch.act).sub_(batch.old_logp).exp_()

    def state(self):
        """As Learner.state, with the rule's state."""
        arrays, scalars = super().state()
        return arrays, scalars | {f"policy/{key}": value for key, value in self.rule.state().items()}

    def load_state(self, arrays, scalars):
        """As Learner.load_state, with the rule's state."""
        super().load_state(arrays, scalars)
        self.rule.load_state({key: scalars[f"policy/{key}"] for key in self.rule.state()})


class Batch:
    """One batch on the device.

    Attributes:
        part: policies.share.Part, which rows of the whole batch these are.
        obs: float32 (N, obs_dim). act: float32 (N, act_dim) or int64 (N,).
        adv: float32 (N,), mean 0 and standard deviation 1 over the whole batch.
        old: the distribution before the update, for `kl`. old_logp: float32 (N,), nats.
    """

    def __init__(self, policy, obs, act, adv, part):
        """Args: policy: Policy before its update. obs, act, adv, part: as Policy.update's."""
        spec, n = policy.spec, len(part)
        self.part = part
        act_shape, act_type = ((n,), torch.int64) if spec.discrete else ((n, spec.act_dim), torch.float32)
        self.obs = to_tensor(obs, (n, spec.obs_dim), torch.float32, policy.device)
        self.act = to_tensor(act, act_shape, act_type, policy.device)
        adv = to_tensor(adv, (n,), torch.float32, policy.device)
        policy.require_finite(self.obs, self.act, adv)
        mean, std = (adv.new_tensor(moment[0]) for moment in policy.moments(part, adv))
        self.adv = (adv - mean) / (std + ADV_EPS)
        policy.forward(self.obs)
        self.old = policy.dist.freeze()
        self.old_logp = policy.dist.logp(self.act)

    def minibatch(self, rows):
        """Some rows. Args: rows: int64 (n,) tensor. Returns: tuple of their obs, act, adv and old_logp."""
        return tuple(whole.index_select(0, rows) for whole in (self.obs, self.act, self.adv, self.old_logp))
