"""How a batch is shared between learners that update in step, each on its own rows of it.

With one learner (`Alone`) it holds the whole batch. With several, every one draws the same minibatches of the whole
batch from the same stream, takes its own rows of each, and what must agree (gradients, mean divergences, moments) is
summed over the learners. So the result is that of one learner on the whole batch, up to rounding. Whatever decides
something (stop, shorten a step, refuse a number) is such a sum: no learner leaves the others alone in the next one.
"""

from dataclasses import dataclass

import numpy as np


class Alone:
    """One learner.

    A share of several learners has the same members; its `sum` is a collective call.

    Attributes:
        n_learners: learners that update in step.
        index: number of this one, 0 to n_learners - 1.
    """

    n_learners = 1
    index = 0

    def sum(self, x):
        """The sum over the learners, the same bits for each.

        Args:
            x: C-contiguous float32 or float64 array, of the same shape on each.

        Returns:
            `x` itself, overwritten with the sum.
        """
        return x


ALONE = Alone()


@dataclass(frozen=True)
class Part:
    """The rows of a batch that one learner holds.

    Attributes:
        rows: int64 (n,), their numbers in the whole batch, ascending.
        total: rows of the whole batch.
    """

    rows: np.ndarray
    total: int

    @classmethod
    def whole(cls, n):
        """All of a batch of `n` rows."""
        return cls(np.arange(n), n)

    def __len__(self):
        return len(self.rows)

    @property
    def weight(self):
        """Share of the whole batch, 0 to 1."""
        return len(self.rows) / self.total if self.total else 1.0

    def followed_by(self, other):
        """The part of the concatenation of two batches, this one's and then `other`'s."""
        return Part(np.concatenate((self.rows, other.rows + self.total)), self.total + other.total)

    def collect(self, share, rows):
        """Collective among the learners: the whole batch.

        Args:
            share: as Alone. rows: array, first axis this part's rows.

        Returns:
            float32 array, new, first axis the rows of the whole batch.
        """
        whole = np.zeros((self.total, *rows.shape[1:]), np.float32)
        whole[self.rows] = rows
        return share.sum(whole) if self.total else whole

    @classmethod
    def of_owners(cls, share, owners):
        """This learner's part of a batch whose rows belonged to the learners `owners`; of other learners, every nth."""
        if len(owners) and owners.max() < share.n_learners:
            return cls(np.flatnonzero(owners == share.index), len(owners))
        return cls(np.arange(share.index, len(owners), share.n_learners), len(owners))

    def positions(self):
        """int64 (total,): where in this part each row of the whole batch is; -1: not in it."""
        positions = np.full(self.total, -1)
        positions[self.rows] = np.arange(len(self.rows))
        return positions
