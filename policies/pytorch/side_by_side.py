"""The policy's update and the value function's fit at the same time, with torch's threads."""

import torch

from policies.learners import SideBySide as Base


class SideBySide(Base):
    """See policies.learners.SideBySide."""

    def __init__(self, policy, val_func):
        """Args: policy: Policy. val_func: ValueFunction."""
        super().__init__(policy, val_func, initializer=torch.set_num_threads, initargs=(1,))
        torch.set_num_threads(1)  # the count between updates: neither learner may change it under the other
