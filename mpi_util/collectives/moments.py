"""Merges the running means and deviations (normalisers) that each rank updates; in the process of each rank.

Each rank sends the count, the mean and the sum of squared differences of its own samples. Unlike sums of squares this
loses no digits if the mean is far from 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import BatchError, rank_mismatch
from ..ranks.identity import Comm
from .channel import channel_of

_HELD_AS = ("obs_rms", "return_rms", "ret_rms")  # by Gymnasium's wrappers and by Stable-Baselines3's VecNormalize
_INSIDE = ("env", "venv", "envs")  # attributes in which wrappers and vector environments keep what they wrap
_MERGED = "_mpi_util_merged"  # attribute of an object: its state at the last merge, which copies and pickles keep
_ROUNDING = 1e-6


class Moments(NamedTuple):
    """Of some samples: their number, mean, and sum of squared differences from it; numbers, or arrays elementwise."""

    n: float
    mean: Any
    m2: Any


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the samples of `a` and `b` together."""
    if not a.n or not b.n:
        return a if a.n else b
    n, delta = a.n + b.n, b.mean - a.mean
    return Moments(n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * (b.n / n)))


def merge_moments(holder: Any, *, comm: Comm = None) -> None:
    """Collective: gives normalisers that each rank has updated one state: the last merged one and what each rank added.

    Call it once per iteration, such as after a rollout. If ranks start from a state that is not empty, such as that of
    a resumed run, call it before the first rollout too: a state that is the same on all ranks counts once. Equations
    1.5 of Chan, Golub and LeVeque (1983), in float64 and rank order: the same bits on every rank, but not for every
    number of ranks. If you need that, update the normaliser on rank 0 with the gathered rows, and send it with the
    weights.

    Args:
        holder: object with attributes mean, var (arrays, tensors or numbers; var divides by count) and count, or an
            object that holds some: Gymnasium's NormalizeObservation and NormalizeReward, Stable-Baselines3's
            VecNormalize, wrappers and vector environments around them, dicts. The same ones on every rank; they are
            changed in place.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: on every rank, if names or shapes differ.
        BatchError: on every rank, if one has no such object.
    """
    found: dict[str, Any] = {}

    def describe() -> dict[str, tuple[Moments, Moments | None]]:
        found.update(_find(holder))
        if not found:
            raise BatchError(f"merge_moments: no object with mean, var and count in a {type(holder).__name__}")
        for name, rms in found.items():
            try:
                vars(rms)[_MERGED], rms.count = vars(rms).get(_MERGED), rms.count
            except (AttributeError, TypeError) as error:
                raise BatchError(f"merge_moments: '{name}', a {type(rms).__name__}, takes no values: {error}") from None
        return {name: (_state(rms), _last(rms)) for name, rms in found.items()}

    def merged(of_ranks: list[dict[str, tuple[Moments, Moments | None]]]) -> list[dict[str, Moments | None]]:
        shapes = [{name: now.mean.shape for name, (now, _) in states.items()} for states in of_ranks]
        if any(s != shapes[0] for s in shapes):
            raise rank_mismatch("merge_moments: names and shapes must be the same on every rank", shapes)
        return [{name: _merge_one([states[name] for states in of_ranks]) for name in shapes[0]}] * len(of_ranks)

    for name, state in channel_of(comm).agree("merge_moments", describe, merged).items():
        if state is not None:
            _write(found[name], state)
        vars(found[name])[_MERGED] = tuple(_state(found[name]))  # in the object's own dtype


def _find(holder: Any, name: str = "", outside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, object) of each object with mean, var and count in `holder`. outside: ids of the objects that hold it."""
    if id(holder) in outside:
        return
    if all(hasattr(holder, key) for key in ("mean", "var", "count")):
        yield name, holder
        return
    if isinstance(holder, (dict, list, tuple)):
        inside = dict(holder if isinstance(holder, dict) else enumerate(holder))
    else:  # not getattr: a wrapper may pass it on to what it wraps
        inside = {key: value for key, value in getattr(holder, "__dict__", {}).items() if key in (*_HELD_AS, *_INSIDE)}
    for key, value in inside.items():
        yield from _find(value, f"{name}/{key}" if name else str(key), (*outside, id(holder)))


def _state(rms: Any) -> Moments:
    count, mean, var = (np.asarray(adapter_for(x).to_numbers(x), float) for x in (rms.count, rms.mean, rms.var))
    return Moments(float(count), mean, var * count)


def _last(rms: Any) -> Moments | None:
    """The state at the last merge, unless the object has been reset since."""
    if vars(rms)[_MERGED] is None:
        return None
    now, last = _state(rms), Moments(*vars(rms)[_MERGED])
    longer = now.n > last.n and now.mean.shape == last.mean.shape
    goes_on = (_added(now, last).m2 >= -_ROUNDING * (1 + now.m2)).all() if longer else _same(now, last)
    return last if goes_on else None


def _same(a: Moments, b: Moments) -> bool:
    return a.n == b.n and np.array_equal(a.mean, b.mean) and np.array_equal(a.m2, b.m2)


def _merge_one(states: list[tuple[Moments, Moments | None]]) -> Moments | None:
    """All ranks' (state, last merged state) of one object merged. None: one rank, or all start from the same state."""
    first, base = states[0]
    if len(states) == 1 or all(before is None and _same(now, first) for now, before in states):
        return None
    total = base or Moments(0.0, first.mean, first.m2)
    for now, before in states:
        total = merge(total, _added(now, before))
    return total


def _added(now: Moments, before: Moments | None) -> Moments:
    """The samples added since `before` (equation 1.5 solved for them)."""
    if before is None or not before.n:
        return now
    n = now.n - before.n
    if not n:
        return Moments(0.0, now.mean, now.m2)
    mean = now.mean + (now.mean - before.mean) * (before.n / n)
    delta = mean - before.mean
    return Moments(n, mean, now.m2 - before.m2 - delta * delta * (before.n * (n / now.n)))


def _write(rms: Any, state: Moments) -> None:
    for name, value in (("mean", state.mean), ("var", state.m2 / state.n if state.n else state.m2), ("count", state.n)):
        old = getattr(rms, name)
        if isinstance(old, (int, float)):
            value = type(old)(value)
        else:
            dtype = adapter_for(old).to_numbers(old).dtype
            value = adapter_for(old).from_numbers(np.asarray(value).astype(dtype), old)
        setattr(rms, name, value)
