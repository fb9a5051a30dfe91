"""From a NumPy batch to minibatches: fresh tensors, an order that the seed alone decides, a thread count by rule."""

from contextlib import contextmanager

import numpy as np
import torch

# Rows times parameters that a thread must have to itself. Below, on 2 cores, a second thread brings little (320 steps
# of 125 rows got slower), and it costs a multiple wherever another process wants the core, as threads spin at barriers.
WORK_PER_THREAD = 8e6

POLICY_STREAM, VALUE_STREAM = 0, 1


def to_tensor(array, shape, dtype, device):
    """A copy in memory that torch allocated.

    BLAS may sum in another order where memory is aligned differently, so a batch that lies in foreign memory could give
    other bits; torch aligns all its memory alike.

    Args:
        array: array of any alignment and strides.
        shape: the shape it must have.
        dtype: torch dtype of the result.
        device: torch device.

    Returns:
        Tensor.

    Raises:
        ValueError: the array has another shape.
        FloatingPointError: a number is not finite.
    """
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.numpy()[...] = array
    if dtype.is_floating_point and not torch.isfinite(tensor.sum()):
        raise FloatingPointError("a number in the batch is not finite")
    return tensor.to(device)


def n_minibatches(hyper, n_rows):
    """Minibatches per pass. Args: hyper: resolved Hyper. n_rows: rows of the batch. Returns: int, 1 to n_rows."""
    return max(1, min(hyper.minibatches or round(n_rows / hyper.minibatch_rows), n_rows))


def shuffled(rng, n_rows, n_parts, device):
    """Row numbers of one pass in random order, dealt out into parts whose sizes differ by one at most.

    Args:
        rng: numpy.random.Generator.
        n_rows, n_parts: rows of the batch and number of minibatches.
        device: torch device.

    Returns:
        tuple of int64 tensors, together every number below `n_rows` once.
    """
    order = torch.from_numpy(rng.permutation(n_rows)).to(device)
    return order.tensor_split(n_parts)


def n_threads(available, rows, n_params):
    """As many torch threads as the largest product of an update can use.

    The rule looks at the work's size only: timing it would give other bits from run to run.

    Args:
        available: threads that may be used.
        rows: rows of the largest product.
        n_params: parameters of the network.

    Returns:
        int, 1 to `available`.
    """
    return max(1, min(available, int(rows * n_params / WORK_PER_THREAD)))


@contextmanager
def torch_threads(n):
    """Runs the block with `n` torch threads, and restores the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stream(seed, learner, update):
    """The random stream of one update. Args: seed: of the run. learner: its number. update: its counter."""
    return np.random.default_rng((seed, learner, update))
