"""The learners of rank 0 in TensorFlow: twins of those in PyTorch, with the same results up to rounding."""

from policies.tf.policy import Policy
from policies.tf.side_by_side import SideBySide
from policies.tf.value import ValueFunction

__all__ = ["Policy", "SideBySide", "ValueFunction"]
