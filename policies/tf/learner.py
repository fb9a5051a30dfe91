"""Base class of the learners: a network with its Adam, updates that can be undone, minibatches, checkpoints."""

import math
from contextlib import contextmanager

import numpy as np

from policies.learners import BaseLearner
from policies.minibatches import n_threads
from policies.tf import setup
from policies.tf.adam import Adam
from policies.tf.nets import Net
from policies.tf.setup import tf


class Learner(BaseLearner):
    """Base of Policy and ValueFunction; see policies.learners.BaseLearner.

    Attributes:
        device: TensorFlow's name of it.
        signature: tuple of tf.TensorSpec, of the tensors that `loss` takes after `n`. Every function is compiled for
            any number of rows: a compilation for a constant number could change the arithmetic, and so the bits.
        op_threads: threads of one operation. TensorFlow fixes them once per process, so all learners have the same
            number: what a minibatch of `hyper.minibatch_rows` rows can use.
    """

    def build(self, params, device):
        """As the base class."""
        spec, share, rows = self.spec, self.share, self.signature
        n_params = max(sum(map(math.prod, spec.shapes(net).values())) for net in ("policy", "value"))
        self.op_threads = n_threads(self.threads, self.hyper.minibatch_rows // share.n_learners, n_params)
        setup.configure(self.op_threads)
        self.device = setup.device_name(device)
        self.on_cpu = self.device.startswith("/CPU")
        with tf.device(self.device):
            self.net = Net(spec, self.name, params)
            self.adam = Adam(self.net, self.hyper)
        integers, number = tf.TensorSpec((None,), tf.int64), tf.TensorSpec(())
        of_pass = [rows, integers, integers, tf.TensorSpec((None,)), tf.TensorSpec((None, 2))]
        self._pass = tf.function(self._pass, input_signature=of_pass)
        self._flat_gradient = tf.function(self._flat_gradient, input_signature=[rows, integers, number])

    def n_threads(self, n_rows):
        """Threads of an operation, whatever the number of rows."""
        return self.op_threads

    def loss(self, n, *rows):
        """Loss of some rows of a minibatch, inside a tf.function. Args: n: rows of the minibatch. rows: tensors."""
        raise NotImplementedError

    def descend(self, data, minibatches, lr):
        """One pass over the batch, with a step of Adam along the gradient of all learners in each minibatch.

        Args:
            data: tuple of tensors that `loss` takes, of all rows.
            minibatches: iterable of (rows, n), as policies.minibatches.shuffled returns.
            lr: step size.
        """
        rows, totals = zip(*minibatches)
        planned = self.adam.plan(lr, len(rows))
        totals = np.array(totals, np.float32)
        if self.share.n_learners == 1:
            self._pass(data, np.concatenate(rows), np.array([len(r) for r in rows]), totals, planned)
        else:
            for ours, n, plan in zip(rows, totals, planned):
                self.adam.step_flat(self.summed(self._flat_gradient(data, ours, n)), plan)

    def _pass(self, data, order, counts, totals, planned):
        """All steps of a pass in one compiled loop: the rows `order`, `counts[i]` of them in step i."""
        start = tf.constant(0, tf.int64)
        for i in tf.range(tf.shape(counts)[0]):
            stop = start + counts[i]
            self.adam.step(self._gradients(data, order[start:stop], totals[i]), planned[i])
            start = stop

    def _flat_gradient(self, data, rows, n):
        return self.net.flatten(self._gradients(data, rows, n))

    def _gradients(self, data, rows, n):
        parameters = list(self.net.views.values())
        with tf.GradientTape() as tape:
            loss = self.loss(n, *(tf.gather(whole, rows) for whole in data))
        return tape.gradient(loss, parameters, unconnected_gradients="zero")

    def summed(self, flat):
        """A vector's sum over the learners. Args: flat: float32 (P,) tensor. Returns: the same, or an array."""
        return flat if self.share.n_learners == 1 else self.share.sum(np.array(flat))

    def means(self, part, *sums):
        """Means over the whole batch.

        Args:
            part: the rows of this learner.
            sums: numbers, sums over these rows.

        Returns:
            float64 array, one number for each.
        """
        return self.share.sum(np.array(sums, np.float64)) / part.total

    def moments(self, part, *arrays):
        """Means and standard deviations over the whole batch.

        Args:
            part: the rows of this learner.
            arrays: float32 (len(part),) each.

        Returns:
            (means, deviations): float64 arrays, one number for each array.
        """
        means = self.means(part, *(x.sum(dtype=np.float64) for x in arrays))
        squares = self.means(part, *(np.square(x - mean).sum() for x, mean in zip(arrays, means)))
        return means, np.sqrt(squares)

    @contextmanager
    def updating(self, n_rows):
        """Context of one update of `n_rows` rows: on the learner's device; undone if it fails.

        Raises:
            FloatingPointError: the parameters are no longer finite. After this or any other exception in the block,
                network and optimizer are as before.
        """
        net, adam = self.net, self.adam
        variables = list(net.views.values()), adam.m, adam.v
        with tf.device(self.device):
            before, steps = [net.flatten(group) for group in variables], adam.steps
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    yield
                if not np.isfinite(net.flatten(variables[0]).numpy().sum()):
                    raise FloatingPointError(f"the {net.name} update's loss or gradient is not finite")
            except BaseException:
                for group, flat in zip(variables, before):
                    net.assign(flat, group)
                adam.steps = steps
                raise
        self.updates += 1
