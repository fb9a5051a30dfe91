"""The learners of rank 0 in PyTorch."""

from policies.pytorch.policy import Policy
from policies.pytorch.side_by_side import SideBySide
from policies.pytorch.value import ValueFunction

__all__ = ["Policy", "SideBySide", "ValueFunction"]
