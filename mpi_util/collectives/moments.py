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


class Moments(NamedTuple):
    """Of some samples: their number, mean, and sum of squared differences from it; numbers, or arrays elementwise."""

    n: float
    mean: Any
    m2: Any


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
        lambda: {key: _summary(key, x) for key, x in samples.items()},
        lambda of_ranks: [_merge_all(op, of_ranks)] * channel.size,
    )


def _summary(key: str, x: Any) -> tuple[Moments, float, float]:
    """(moments, minimum, maximum) of this rank's samples; NaN if there are none."""
    array = adapter_for(x).to_numbers(x)
    if array.dtype.kind not in "fiub":
        raise BatchError(f"'{key}' holds {array.dtype}, which has no mean; give real numbers")
    array = array.astype(float).ravel()
    if not array.size:
        return Moments(0, math.nan, math.nan), math.nan, math.nan
    with np.errstate(all="ignore"):  # infinite samples are allowed
        mean = array.mean()
        if np.isfinite(mean):
            mean += (array - mean).mean()  # corrects the rounding
        m2 = np.square(array - mean).sum()
    return Moments(array.size, float(mean), float(m2)), float(array.min()), float(array.max())


def _merge_all(op: str, of_ranks: list[dict[str, tuple[Moments, float, float]]]) -> dict[str, Statistics]:
    first = of_ranks[0]
    if any(list(own) != list(first) for own in of_ranks):
        keys = [", ".join(own) or "none" for own in of_ranks]
        raise rank_mismatch(f"{op}: every rank must ask for the same keys, in the same order", keys)
    return {key: _merged([own[key] for own in of_ranks]) for key in first}


def _merged(summaries: list[tuple[Moments, float, float]]) -> Statistics:
    moments, lowest, highest = zip(*[s for s in summaries if s[0].n] or summaries[:1])
    whole = functools.reduce(merge, moments)
    std = math.sqrt(whole.m2 / whole.n) if whole.n else math.nan
    return Statistics(whole.mean, std, float(np.min(lowest)), float(np.max(highest)))  # NaN if any sample is


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the samples of `a` and `b` together."""
    if not a.n or not b.n:
        return a if a.n else b
    n, delta = a.n + b.n, b.mean - a.mean
    return Moments(n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * (b.n / n)))
