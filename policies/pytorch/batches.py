"""Tensors and minibatches from a NumPy batch, and torch's number of threads."""

from contextlib import contextmanager

import numpy as np
import torch

from policies import minibatches


def to_tensor(array, shape, dtype, device):
    """A copy in memory that torch allocated.

    BLAS may sum in another order where memory is aligned differently, so a batch in other memory could give other bits;
    torch aligns all its memory in the same way.

    Args: array: of any alignment and strides. shape: that it must have, or ValueError. dtype, device: of the tensor.
    """
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.numpy()[...] = array
    return tensor.to(device)


def shuffled(rng, part, n_parts, device):
    """As policies.minibatches.shuffled, with rows as int64 tensors on a device."""
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
