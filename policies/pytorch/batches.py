"""Tensors and minibatches from a NumPy batch, and torch's number of threads."""

from contextlib import contextmanager

import numpy as np
import torch

from policies import minibatches


def to_tensor(array, shape, dtype, device):
    """A copy in memory that torch allocated.

    BLAS may sum in another order where memory is aligned differently, so a batch in other memory could give other bits;
    torch aligns all its memory in the same way.

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
    """policies.minibatches.shuffled in tensors: one pass over the whole batch in minibatches.

    Args:
        rng: numpy.random.Generator.
        part: policies.share.Part.
        n_parts: number of minibatches.
        device: torch device.

    Returns:
        iterator over (rows, n): int64 tensor, positions in `part`; number of rows of the whole minibatch.
    """
    places, sizes = zip(*minibatches.shuffled(rng, part, n_parts))
    rows = torch.from_numpy(np.concatenate(places)).to(device)
    return zip(rows.split([len(p) for p in places]), sizes)


@contextmanager
def torch_threads(n):
    """Context in which torch has `n` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
