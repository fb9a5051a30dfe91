"""Mean, standard deviation and extremes of samples that are spread over the ranks, in one exchange.

Each rank brings the count, the mean and the sum of squared differences of its own samples; rank 0 merges them in rank
order (Chan, Golub and LeVeque, 1983, equations 1.5). Unlike sums of squares that loses no digits where the mean is far
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
    """Of the samples of all ranks. All are NaN where no rank has any."""

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
        samples: for each key an array, tensor, list or number of any shape; as many as this rank has, maybe none. The
            same keys in the same order on every rank.

    Raises:
        RankMismatchError: on every rank, if keys or their order differ.
        BatchError: on every rank, if one brings something that is not real numbers.
    """
    return channel.agree(
        op,
        lambda: {key: _moments(key, x) for key, x in samples.items()},
        lambda brought: [_merge_all(op, brought)] * channel.size,
    )


def _moments(key: str, x: Any) -> _Moments:
    array = adapter_for(x).to_numbers(x)
    if array.dtype.kind not in "fiub":
        raise BatchError(f"'{key}' holds {array.dtype}, which has no mean; give real numbers")
    array = array.astype(float).ravel()
    if not array.size:
        return _Moments()
    with np.errstate(all="ignore"):  # infinite samples are the program's affair
        mean = array.mean()
        if np.isfinite(mean):
            mean += (array - mean).mean()  # what rounding has left
        m2 = np.square(array - mean).sum()
    return _Moments(array.size, float(mean), float(m2), float(array.min()), float(array.max()))


def _merge_all(op: str, brought: list[dict[str, _Moments]]) -> dict[str, Statistics]:
    if any(list(b) != list(brought[0]) for b in brought):
        keys = [", ".join(b) or "none" for b in brought]
        raise rank_mismatch(f"{op}: every rank must ask for the same keys, in the same order", keys)
    merged = {key: functools.reduce(merge, (b[key] for b in brought)) for key in brought[0]}
    return {
        key: Statistics(m.mean, math.sqrt(m.m2 / m.n) if m.n else math.nan, m.min, m.max) for key, m in merged.items()
    }


def merge(a: Any, b: Any) -> Any:
    """The moments (n, mean, m2, and extremes where they are kept) of the samples of `a` and `b` together."""
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
