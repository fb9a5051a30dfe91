"""The policy's update and the value function's fit at the same time, with torch's threads."""

import sys
from contextlib import contextmanager

import torch

from policies.learners import SideBySide as Base

SWITCH_S = 1e-3  # both threads hold Python's lock for short moments only; the default of 5 ms makes them wait for it


class SideBySide(Base):
    """See policies.learners.SideBySide."""

    def __init__(self, policy, val_func):
        """Args: policy: Policy. val_func: ValueFunction."""
        super().__init__(policy, val_func, initializer=torch.set_num_threads, initargs=(1,))
        torch.set_num_threads(1)  # the count between updates: neither learner may change it under the other

    @contextmanager
    def both_running(self):
        """As the base class."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            yield
        finally:
            sys.setswitchinterval(before)

    def at_once(self, n_rows):
        """As the base class: where two cores are free and each learner uses one."""
        if self.policy.threads == 1 or self.policy.share.n_learners > 1:
            return False
        return all(x.device.type == "cpu" and x.n_threads(n_rows) == 1 for x in (self.policy, self.val_func))

    def n_threads(self, n_rows):
        """As the base class."""
        return max(x.n_threads(n_rows) for x in (self.policy, self.val_func))
