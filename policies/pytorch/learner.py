"""Base class of the learners: a network with its Adam, updates that can be undone, sums over learners, checkpoints."""

from contextlib import contextmanager

import numpy as np
import torch

from policies.learners import BaseLearner
from policies.minibatches import n_threads
from policies.pytorch.adam import Adam
from policies.pytorch.batches import torch_threads
from policies.pytorch.nets import Net


class Learner(BaseLearner):
    """Base of Policy and ValueFunction; it has a torch `device` besides policies.learners.BaseLearner's attributes."""

    def build(self, params, device):
        """As the base class."""
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.net = Net(self.spec, self.name, params, self.device)
        self.adam = Adam(self.net, self.hyper)
        staged = self.share.n_learners > 1 and not self.on_cpu
        self._staging = torch.empty_like(self.net.grad, device="cpu", pin_memory=True) if staged else self.net.grad

    def rows_per_step(self, n_rows):
        """Rows of the largest product in an update, of all learners. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError

    def n_threads(self, n_rows):
        """Threads that an update uses; the same on each learner, as the bits of a norm depend on their number.

        Args:
            n_rows: rows of the whole batch.
        """
        rows = self.rows_per_step(n_rows) // self.share.n_learners
        return n_threads(self.threads, rows, self.net.flat.numel())

    def sum_grad(self):
        """Replaces the network's gradient by its sum over the learners."""
        if self.share.n_learners > 1:
            self._staging.copy_(self.net.grad)
            self.share.sum(self._staging.numpy())
            self.net.grad.copy_(self._staging)

    def step(self, lr):
        """One step of Adam along the gradient of all learners. Args: lr: step size."""
        self.sum_grad()
        self.adam.step(lr)

    def means(self, part, *means):
        """Means over the whole batch.

        Args:
            part: the rows of this learner.
            means: numbers or 0-d tensors, means over these rows; ignored if there are no rows.

        Returns:
            float64 array, one number for each.
        """
        sums = [len(part) * float(mean) if len(part) else 0.0 for mean in means]
        return self.share.sum(np.array(sums)) / part.total

    def moments(self, part, *tensors):
        """Means and standard deviations over the whole batch (Chan, Golub, LeVeque 1979: merge of several samples).

        Args:
            part: the rows of this learner.
            tensors: float32 (len(part),) each.

        Returns:
            (means, deviations): float64 arrays, one number for each tensor.
        """
        if not len(part):
            tensors = [x.new_zeros(1) for x in tensors]  # its weight is 0
        ours = np.array([float(x.mean()) for x in tensors])
        means = self.means(part, *ours)
        squares = [float(x.std(correction=0)) ** 2 for x in tensors] + (ours - means) ** 2
        return means, np.sqrt(self.means(part, *squares))

    @contextmanager
    def updating(self, n_rows):
        """Context of one update: without autograd, with a fitting number of threads; undone if it fails.

        Args:
            n_rows: rows of the whole batch.

        Raises:
            FloatingPointError: the parameters are no longer finite. After this or any other exception in the block,
                network and optimizer are as before.
        """
        net, adam = self.net, self.adam
        before = net.flat.clone(), adam.m.clone(), adam.v.clone(), adam.steps
        try:
            with torch.no_grad(), torch_threads(self.n_threads(n_rows)):
                yield
                if not torch.isfinite(net.flat.sum()):
                    raise FloatingPointError(f"the {net.name} update's loss or gradient is not finite")
        except BaseException:
            for tensor, old in zip((net.flat, adam.m, adam.v), before):
                tensor.copy_(old)
            adam.steps = before[3]
            raise
        self.updates += 1
