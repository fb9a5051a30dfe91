"""The learners in PyTorch: policy, value function, update rules, each with its derivatives written out.

It imports torch and the framework-free modules of `policies`. Read `policy` first, then `ppo`; `nets` and `dists` have
the arithmetic.
"""

from policies.pytorch.policy import Policy
from policies.pytorch.side_by_side import SideBySide
from policies.pytorch.value import ValueFunction

__all__ = ["Policy", "SideBySide", "ValueFunction"]
