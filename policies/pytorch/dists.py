"""Action distributions over the policy network's outputs, with their derivatives written out.

Both classes have the same methods. `set` takes the outputs for a batch, which the others use:

- ``logp(act)``: log-probability of each action, nats, float32 (N,)
- ``entropy()``: mean entropy, nats, float32 ()
- ``freeze()``: a copy of this distribution for ``kl``
- ``kl(old)``: mean KL(old || this), nats, float32 ()
- ``backward(d_logp, d_kl, d_entropy, old)``: derivative of a loss with respect to the outputs, float32 (N, act_dim), by
  the chain rule from the loss's derivatives by the last ``logp(act)``, ``d_logp`` (N,), by ``kl(old)``, ``d_kl``, and
  by ``entropy()``, ``d_entropy``. A Gaussian also writes the derivative by its log deviations.
- ``fisher(d_out, d_log_std, n, weight)``: the Fisher matrix of the outputs, the second derivative of ``kl``, times a
  direction: ``d_out`` (N, act_dim) in the outputs, ``d_log_std`` (act_dim,) in a Gaussian's log deviations. The rows
  are divided by ``n``, the deviations' part is multiplied by ``weight``. Returns and writes what ``backward`` does.
"""

import math

import torch

LOG_2PI = math.log(2.0 * math.pi)


class Gaussian:
    """Independent normal distributions: means from the network, state-independent log deviations."""

    def __init__(self, log_std, log_std_grad):
        """Args: log_std, log_std_grad: float32 (act_dim,), the parameters, and the gradient that `backward` writes."""
        self._log_std = log_std
        self._log_std_grad = log_std_grad
        self._constant = 0.5 * LOG_2PI * log_std.numel()
        self._mean = self._inv_std = self._z = None

    def set(self, mean):
        """Args: mean: float32 (N, act_dim)."""
        self._mean = mean
        self._inv_std = self._log_std.neg().exp_()

    def logp(self, act):
        """Args: act: float32 (N, act_dim)."""
        self._z = (act - self._mean).mul_(self._inv_std)
        return self._z.square().sum(1).mul_(-0.5).sub_(self._log_std.sum() + self._constant)

    def entropy(self):
        """See the module."""
        return self._log_std.sum() + (self._constant + 0.5 * self._log_std.numel())

    def freeze(self):
        """See the module."""
        return self._mean.clone(), self._log_std.clone()

    def kl(self, old):
        """Args: old: what `freeze` returned."""
        ratio, shift = self._against(old)
        return (ratio - ratio.log()).sum().sub_(ratio.numel()).add_(shift.square().sum() / len(shift)).mul_(0.5)

    def _against(self, old):
        """Variance ratio old / new, (act_dim,), and shift of the mean in new deviations, (N, act_dim)."""
        old_mean, old_log_std = old
        return (old_log_std - self._log_std).mul_(2.0).exp_(), (self._mean - old_mean).mul_(self._inv_std)

    def backward(self, d_logp, d_kl=0.0, d_entropy=0.0, old=None):
        """See the module."""
        grad = self._z * d_logp.unsqueeze(1)
        torch.sum(grad * self._z, 0, out=self._log_std_grad)
        self._log_std_grad.sub_(d_logp.sum()).add_(d_entropy)
        if d_kl:
            ratio, shift = self._against(old)
            self._log_std_grad.add_((1.0 - ratio).sub_(shift.square().sum(0), alpha=1.0 / len(shift)), alpha=d_kl)
            grad.add_(shift, alpha=d_kl / len(shift))
        return grad.mul_(self._inv_std)

    def fisher(self, d_out, d_log_std, n, weight):
        """See the module: 1 / variance for the means, 2 for the log deviations, nothing between them."""
        torch.mul(d_log_std, 2.0 * weight, out=self._log_std_grad)
        return d_out * self._inv_std.square().div_(n)


class Categorical:
    """Categorical distributions: logits from the network."""

    def __init__(self):
        self._log_probs = self._probs = self._act = None

    def set(self, logits):
        """Args: logits: float32 (N, act_dim)."""
        self._log_probs = torch.log_softmax(logits, 1)
        self._probs = self._log_probs.exp()

    def logp(self, act):
        """Args: act: int64 (N,)."""
        self._act = act.unsqueeze(1)
        return self._log_probs.gather(1, self._act).squeeze(1)

    def entropy(self):
        """See the module."""
        return self._row_entropy().mean()

    def _row_entropy(self):
        return (self._probs * self._log_probs).sum(1).neg_()

    def freeze(self):
        """See the module."""
        return self._probs, self._log_probs

    def kl(self, old):
        """Args: old: what `freeze` returned."""
        old_probs, old_log_probs = old
        return (old_probs * (old_log_probs - self._log_probs)).sum(1).mean()

    def backward(self, d_logp, d_kl=0.0, d_entropy=0.0, old=None):
        """See the module."""
        n = len(d_logp)
        d_logp = d_logp.unsqueeze(1)
        grad = (self._probs * d_logp).neg_().scatter_add_(1, self._act, d_logp)
        if d_kl:
            grad.add_(self._probs - old[0], alpha=d_kl / n)
        if d_entropy:
            surprise = self._log_probs + self._row_entropy().unsqueeze(1)
            grad.addcmul_(self._probs, surprise, value=-d_entropy / n)
        return grad

    def fisher(self, d_out, d_log_std, n, weight):
        """See the module: diag(p) - p p' for the logits."""
        grad = self._probs * d_out
        return grad.addcmul_(self._probs, grad.sum(1, keepdim=True), value=-1.0).div_(n)
