"""The PyTorch backend: modules and autograd, on the CPU or a GPU; any network of the user's too.

Read `nets` first; `modules` has the built-in networks, and loads the user's.
"""

from policies.torch.nets import PolicyNet, ValueNet

__all__ = ["PolicyNet", "ValueNet"]
