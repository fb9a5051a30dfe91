"""Mean, standard deviation and extremes of the samples of all ranks, in one exchange.

Each rank sends the count, the mean and the sum of squared differences of its own samples; rank 0 merges them in rank
order (Chan, Golub and LeVeque, 1983, equations 1.5). Unlike sums of squares this loses no digits if the mean is far
from 0.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import BatchError, rank_mismatch
from .channel import Channel


class Statistics(NamedTuple):
    """Of the samples of all ranks. All are NaN if there are none."""

    mean: float
    std: float
    min: float
    max: float


class _Moments(NamedTuple):
    """Of some samples: their number, mean, sum of squared differences from it, and extremes."""

    n: int = 0
    mean: float = math.nan
    m2: float = math.nan
    min: float = math.nan
    max: float = math.nan


def statistics(channel: Channel, op: str, samples: Mapping[str, Any]) -> dict[str, Statistics]:
    """Collective: the statistics of each key's samples over all ranks, the same bits on every rank.

    Args:
        op: the collective call that this is part of.
        samples: for each key an array, tensor, list or number of any shape, or an empty one. The same keys in the same
            order on every rank.

    Raises:
        RankMismatchError: on every rank, if keys or their order differ.
        BatchError: on every rank, if values on one are not real numbers.
    """
    return channel.agree(
        op,
        lambda: {key: _moments(key, x) for key, x in samples.items()},
        lambda of_ranks: [_merge_all(op, of_ranks)] * channel.size,
    )


def _moments(key: str, x: Any) -> _Moments:
    array = adapter_for(x).to_numbers(x)
    if array.dtype.kind not in "fiub":
        raise BatchError(f"'{key}' holds {array.dtype}, which has no mean; give real numbers")
    array = array.astype(float).ravel()
    if not array.size:
        return _Moments()
    with np.errstate(all="ignore"):  # infinite samples are allowed
        mean = array.mean()
        if np.isfinite(mean):
            mean += (array - mean).mean()  # corrects the rounding
        m2 = np.square(array - mean).sum()
    return _Moments(array.size, float(mean), float(m2), float(array.min()), float(array.max()))


def _merge_all(op: str, of_ranks: list[dict[str, _Moments]]) -> dict[str, Statistics]:
    first = of_ranks[0]
    if any(list(own) != list(first) for own in of_ranks):
        keys = [", ".join(own) or "none" for own in of_ranks]
        raise rank_mismatch(f"{op}: every rank must ask for the same keys, in the same order", keys)
    merged = {key: functools.reduce(merge, (own[key] for own in of_ranks)) for key in first}
    return {
        key: Statistics(m.mean, math.sqrt(m.m2 / m.n) if m.n else math.nan, m.min, m.max) for key, m in merged.items()
    }


def merge(a: Any, b: Any) -> Any:
    """The moments (n, mean, m2, and extremes if both have them) of the samples of `a` and `b` together."""
    if not a.n or not b.n:
        return a if a.n else b
    n, delta = a.n + b.n, b.mean - a.mean
    merged = {
        "n": n,
        "mean": a.mean + delta * (b.n / n),
        "m2": a.m2 + b.m2 + delta * delta * (a.n * (b.n / n)),
    }
    if isinstance(a, _Moments):
        merged |= {"min": float(np.minimum(a.min, b.min)), "max": float(np.maximum(a.max, b.max))}
    return type(a)(**merged)
