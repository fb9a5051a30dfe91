"""The policy learner: one batch in, better weights out. How they become better is an update rule's job."""

import torch

from policies.pytorch.batches import POLICY_STREAM, stream, to_tensor
from policies.pytorch.dists import Categorical, Gaussian
from policies.pytorch.learner import Learner, finite_floats
from policies.pytorch.ppo import Clipped, KLPenalty

RULES = {"ppo": Clipped, "ppo-kl": KLPenalty}
ADV_EPS = 1e-8


class Policy(Learner):
    """A policy and its update rule.

    An update rule is an object with these methods:

    - ``rows_per_step(n_rows)``: rows of the largest product when the batch has `n_rows`; decides the thread count
    - ``update(policy, batch, rng)`` changes ``policy.net`` and returns the probability ratio new / old of each action
      in the batch, float32 (N,), and a dict of numbers to log; ``policy.dist`` is then the new one, for that batch
    - ``adapt(kl)`` follows a good update and changes the rule's own numbers
    - ``state()`` gives those numbers as a dict, ``load_state(scalars)`` takes them back

    Attributes:
        spec: the Spec.
        dist: Gaussian or Categorical over the network's outputs.
        rule: the update rule.
    """

    def __init__(self, spec, params, config, threads=1, device="cpu"):
        """Copies the policy's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params gives.
            config: policies.hyper.Hyper.
            threads: most torch threads to use in an update.
            device: torch device.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
        """
        hyper = config.resolve()
        boost = {} if spec.discrete else {"boosted": "policy/log_std", "boost": hyper.log_std_lr}
        super().__init__("policy", spec, params, hyper, threads, device, hyper.max_grad_norm, **boost)
        self.spec = spec
        if spec.discrete:
            self.dist = Categorical()
        else:
            self.dist = Gaussian(self.net.views["policy/log_std"], self.net.grads["policy/log_std"])
        self.rule = RULES[hyper.algo](hyper)

    def update(self, observes, actions, advantages, logger):
        """One update by the rule on one batch; old log-probabilities are those of the current weights.

        Args:
            observes: float32 (N, obs_dim), scaled.
            actions: Box: float32 (N, act_dim), as the actor drew them. Discrete: integers (N,).
            advantages: float32 (N,), any unit; standardised here.
            logger: has ``log(dict)``. It gets KL (mean KL(old || new), nats), Entropy (nats), LossPi (surrogate loss
                after the update, in standard deviations of the advantage) and the rule's own numbers.

        Raises:
            ValueError: an array has another shape than the above.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        with self.updating(len(observes)):
            batch = Batch(self, observes, actions, advantages)
            rng = stream(self.hyper.seed, POLICY_STREAM, self.updates)
            ratio, rule_log = self.rule.update(self, batch, rng)
            log = {"KL": self.dist.kl(batch.old), "Entropy": self.dist.entropy(), "LossPi": -(ratio * batch.adv).mean()}
            log = finite_floats(log | rule_log)
        self.rule.adapt(log["KL"])
        logger.log(log)

    def rows_per_step(self, n_rows):
        """As Learner.rows_per_step; the rule knows."""
        return self.rule.rows_per_step(n_rows)

    def forward(self, obs):
        """Sets `dist` for a batch. Args: obs: float32 (N, obs_dim) tensor."""
        self.dist.set(self.net.forward(obs))

    def ratio(self, batch):
        """Sets `dist` for a batch. Args: batch: Batch. Returns: probability ratio new / old, float32 (N,) tensor."""
        self.forward(batch.obs)
        return self.dist.logp(batch.act).sub_(batch.old_logp).exp_()

    def state(self):
        """As Learner.state, with the rule's numbers."""
        arrays, scalars = super().state()
        return arrays, scalars | {f"policy/{key}": value for key, value in self.rule.state().items()}

    def load_state(self, arrays, scalars):
        """As Learner.load_state, with the rule's numbers."""
        super().load_state(arrays, scalars)
        self.rule.load_state({key: scalars[f"policy/{key}"] for key in self.rule.state()})


class Batch:
    """One batch on the device.

    Attributes:
        obs: float32 (N, obs_dim). act: float32 (N, act_dim) or int64 (N,).
        adv: float32 (N,), mean 0 and standard deviation 1.
        old: what the distribution's `kl` needs. old_logp: float32 (N,), nats.
    """

    def __init__(self, policy, observes, actions, advantages):
        """Args: policy: Policy before its update. observes, actions, advantages: as Policy.update's."""
        spec, n = policy.spec, len(observes)
        act_shape, act_type = ((n,), torch.int64) if spec.discrete else ((n, spec.act_dim), torch.float32)
        self.obs = to_tensor(observes, (n, spec.obs_dim), torch.float32, policy.device)
        self.act = to_tensor(actions, act_shape, act_type, policy.device)
        adv = to_tensor(advantages, (n,), torch.float32, policy.device)
        self.adv = (adv - adv.mean()) / (adv.std(correction=0) + ADV_EPS)
        policy.forward(self.obs)
        self.old = policy.dist.freeze()
        self.old_logp = policy.dist.logp(self.act)

    def minibatch(self, rows):
        """Some rows. Args: rows: int64 (n,) tensor. Returns: tuple of their obs, act, adv and old_logp."""
        return tuple(whole.index_select(0, rows) for whole in (self.obs, self.act, self.adv, self.old_logp))

    def __len__(self):
        return len(self.adv)
