"""Statistics of the samples of all ranks, for EpochLogger and mpi_statistics_scalar; in the process of each rank."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpi_util.arrays.adapters import adapter_for
from mpi_util.collectives.channel import channel_of
from mpi_util.collectives.moments import Moments, merge
from mpi_util.errors import BatchError, rank_mismatch
from mpi_util.ranks.identity import Comm


class Statistics(NamedTuple):
    """Of the samples of all ranks, `n` of them. All are NaN if there are none."""

    mean: float
    std: float
    min: float
    max: float
    n: float = 0.0


def statistics(op: str, samples: Mapping[str, Any], comm: Comm = None) -> dict[str, Statistics]:
    """Collective: the statistics of each key's samples over all ranks, the same bits on every rank.

    Args:
        op: the collective call that this is part of.
        samples: for each key an array, tensor, list or number of any shape, or an empty one. The same keys in the same
            order on every rank.

    Raises:
        RankMismatchError: on every rank, if keys or their order differ.
        BatchError: on every rank, if values on one are not real numbers.
    """

    def merged(of_ranks: list[dict[str, tuple[Moments, float, float]]]) -> list[dict[str, Statistics]]:
        keys = list(of_ranks[0])
        if any(list(own) != keys for own in of_ranks):
            table = [", ".join(own) or "none" for own in of_ranks]
            raise rank_mismatch(f"{op}: every rank must ask for the same keys, in the same order", table)
        return [{key: _merged([own[key] for own in of_ranks]) for key in keys}] * len(of_ranks)

    return channel_of(comm).agree(op, lambda: {key: _summary(key, x) for key, x in samples.items()}, merged)


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


def _merged(summaries: list[tuple[Moments, float, float]]) -> Statistics:
    moments, lowest, highest = zip(*[s for s in summaries if s[0].n] or summaries[:1])
    whole = functools.reduce(merge, moments)
    std = math.sqrt(whole.m2 / whole.n) if whole.n else math.nan
    # extremes are NaN if any sample is
    return Statistics(whole.mean, std, float(np.min(lowest)), float(np.max(highest)), whole.n)
