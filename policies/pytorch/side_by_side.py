"""The policy's update and the value function's fit at the same time, on two cores."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

SWITCH_S = 1e-3  # both threads hold Python's lock for short moments only; the default of 5 ms makes them wait for it


class SideBySide:
    """Runs both learners on a batch. They share nothing, so the bits are the same together as one after the other.

    Small networks keep one core busy each; two threads on one small product cost more than they bring, two learners on
    two cores do not: 275 ms became 212 ms for 2x64 networks, and 49 ms became 32 ms for an early ppo-kl update.
    Learners that use several threads each, or a GPU, or that share their batch with other processes, run one after the
    other: the sums over processes must come in one order. `width` is the number of cores that the last update used.
    """

    def __init__(self, policy, val_func):
        """Args: policy: Policy. val_func: ValueFunction."""
        self.policy, self.val_func = policy, val_func
        torch.set_num_threads(1)  # the count between updates: neither learner may change it under the other
        self._worker = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def learn(self, observes, actions, advantages, disc_sum_rew, part=None):
        """One update of each.

        Args:
            observes, actions, advantages: as Policy.update takes them.
            disc_sum_rew: as ValueFunction.fit takes it.
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Returns:
            dict of str to float: what both log, the policy first.

        Raises:
            FloatingPointError, ValueError: as the learners raise them.
        """
        policy_log, value_log = _Log(), _Log()
        n_rows = len(observes) if part is None else part.total
        at_once = self._at_once(n_rows)
        self.width = 2 if at_once else max(x.n_threads(n_rows) for x in (self.policy, self.val_func))
        if at_once:
            with _short_switches():
                fitted = self._worker.submit(self.val_func.fit, observes, disc_sum_rew, value_log, part)
                try:
                    self.policy.update(observes, actions, advantages, policy_log, part)
                finally:
                    fitted.exception()  # waits for it
                fitted.result()
        else:
            self.policy.update(observes, actions, advantages, policy_log, part)
            self.val_func.fit(observes, disc_sum_rew, value_log, part)
        return {**policy_log, **value_log}

    def _at_once(self, n_rows):
        """Whether both run at the same time on a batch of so many rows."""
        if self.policy.threads == 1 or self.policy.share.n_learners > 1:
            return False
        return all(x.device.type == "cpu" and x.n_threads(n_rows) == 1 for x in (self.policy, self.val_func))


class _Log(dict):
    """A logger that keeps what it is given."""

    log = dict.update


@contextmanager
def _short_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
