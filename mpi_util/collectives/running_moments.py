"""Running means and deviations (normalisers) that each rank updates with its own samples, merged over the ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import BatchError, rank_mismatch
from ..launch.identity import Comm
from .comm import channel_of
from .moments import merge

_HELD_AS = ("obs_rms", "return_rms", "ret_rms")  # by Gymnasium's wrappers and by Stable-Baselines3's VecNormalize
_INSIDE = ("env", "venv", "envs")  # where a wrapper or a vector environment keeps what is inside


class _State(NamedTuple):
    """Of some samples: their number, mean, and sum of squared differences from it, elementwise."""

    n: float
    mean: np.ndarray
    m2: np.ndarray


_MERGED = "_mpi_util_merged"  # attribute of an object: its state at the last merge, which copies and pickles keep
_ROUNDING = 1e-6


def merge_moments(holder: Any, *, comm: Comm = None) -> None:
    """Collective: normalisers that ranks have updated apart become one: the last merged state and what each rank added.

    Call it once per iteration, as after a rollout. Where ranks start from a state that is not empty, such as that of a
    resumed run, call it before the first rollout too: what is the same on all ranks counts once. Equations 1.5 of Chan,
    Golub and LeVeque (1983), in float64 and rank order: the same bits on every rank, but not for every number of ranks.
    For that update the normaliser on rank 0, with the gathered rows, and send it with the weights.

    Args:
        holder: object with attributes mean, var (arrays, tensors or numbers; var divides by count) and count, or what
            holds such: Gymnasium's NormalizeObservation and NormalizeReward, Stable-Baselines3's VecNormalize, wrappers
            and vector environments around them, dicts. The same ones on every rank; they are changed in place.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: on every rank, if names or shapes differ.
        BatchError: on every rank, if one has no such object.
    """
    found: dict[str, Any] = {}

    def bring() -> dict[str, tuple[_State, _State | None]]:
        found.update(_find(holder))
        if not found:
            raise BatchError(f"merge_moments: no object with mean, var and count in a {type(holder).__name__}")
        for name, rms in found.items():
            try:
                vars(rms)[_MERGED] = vars(rms).get(_MERGED)
                rms.count = rms.count
            except (AttributeError, TypeError) as error:
                raise BatchError(f"merge_moments: '{name}', a {type(rms).__name__}, takes no values: {error}") from None
        return {name: (_state(rms), _last(rms)) for name, rms in found.items()}

    channel = channel_of(comm)
    for name, state in channel.agree("merge_moments", bring, lambda all_: [_merge_all(all_)] * channel.size).items():
        if state is not None:
            _write(found[name], state)
        vars(found[name])[_MERGED] = tuple(_state(found[name]))  # as it is in the object's own dtype


def _find(holder: Any, name: str = "", outside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, object with mean, var and count) of all in `holder`. outside: ids of what holds it."""
    if id(holder) in outside:
        return
    if all(hasattr(holder, key) for key in ("mean", "var", "count")):
        yield name, holder
        return
    if isinstance(holder, (dict, list, tuple)):
        inside = dict(holder if isinstance(holder, dict) else enumerate(holder))
    else:  # not getattr: wrappers may pass it on to what is inside
        inside = {key: value for key, value in getattr(holder, "__dict__", {}).items() if key in (*_HELD_AS, *_INSIDE)}
    for key, value in inside.items():
        yield from _find(value, f"{name}/{key}" if name else str(key), (*outside, id(holder)))


def _state(rms: Any) -> _State:
    count, mean, var = (
        np.asarray(adapter_for(value).to_numbers(value), float) for value in (rms.count, rms.mean, rms.var)
    )
    return _State(float(count), mean, var * count)


def _last(rms: Any) -> _State | None:
    """The state at the last merge, unless the object has been reset since."""
    if vars(rms)[_MERGED] is None:
        return None
    now, last = _state(rms), _State(*vars(rms)[_MERGED])
    if now.n <= last.n or now.mean.shape != last.mean.shape:
        return last if _same(now, last) else None
    return last if (_added(now, last).m2 >= -_ROUNDING * (1 + now.m2)).all() else None


def _same(a: _State, b: _State) -> bool:
    return a.n == b.n and np.array_equal(a.mean, b.mean) and np.array_equal(a.m2, b.m2)


def _merge_all(brought: list[dict[str, tuple[_State, _State | None]]]) -> dict[str, _State | None]:
    shapes = [{name: now.mean.shape for name, (now, _) in b.items()} for b in brought]
    if any(s != shapes[0] for s in shapes):
        raise rank_mismatch("merge_moments: every rank must bring the same names and shapes", shapes)
    return {name: _merge_one([b[name] for b in brought]) for name in brought[0]}


def _merge_one(brought: list[tuple[_State, _State | None]]) -> _State | None:
    """All ranks' states of one object as one. None: it stays as it is, on one rank, or where all begin with it."""
    first, base = brought[0]
    if len(brought) == 1 or all(before is None and _same(now, first) for now, before in brought):
        return None
    total = base or _State(0.0, first.mean, first.m2)
    for now, before in brought:
        total = merge(total, _added(now, before))
    return total


def _added(now: _State, before: _State | None) -> _State:
    """What has come to `before` (equation 1.5 the other way round)."""
    if before is None or not before.n:
        return now
    n = now.n - before.n
    if not n:
        return _State(0.0, now.mean, now.m2)
    mean = now.mean + (now.mean - before.mean) * (before.n / n)
    delta = mean - before.mean
    return _State(n, mean, now.m2 - before.m2 - delta * delta * (before.n * (n / now.n)))


def _write(rms: Any, state: _State) -> None:
    for name, value in (("mean", state.mean), ("var", state.m2 / state.n if state.n else state.m2), ("count", state.n)):
        old = getattr(rms, name)
        if isinstance(old, (int, float)):
            value = type(old)(value)
        else:
            dtype = adapter_for(old).to_numbers(old).dtype
            value = adapter_for(old).from_numbers(np.asarray(value).astype(dtype), old)
        setattr(rms, name, value)
