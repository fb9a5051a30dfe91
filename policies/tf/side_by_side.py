"""The policy's update and the value function's fit at the same time, with TensorFlow's threads."""

from policies.learners import SideBySide as Base


class SideBySide(Base):
    """See policies.learners.SideBySide."""

    def at_once(self, n_rows):
        """As the base class: where two cores are free and each operation uses one."""
        policy = self.policy
        if policy.threads == 1 or policy.op_threads > 1 or policy.share.n_learners > 1:
            return False
        return policy.device.startswith("/CPU")

    def n_threads(self, n_rows):
        """As the base class."""
        return self.policy.op_threads
