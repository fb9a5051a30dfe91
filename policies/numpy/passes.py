"""Derivatives written out: of a tanh network, in passes over some rows of a batch, and of action distributions.

The rows of a large batch are cut among several workers, each in a thread of its own. BLAS keeps to one thread: its own
threads spin while they wait for each other, which beside any other work takes many times as long.

Both classes of distributions, over the policy network's outputs, have the same methods. `set` takes the outputs for a
batch, which the others use; all are float32:

- ``logp(act)``: log-probability of each action, nats, (N,); act: (N, act_dim), or int64 (N,)
- ``entropy()``: sum of the entropies, nats
- ``freeze()``: a copy of this distribution for ``kl``
- ``kl(old)``: sum of KL(old || this), nats
- ``backward(d_logp, d_kl, d_entropy, old)``: derivative of a loss by the outputs, (N, act_dim), by the chain rule from
  the loss's derivatives by the last ``logp(act)``, (N,), by ``kl(old)`` and by ``entropy()``. A Gaussian also writes
  the derivative by its log deviations.
- ``fisher(d_out, d_log_std, n)``: the second derivative of ``kl`` divided by ``n``, times a direction: ``d_out``
  (N, act_dim) in the outputs, ``d_log_std`` (act_dim,) in a Gaussian's log deviations. Returns and writes what
  ``backward`` does.
"""

from typing import Any

import numpy as np

from policies import mlp
from policies.actor import LOG_2PI
from policies.mlp import Array, Layer


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

        Args: obs: float32 (all rows, inputs), contiguous; of each batch a new array, by which it is known. rows: a
            slice, or int64 positions.
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


class Gaussian:
    """Independent normal distributions: means from the network, state-independent log deviations."""

    def __init__(self, log_std: Array, log_std_grad: Array):
        """Args: log_std, log_std_grad: (act_dim,), the parameters, and the gradient that `backward` writes."""
        self._log_std, self._log_std_grad = log_std, log_std_grad
        self._constant = np.float32(0.5 * LOG_2PI * len(log_std))

    def set(self, mean: Array) -> None:
        self._mean, self._inv_std = mean, np.exp(-self._log_std)

    def logp(self, act: Array) -> Array:
        self._z = (act - self._mean) * self._inv_std
        return -0.5 * np.einsum("ij,ij->i", self._z, self._z) - (self._log_std.sum() + self._constant)

    def entropy(self) -> float:
        return len(self._mean) * float(self._log_std.sum() + self._constant + np.float32(0.5 * len(self._log_std)))

    def freeze(self) -> tuple[Array, Array]:
        return self._mean.copy(), self._log_std.copy()

    def kl(self, old: tuple[Array, Array]) -> float:
        log_ratio = 2.0 * (old[1] - self._log_std)  # of the variances
        shift = (self._mean - old[0]) * self._inv_std
        of_stds = (np.expm1(log_ratio) - log_ratio).sum(dtype=np.float64)
        return 0.5 * float(len(shift) * of_stds + np.square(shift, out=shift).sum(dtype=np.float64))

    def backward(self, d_logp: Array, d_kl: float = 0.0, d_entropy: float = 0.0, old: Any = None) -> Array:
        grad = self._z * d_logp[:, None]
        d_log_std = np.einsum("ij,ij->j", grad, self._z)
        d_log_std += d_entropy * len(grad) - d_logp.sum()
        if d_kl:
            shift = (self._mean - old[0]) * self._inv_std
            of_stds = len(grad) * np.expm1(2.0 * (old[1] - self._log_std))
            d_log_std -= d_kl * (of_stds + np.einsum("ij,ij->j", shift, shift))
            grad += d_kl * shift
        grad *= self._inv_std
        self._log_std_grad[:] = d_log_std
        return grad

    def fisher(self, d_out: Array, d_log_std: Array, n: int) -> Array:
        # 1 / variance for the means, 2 for the log deviations, nothing between them
        np.multiply(d_log_std, 2.0 * len(d_out) / n, out=self._log_std_grad)
        return d_out * (np.square(self._inv_std) / n)


class Categorical:
    """Categorical distributions: logits from the network."""

    def set(self, logits: Array) -> None:
        self._log_probs = logits - logits.max(axis=1, keepdims=True)
        self._log_probs -= np.log(np.exp(self._log_probs).sum(axis=1, keepdims=True))
        self._probs = np.exp(self._log_probs)

    def logp(self, act: Array) -> Array:
        self._act = act[:, None]
        return np.take_along_axis(self._log_probs, self._act, 1)[:, 0]

    def entropy(self) -> float:
        return -float(np.einsum("ij,ij->", self._probs, self._log_probs))

    def freeze(self) -> tuple[Array, Array]:
        return self._probs, self._log_probs

    def kl(self, old: tuple[Array, Array]) -> float:
        return float((old[0] * (old[1] - self._log_probs)).sum(dtype=np.float64))

    def backward(self, d_logp: Array, d_kl: float = 0.0, d_entropy: float = 0.0, old: Any = None) -> Array:
        grad = self._probs * -d_logp[:, None]
        np.put_along_axis(grad, self._act, np.take_along_axis(grad, self._act, 1) + d_logp[:, None], 1)
        if d_kl:
            grad += d_kl * (self._probs - old[0])
        if d_entropy:
            surprise = self._log_probs - np.einsum("ij,ij->i", self._probs, self._log_probs)[:, None]
            grad -= d_entropy * self._probs * surprise
        return grad

    def fisher(self, d_out: Array, d_log_std: Array | None, n: int) -> Array:
        grad = self._probs * d_out  # diag(p) - p p' for the logits
        return (grad - self._probs * grad.sum(axis=1, keepdims=True)) / n
