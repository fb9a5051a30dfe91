"""The policy's update and the value function's fit at the same time, on two cores."""

from concurrent.futures import ThreadPoolExecutor


class SideBySide:
    """Runs both learners on a batch. They share nothing, so the bits are the same together as one after the other.

    Small networks keep one core busy each. Learners whose operations use several threads each, or a GPU, or that share
    their batch with other processes, run one after the other: the sums over processes must come in one order.
    """

    def __init__(self, policy, val_func):
        """Args: policy: Policy. val_func: ValueFunction."""
        self.policy, self.val_func = policy, val_func
        self._worker = ThreadPoolExecutor(1)

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
        at_once = self._at_once()
        self.width = 2 if at_once else self.policy.op_threads
        if at_once:
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

    def _at_once(self):
        """Whether both run at the same time."""
        policy = self.policy
        if policy.threads == 1 or policy.op_threads > 1 or policy.share.n_learners > 1:
            return False
        return policy.device.startswith("/CPU")


class _Log(dict):
    """A logger that keeps what it is given."""

    log = dict.update
