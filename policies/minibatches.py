"""Minibatches and numbers of threads, the same for every framework. The seed alone decides their order."""

import numpy as np


class TooFewRows(ValueError):
    """A minibatch has fewer rows than there are learners."""

    def __init__(self, rows, n_learners):
        super().__init__(
            f"--parallel average with --nprocs {n_learners}: a minibatch of {rows} rows has fewer than one for each "
            "process; set --minibatches lower, or --minibatch_rows higher"
        )


# Least work per thread, in rows times parameters. With less, on 2 cores, a second thread gains little (320 steps of 125
# rows got slower), and costs a multiple where another process needs the core, because threads spin at barriers.
WORK_PER_THREAD = 8e6

POLICY_STREAM, VALUE_STREAM = 0, 1


def stream(seed, learner, update):
    """Random generator of one update. Args: seed: of the run. learner: POLICY_STREAM or VALUE_STREAM. update: count."""
    return np.random.default_rng((seed, learner, update))


def n_minibatches(hyper, n_rows, n_learners=1):
    """Minibatches per pass.

    Args:
        hyper: resolved Hyper.
        n_rows: rows of the whole batch.
        n_learners: learners that share the batch.

    Returns:
        int, 1 to n_rows.

    Raises:
        TooFewRows: there are fewer rows in a minibatch than learners.
    """
    n = max(1, min(hyper.minibatches or round(n_rows / hyper.minibatch_rows), n_rows))
    if n_rows // n < n_learners > 1:
        raise TooFewRows(n_rows // n, n_learners)
    return n


def shuffled(rng, part, n_parts):
    """One pass over the whole batch in random order, in minibatches whose sizes differ by one at most.

    Args:
        rng: numpy.random.Generator, the same for each learner.
        part: policies.share.Part.
        n_parts: number of minibatches.

    Returns:
        iterator over (rows, n): int64 array, positions in `part` of its rows of the minibatch, each row once per pass;
        and the number of rows of the whole minibatch.
    """
    places = np.array_split(part.positions()[rng.permutation(part.total)], n_parts)
    return ((minibatch[minibatch >= 0], len(minibatch)) for minibatch in places)


def n_threads(available, rows, n_params):
    """Number of threads that the largest matrix product of an update can use.

    It depends on the size of the work only: with a measurement the bits would vary from run to run.

    Args:
        available: threads that may be used.
        rows: rows of the largest product.
        n_params: parameters of the network.

    Returns:
        int, 1 to `available`.
    """
    return max(1, min(available, int(rows * n_params / WORK_PER_THREAD)))
