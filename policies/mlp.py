"""A tanh network on NumPy arrays: the forward pass that the actor and the NumPy learners share."""

import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray
Layer = tuple[Array, Array]  # weight (inputs, outputs) and bias (outputs,)


def layers(params: Mapping[str, Array], net: str) -> list[Layer]:
    """Weight and bias of each layer. Args: params: named as policies.actor does. net: "policy" or "value"."""
    n_layers = sum(key.startswith(net) and key.endswith("/weight") for key in params)
    return [(params[f"{net}/{i}/weight"], params[f"{net}/{i}/bias"]) for i in range(n_layers)]


def buffers(layers: Sequence[Layer], n: int | None = None, shared: bool = False) -> list[Array]:
    """Room for each layer's outputs. Args: n: rows of a batch; None: a single row, without the first dimension."""
    rows = () if n is None else (n,)
    return [aligned((*rows, len(bias)), shared=shared) for _, bias in layers]


def forward(layers: Sequence[Layer], x: Array, outs: Sequence[Array]) -> Array:
    """Outputs of a network with tanh hidden layers and a linear output: the last of `outs`.

    Args: x: float32 (inputs,), or (N, inputs). outs: what `buffers` returned, or the first N rows of each; overwritten.
    """
    *hidden, last = zip(layers, outs)
    for (weight, bias), out in hidden:
        np.add(x.dot(weight, out), bias, out)
        x = np.tanh(out, out)
    (weight, bias), out = last
    return np.add(x.dot(weight, out), bias, out)


def aligned(shape: tuple[int, ...], dtype: type = np.float32, shared: bool = False) -> Array:
    """An array at the start of a cache line. Where memory begins elsewhere, BLAS may sum in another order.

    Args: shared: with children made by fork, which then change the same array instead of a copy of each page.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if shared and size:
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)
