"""The policy learner: prepares a batch, and leaves the improvement of the policy to an update rule."""

import torch

from policies.learners import BasePolicy
from policies.pytorch.batches import to_tensor
from policies.pytorch.dists import Categorical, Gaussian
from policies.pytorch.learner import Learner
from policies.pytorch.ppo import PPOClip, PPOPenalty
from policies.pytorch.trpo import TRPO
from policies.pytorch.vpg import VPG

RULES = {"ppo": PPOClip, "ppo-kl": PPOPenalty, "trpo": TRPO, "vpg": VPG}
ADV_EPS = 1e-8


class Policy(BasePolicy, Learner):
    """A policy and its update rule.

    Attributes:
        dist: Gaussian or Categorical over the network's outputs.
        rule: the update rule, a policies.rules.UpdateRule. Its ``update`` returns the final probability ratios, float32
            (N,), and a dict of numbers to log.
    """

    def build(self, params, device):
        """As Learner."""
        super().build(params, device)
        log_std = (values.get("policy/log_std") for values in (self.net.views, self.net.grads))
        self.dist = Categorical() if self.spec.discrete else Gaussian(*log_std)
        self.rule = RULES[self.hyper.algo](self.hyper)

    def batch(self, obs, act, adv, part):
        """A Batch. Args: as `update`'s."""
        return Batch(self, obs, act, adv, part)

    def summary(self, batch, ratio):
        """(KL, entropy, surrogate loss) after an update. Args: batch: its Batch. ratio: what the rule returned."""
        return self.means(batch.part, self.dist.kl(batch.old), self.dist.entropy(), -(ratio * batch.adv).mean())

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
        policy.require_finite(obs=self.obs, act=self.act, adv=adv)
        mean, std = (adv.new_tensor(moment[0]) for moment in policy.moments(part, adv))
        self.adv = (adv - mean) / (std + ADV_EPS)
        policy.forward(self.obs)
        self.old = policy.dist.freeze()
        self.old_logp = policy.dist.logp(self.act)

    def minibatch(self, rows):
        """Some rows. Args: rows: int64 (n,) tensor. Returns: tuple of their obs, act, adv and old_logp."""
        return tuple(whole.index_select(0, rows) for whole in (self.obs, self.act, self.adv, self.old_logp))
