"""Action distributions over the policy network's outputs, with their derivatives written out.

Both classes have the same methods. `set` takes the outputs for a batch, which the others use; all are float32:

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

from policies.actor import LOG_2PI
from policies.mlp import Array


class Gaussian:
    """Independent normal distributions: means from the network, state-independent log deviations."""

    def __init__(self, log_std: Array, log_std_grad: Array):
        """Args: log_std, log_std_grad: (act_dim,), the parameters, and the gradient that `backward` writes."""
        self._log_std, self._log_std_grad = log_std, log_std_grad
        self._constant = np.float32(0.5 * LOG_2PI * len(log_std))

    def set(self, mean: Array) -> None:
        self._mean, self._inv_std = mean, np.exp(-self._log_std)

    def logp(self, act: Array) -> Array:
        self._z = act - self._mean
        self._z *= self._inv_std
        logp = np.einsum("ij,ij->i", self._z, self._z)
        logp *= -0.5
        logp -= self._log_std.sum() + self._constant
        return logp

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
        grad -= self._probs * grad.sum(axis=1, keepdims=True)
        grad /= n
        return grad
