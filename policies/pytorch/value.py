"""The value learner: least squares on returns."""

import torch

from policies.learners import BaseValueFunction
from policies.minibatches import n_minibatches
from policies.pytorch.batches import shuffled, to_tensor
from policies.pytorch.learner import Learner


class ValueFunction(BaseValueFunction, Learner):
    """See policies.learners.BaseValueFunction."""

    def data(self, obs, ret, n):
        """Tensors on the device. Args: obs: (n, obs_dim). ret: (n,)."""
        obs = to_tensor(obs, (n, self.spec.obs_dim), torch.float32, self.device)
        return obs, to_tensor(ret, (n,), torch.float32, self.device)

    def joined(self, first, second):
        """The rows of both."""
        return tuple(map(torch.cat, zip(first, second)))

    def errors(self, obs, ret):
        """Predictions less targets. Args: float32 (N, obs_dim), (N,) tensors. Returns: float32 (N,) tensor, new."""
        return self.net.forward(obs).squeeze(1).sub_(ret)

    def descend_all(self, rows, rng, part, n_parts, lr):
        """As the base class has it."""
        for _ in range(self.hyper.vf_epochs):
            for ours, n in shuffled(rng, part, n_parts, self.device):
                error = self.errors(*(whole.index_select(0, ours) for whole in rows))
                self.net.backward(error.mul_(2.0 / n).unsqueeze(1))
                self.step(lr)

    def mean_square(self, part, error):
        """As the base class has it."""
        return self.means(part, error.square_().mean())

    def rows_per_step(self, n_rows):
        """As Learner.rows_per_step; rows that are replayed count."""
        n_rows += self.last_part.total
        return n_rows // n_minibatches(self.hyper, n_rows, self.share.n_learners)
