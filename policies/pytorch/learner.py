"""What every learner shares: a network with its Adam, safe updates, export and resume."""

from contextlib import contextmanager

import numpy as np
import torch

from policies.minibatches import n_threads
from policies.pytorch.adam import Adam
from policies.pytorch.batches import torch_threads
from policies.pytorch.nets import Net


class Learner:
    """Base of Policy and ValueFunction.

    Attributes:
        net: Net. adam: Adam. hyper: resolved Hyper. threads: most torch threads to use. device: torch.device.
        share: how the batch is shared, as policies.share.Alone.
        updates: number of updates so far; picks the random stream of the next one.
        lr_scale: factor of the step sizes, 0 to 1; a schedule sets it before an update.
    """

    def __init__(self, name, spec, params, hyper, threads, device, share, max_norm, **boost):
        """Args as Policy and ValueFunction give them; `boost` goes to Adam."""
        self.device = torch.device(device)
        self.hyper = hyper
        self.threads = threads
        self.share = share
        self.net = Net(spec, name, params, self.device)
        self.adam = Adam(self.net, max_norm, **boost)
        staged = share.n_learners > 1 and self.device.type != "cpu"
        self._staging = torch.empty_like(self.net.grad, device="cpu", pin_memory=True) if staged else self.net.grad
        self.updates = 0
        self.lr_scale = 1.0

    def rows_per_step(self, n_rows):
        """Rows of the largest product in an update, of all learners. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError

    def n_threads(self, n_rows):
        """Threads that an update uses; as many for each learner, as the bits of a norm depend on their number.

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
            part: the rows that this learner holds.
            means: numbers or 0-d tensors, means over these rows; without rows they are not looked at.

        Returns:
            float64 array, one number for each; with one learner the same that were given.
        """
        sums = [len(part) * float(mean) if len(part) else 0.0 for mean in means]
        return self.share.sum(np.array(sums)) / part.total

    def moments(self, part, *tensors):
        """Means and standard deviations over the whole batch (Chan, Golub, LeVeque 1979: merge of several samples).

        Args:
            part: the rows that this learner holds.
            tensors: float32 (len(part),) each.

        Returns:
            (means, deviations): float64 arrays, one number for each tensor.
        """
        if not len(part):
            tensors = [x.new_zeros(1) for x in tensors]  # weighs nothing
        ours = np.array([float(x.mean()) for x in tensors])
        means = self.means(part, *ours)
        squares = [float(x.std(correction=0)) ** 2 for x in tensors] + (ours - means) ** 2
        return means, np.sqrt(self.means(part, *squares))

    def require_finite(self, *tensors):
        """Raises FloatingPointError, for every learner, if any has a number that is not finite in its tensors."""
        sums = np.array([float(x.sum()) for x in tensors])
        if not np.isfinite(self.share.sum(sums)).all():
            raise FloatingPointError("a number in the batch is not finite")

    @contextmanager
    def updating(self, n_rows):
        """Runs one update: without autograd, with the threads that suit it, and undone if it fails.

        Args:
            n_rows: rows of the whole batch.

        Raises:
            FloatingPointError: the block left parameters that are not finite. As after any other exception inside the
                block, network and optimizer are as before.
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

    def weights(self, out):
        """Writes the network's parameters.

        Args:
            out: dict of str to float32 array with at least the names of policies.actor.init_params for this network;
                the arrays are overwritten in place.
        """
        self.net.weights(out)

    def state(self):
        """Everything that shapes the updates to come, so that a resumed run gives the same bits.

        Returns:
            (arrays, scalars): dict of str to array, with the parameters under their own names, and dict of str to
            number. All names begin with the network's name, so those of two learners can share a dict.
        """
        name = self.net.name
        arrays = {key: view.cpu().numpy().copy() for key, view in self.net.views.items()}
        arrays[f"{name}/adam/m"] = self.adam.m.cpu().numpy().copy()
        arrays[f"{name}/adam/v"] = self.adam.v.cpu().numpy().copy()
        return arrays, {f"{name}/adam/steps": self.adam.steps, f"{name}/updates": self.updates}

    def load_state(self, arrays, scalars):
        """Takes over what `state` gave; other names in the dicts are passed over.

        Args:
            arrays, scalars: as `state` returned them, from a learner of the same Spec.

        Raises:
            ValueError: the parameters do not fit this network.
            KeyError: a name is missing.
        """
        name = self.net.name
        self.net.load(arrays)
        self.adam.m.copy_(torch.tensor(arrays[f"{name}/adam/m"]))
        self.adam.v.copy_(torch.tensor(arrays[f"{name}/adam/v"]))
        self.adam.steps = int(scalars[f"{name}/adam/steps"])
        self.updates = int(scalars[f"{name}/updates"])
