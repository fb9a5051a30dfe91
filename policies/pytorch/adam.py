"""Adam on one flat parameter vector, with gradient clipping by norm."""

import math

import torch

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Adam:
    """Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1, with both bias corrections folded into the step size.

    Attributes:
        steps: number of steps so far.
        m, v: float32 (P,), running mean of the gradient and of its square.
    """

    def __init__(self, net, hyper):
        """Args: net: Net whose `flat` is stepped along its `grad`. hyper: its max_grad_norm and log_std_lr count."""
        self._flat, self._grad, self._max_norm = net.flat, net.grad, hyper.max_grad_norm
        self.steps = 0
        self.m = torch.zeros_like(net.flat)
        self.v = torch.zeros_like(net.flat)
        self._denominator = torch.empty_like(net.flat)
        self._boost = hyper.log_std_lr
        last = list(net.views)[-1]
        boosted = last == "policy/log_std" and self._boost != 1.0
        self._boosted = self._denominator[-net.views[last].numel() :] if boosted else None

    def moments(self):
        """Copies of `m` and `v`: float32 (P,) arrays."""
        return self.m.cpu().numpy().copy(), self.v.cpu().numpy().copy()

    def load(self, m, v, steps):
        """Restores the state. Args: m, v: as `moments` returns. steps: number of steps."""
        self.m.copy_(torch.tensor(m))
        self.v.copy_(torch.tensor(v))
        self.steps = steps

    def step(self, lr):
        """One step. Args: lr: step size. A gradient that is not finite makes every parameter NaN."""
        self.steps += 1
        grad = self._grad
        norm = torch.linalg.vector_norm(grad)
        grad.mul_((self._max_norm / norm).clamp_(max=1.0))
        self.m.lerp_(grad, 1.0 - BETA1)
        self.v.mul_(BETA2).addcmul_(grad, grad, value=1.0 - BETA2)
        torch.sqrt(self.v, out=self._denominator)
        bias = math.sqrt(1.0 - BETA2**self.steps)
        self._denominator.add_(EPS * bias)
        if self._boosted is not None:
            self._boosted.div_(self._boost)
        self._flat.addcdiv_(self.m, self._denominator, value=-lr * bias / (1.0 - BETA1**self.steps))
