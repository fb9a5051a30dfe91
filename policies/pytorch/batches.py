"""From a NumPy batch to minibatches of fresh tensors, and the threads that work on them."""

from contextlib import contextmanager

import numpy as np
import torch

from policies import minibatches


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
    """
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.numpy()[...] = array
    return tensor.to(device)


def shuffled(rng, part, n_parts, device):
    """One pass in minibatches, as policies.minibatches.shuffled gives it, in tensors.

    Args:
        rng: numpy.random.Generator.
        part: policies.share.Part.
        n_parts: number of minibatches.
        device: torch device.

    Returns:
        iterator over (rows, n): int64 tensor, where in `part` its rows of the minibatch are; rows of the minibatch.
    """
    places, sizes = zip(*minibatches.shuffled(rng, part, n_parts))
    rows = torch.from_numpy(np.concatenate(places)).to(device)
    return zip(rows.split([len(p) for p in places]), sizes)


@contextmanager
def torch_threads(n):
    """Runs the block with `n` torch threads, and restores the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
