"""Copies of NumPy batches."""

import numpy as np


def own_copy(array, shape, dtype):
    """A copy for the learner: the caller may overwrite its memory while a tensor still uses it.

    Args:
        array: array of any alignment and strides.
        shape: the shape it must have.
        dtype: NumPy dtype of the result.

    Returns:
        array, C-contiguous.

    Raises:
        ValueError: the array has another shape.
    """
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    return np.array(array, dtype, order="C")
