"""Forward and backward passes of a tanh network, written out, for some rows of a batch.

The rows of a large batch are cut among several workers, each in a thread of its own. BLAS keeps to one thread: its own
threads spin while they wait for each other, which beside any other work takes many times as long.
"""

from typing import Any

import numpy as np

from policies import mlp
from policies.mlp import Array, Layer
from policies.numpy.dists import Categorical, Gaussian


class Worker:
    """Passes in memory of its own, made for the largest number of rows so far."""

    def __init__(self, net: Any, flat: Array):
        """Args: net: policies.numpy.nets.Net. flat: float32 (P,), its parameters."""
        self._net, self._layers = net, mlp.layers(net.by_name(flat), net.name)
        self.grad = mlp.aligned(flat.shape, shared=True)  # which `backward` writes
        self._grads: list[Layer] = mlp.layers(net.by_name(self.grad), net.name)
        if net.name == "policy":  # dist: the action distributions that `dist_of` returned last
            log_stds = (net.by_name(vector).get("policy/log_std") for vector in (flat, self.grad))
            self.dist: Any = Categorical() if net.spec.discrete else Gaussian(*log_stds)
        self._room, self._rows = -1, np.empty((0, net.spec.obs_dim), np.float32)
        self._known: tuple[Any, ...] = (None,)
        self._outs: list[Array] = []

    def forward(self, obs: Array, rows: slice | Array) -> Array:
        """Outputs for some rows, float32 (N, outputs), which the next call overwrites; kept if it is the same one.

        Args:
            obs: float32 (all rows, inputs), contiguous; of each batch a new array, by which it is known.
            rows: a slice, or int64 positions.
        """
        known = obs, rows, self._net.changes
        if isinstance(rows, slice) and self._known[0] is obs and self._known[1:] == known[1:]:
            return self._outs[-1]
        self._known = known if isinstance(rows, slice) else (None,)
        x = obs[rows] if isinstance(rows, slice) else self._some(obs, rows)
        n = len(x)
        if n > self._room:
            self._room = n
            self._all_outs, self._all_grads, self._slopes = (
                mlp.buffers(self._layers, n, shared=True) for _ in range(3)
            )
            self._ones = np.ones(n, np.float32)
        self._outs = [out[:n] for out in self._all_outs]
        self._inputs = [x, *self._outs[:-1]]
        return mlp.forward(self._layers, x, self._outs)

    def dist_of(self, obs: Array, rows: slice | Array) -> Any:
        """The action distributions for some rows. Args: as of `forward`."""
        self.dist.set(self.forward(obs, rows))
        return self.dist

    def backward(self, grad_out: Array) -> None:
        """Writes the gradient of a loss, but for a Gaussian's log deviations. Args: grad_out: by `forward`'s result."""
        n = len(grad_out)
        for i in range(len(self._layers) - 1, -1, -1):
            weight_grad, bias_grad = self._grads[i]
            self._inputs[i].T.dot(grad_out, weight_grad)
            self._ones[:n].dot(grad_out, bias_grad)
            if i:
                grad_out = grad_out.dot(self._layers[i][0].T, self._all_grads[i - 1][:n])
                grad_out *= self._slope(i)

    def _slope(self, i: int) -> Array:
        """Derivative of tanh in the hidden layer that is the input of layer `i`."""
        x = self._inputs[i]
        slope = np.multiply(x, x, self._slopes[i - 1][: len(x)])
        return np.subtract(1.0, slope, slope)

    def jvp(self, direction: Array) -> Array:
        """Derivative of the last `forward`'s result along a direction, (P,), of the parameters: new (N, outputs)."""
        (d_weight, d_bias), *later = mlp.layers(self._net.by_name(direction), self._net.name)
        d_out = self._inputs[0].dot(d_weight) + d_bias
        for i, (d_weight, d_bias) in enumerate(later, 1):
            d_out *= self._slope(i)
            d_out = d_out.dot(self._layers[i][0]) + self._inputs[i].dot(d_weight) + d_bias
        return d_out

    def _some(self, whole: Array, rows: Array) -> Array:
        """Some rows, in memory that the next call overwrites, always at the same place."""
        if len(rows) > len(self._rows):
            self._rows = mlp.aligned((len(rows), whole.shape[1]), shared=True)
        return whole.take(rows, 0, self._rows[: len(rows)], "clip")
