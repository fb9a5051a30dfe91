"""What a policy and its value function share in every framework: both updates at the same time, and their log."""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor


class SideBySide:
    """Runs the policy's update and the value function's fit on one batch, at the same time where that is faster.

    They share nothing, so the bits are the same either way. Small networks keep one core busy each: two threads on one
    small product cost more than they gain, two learners on two cores do not (275 ms became 212 ms for 2x64 networks,
    49 ms became 32 ms for an early ppo-kl update). Learners that use several threads each, or a GPU, or that share
    their batch with other processes, run one after the other: the sums over processes must come in one order.

    Attributes:
        width: number of cores that the last update used.
    """

    def __init__(self, policy, val_func, **thread):
        """Args: policy: Policy. val_func: ValueFunction. thread: how the second thread starts, for its executor."""
        self.policy, self.val_func = policy, val_func
        self._second = ThreadPoolExecutor(1, **thread)

    def learn(self, obs, act, adv, ret, part=None):
        """One update of each.

        Args:
            obs, act, adv: as Policy.update takes them. ret: as ValueFunction.fit takes it.
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Returns:
            dict of str to float: what both log, the policy first.

        Raises:
            FloatingPointError, ValueError: as the learners raise them.
        """
        policy_log, value_log = Log(), Log()
        n_rows = len(obs) if part is None else part.total
        if self.at_once(n_rows):
            self.width = 2
            with self.both_running():
                fitted = self._second.submit(self.val_func.fit, obs, ret, value_log, part)
                try:
                    self.policy.update(obs, act, adv, policy_log, part)
                finally:
                    fitted.exception()  # waits for it
                fitted.result()
        else:
            self.width = self.n_threads(n_rows)
            self.policy.update(obs, act, adv, policy_log, part)
            self.val_func.fit(obs, ret, value_log, part)
        return {**policy_log, **value_log}

    def both_running(self):
        """Context manager for the time in which both run."""
        return contextlib.nullcontext()

    def at_once(self, n_rows):
        """Whether both run at the same time. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError

    def n_threads(self, n_rows):
        """Most threads that either uses on its own. Args: n_rows: rows of the whole batch."""
        raise NotImplementedError


class Log(dict):
    """A logger that keeps what it is given."""

    log = dict.update


def finite_floats(log):
    """Numbers of an update as Python floats.

    Args:
        log: dict of str to number or 0-d tensor.

    Returns:
        dict of str to float.

    Raises:
        FloatingPointError: one of them is not finite; the line names it.
    """
    floats = {key: float(value) for key, value in log.items()}
    for key, value in floats.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"{key} is {value} after the update")
    return floats
