"""How several learners update synchronously on one batch, each on its own rows of it.

A single learner (`ALONE`) has the whole batch. Several draw the same minibatches of the whole batch from the same
stream; each takes its own rows of them, and gradients, mean divergences and moments are summed over the learners. The
result is that of one learner on the whole batch, up to rounding. Every decision (to stop, to shorten a step, to refuse
a number) is taken on such a sum, so that all learners take it together and none waits for another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class LearnerGroup:
    """What several learners that update synchronously do together; without arguments that of a single learner."""

    n_learners: int = 1
    index: int = 0  # of this learner, 0 to n_learners - 1
    # Collective among the learners: the sum of an array over them, the same bits on each; it may be overwritten and
    # returned. It is C-contiguous, float32 or float64, of the same shape on each.
    sum: Callable[[Array], Array] = lambda x: x


ALONE = LearnerGroup()


@dataclass(frozen=True)
class Part:
    """The rows of a batch that one learner holds."""

    rows: Array  # int64 (n,), their numbers in the whole batch, ascending
    total: int  # rows of the whole batch

    @classmethod
    def whole(cls, n: int) -> "Part":
        """All of a batch of `n` rows."""
        return cls(np.arange(n), n)

    def __len__(self) -> int:
        return len(self.rows)
