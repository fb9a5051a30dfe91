"""The learners in TensorFlow: they do the same as those in PyTorch, up to rounding, and share their checkpoints.

It imports TensorFlow and the framework-free modules of `policies`. Read `policy` first, then `ppo`; import TensorFlow
from `setup` only.
"""

from policies.learners import SideBySide
from policies.tf.policy import Policy
from policies.tf.value import ValueFunction

__all__ = ["Policy", "SideBySide", "ValueFunction"]
