"""The NumPy backend: tanh networks on the CPU, derivatives written out, no framework.

For minibatches of a hundred rows the bookkeeping of automatic differentiation costs more than the arithmetic. Read
`nets` first; `passes` has the derivatives, of a network and of the action distributions.
"""

from policies.numpy.nets import PolicyNet, ValueNet

__all__ = ["PolicyNet", "ValueNet"]
