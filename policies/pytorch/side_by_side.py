"""The policy's update and the value function's fit at the same time, with torch's threads."""

import torch

from policies.learners import SideBySide as Base


class SideBySide(Base):
    """See policies.learners.SideBySide."""

    def __init__(self, policy, val_func):
        """Args: policy: Policy. val_func: ValueFunction."""
        super().__init__(policy, val_func, initializer=torch.set_num_threads, initargs=(1,))
        # MKL's vector functions note the kind of processor at their first call. Where two threads make it at once, one
        # computes with 4 correct digits, in one of some 300 processes (github.com/pytorch/pytorch/issues/188792).
        torch.zeros(1).exp_()
        torch.set_num_threads(1)  # the count between updates: neither learner may change it under the other
