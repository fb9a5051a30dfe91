"""Adam on the weights of a network, with gradient clipping by norm."""

import numpy as np

from policies.tf.setup import tf

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Adam:
    """Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1, with both bias corrections folded into the step size.

    Keras' Adam adds epsilon after the corrections, and so takes other steps.

    Attributes:
        steps: number of steps so far.
        m, v: lists of tf.Variable, for each parameter the running mean of its gradient and of its square.
    """

    def __init__(self, net, hyper):
        """Args: net: Net. hyper: resolved Hyper, of which max_grad_norm and log_std_lr count."""
        self._net, self._max_norm = net, hyper.max_grad_norm
        self._parameters = list(net.views.values())
        self._boosts = [hyper.log_std_lr if key == "policy/log_std" else 1.0 for key in net.views]
        self.steps = 0
        self.m = [tf.Variable(tf.zeros_like(view)) for view in self._parameters]
        self.v = [tf.Variable(tf.zeros_like(view)) for view in self._parameters]
        signature = [tf.TensorSpec((net.n_params,)), tf.TensorSpec((2,))]
        self.step_flat = tf.function(self._step_flat, input_signature=signature)

    def moments(self):
        """`m` and `v` as float32 (P,) arrays."""
        return self._net.flatten(self.m).numpy(), self._net.flatten(self.v).numpy()

    def load(self, m, v, steps):
        """Restores the state. Args: m, v: as `moments` returns. steps: number of steps."""
        self._net.assign(m, self.m)
        self._net.assign(v, self.v)
        self.steps = steps

    def plan(self, lr, n=1):
        """Advances the step count; returns the bias-corrected numbers of each of these steps, for `step`.

        Args:
            lr: step size.
            n: number of steps to come.

        Returns:
            float32 (n, 2): step sizes and epsilons; computed in float64, because 1 - BETA2**t loses digits.
        """
        t = self.steps + np.arange(1, n + 1)
        self.steps += n
        bias = np.sqrt(1.0 - BETA2**t)
        return np.stack((lr * bias / (1.0 - BETA1**t), EPS * bias), 1).astype(np.float32)

    def step(self, grads, planned):
        """One step, inside a tf.function. A gradient that is not finite leaves parameters that are not.

        Args:
            grads: list of tensors, one for each parameter.
            planned: float32 (2,) tensor, a row of `plan`.
        """
        shrink = tf.minimum(self._max_norm / tf.linalg.global_norm(grads), 1.0)
        for parameter, m, v, grad, boost in zip(self._parameters, self.m, self.v, grads, self._boosts):
            tf.raw_ops.ResourceApplyAdam(
                var=parameter.handle, m=m.handle, v=v.handle, grad=grad * shrink,
                beta1_power=0.0, beta2_power=0.0,  # the bias corrections are in `planned`
                lr=planned[0] * boost, beta1=BETA1, beta2=BETA2, epsilon=planned[1],
            )  # fmt: skip

    def _step_flat(self, grad, planned):
        """`step` of a flat gradient, compiled. Args: grad: float32 (P,). planned: as `step`'s."""
        self.step(self._net.unflatten(grad), planned)
